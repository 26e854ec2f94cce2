"""KV between device and host in virtual time: a connector decides, a link takes its time, and nothing is torn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from tests.support.audit import AuditError
from tests.support.simulation_parts import (
    ListWorkload,
    PerTokenCost,
    SteadyCost,
    ask,
    crowd,
    engine_spec,
    fingerprint,
    rows,
    token_times,
)
from tests.support.tier_parts import (
    BLOCK_BYTES,
    HARDWARE,
    Server,
    conversation,
    drained,
    ids,
    mixed,
    offload,
    own_tier,
    serve,
)
from vllm_ext.config.kv_tier import PREFIX_POLICIES
from vllm_ext.kv.connector.tiered import TieredConnector
from vllm_ext.simulation.cost.link import Direction, TransferLink
from vllm_ext.simulation.engine.simulated_copies import SimulatedCopies
from vllm_ext.simulation.engine.simulated_engine import IDLE_STEP_S
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import RecordSpec, SimulationSpec
from vllm_ext.simulation.workloads.requests import SimRequest

_DEPTHS = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
_CONNECTORS = pytest.mark.parametrize(
    "connector",
    [
        {"kv_offload": offload()},
        {"kv_offload": offload(policy="arc")},
        *(
            {"system": system, "options": own_tier(bits=bits, store=store)}
            for system, bits, store in (
                ("fcfs", 16, "early"), ("fcfs", 8, "auto"), ("alise", 16, "auto"), ("alise", 8, "early"),
                ("auto", 16, "early"), ("auto", 8, "auto"),
            )
        ),
    ],
    ids=str,
)  # fmt: skip


def ttft(server: Server, req_id: str) -> float:
    row = rows(server.collector.table)[req_id]
    return float(row["first_token_s"] - row["arrival_s"])


# --- moments ------------------------------------------------------------------------------------------------------


def test_a_store_begins_with_the_next_step_and_a_load_holds_its_request_until_a_step_reports_it() -> None:
    """Worked out on paper: steps of 1 s, the link moves 2 blocks per second, and only the host caches.

    a (32 tokens) is computed in [0, 1]; the engine looks again at 1, which starts the store of its 2 blocks: [1, 2].
    b, at 3, has the same 32 tokens and one more: its load takes [3, 4], is seen at 4, and b is scheduled when the
    engine looks next, a millisecond later. Its one token takes 1 s.
    """
    server = serve(
        [ask("a", 0.0, 32, 1, token_ids=ids(200, 32)), ask("b", 3.0, 33, 1, token_ids=ids(200, 33))],
        SteadyCost(),
        blocks_per_s=2.0,
        kv_offload=offload(),
        prefix_caching=False,
    )
    assert token_times(server.collector.table) == {"a": [1.0], "b": [pytest.approx(4.0 + IDLE_STEP_S + 1.0)]}
    assert server.counters["tier_hit_tokens"] == 32
    assert server.counters["transfer_load_bytes"] == 2 * BLOCK_BYTES
    assert server.counters["transfer_store_bytes"] == 2 * BLOCK_BYTES
    assert server.counters["link_load_busy_fraction"] == pytest.approx(1.0 / server.engine.clock())
    drained(server)


def test_a_load_that_ends_during_a_step_is_reported_with_the_next_one() -> None:
    """As in vLLM, whose workers look for finished copies when they launch a step.

    c's steps of 1 s run from 3 on. b's load, behind the step [3, 4], takes [4, 4.5]; the step launched at 4 does not
    see it, that of 5 reports it when it ends at 6, and b's token is computed in [6, 7].
    """
    server = serve(
        [
            ask("a", 0.0, 32, 1, token_ids=ids(200, 32)),
            ask("c", 3.0, 10, 8),
            ask("b", 3.0, 33, 1, token_ids=ids(200, 33)),
        ],
        SteadyCost(),
        blocks_per_s=4.0,
        kv_offload=offload(),
        prefix_caching=False,
    )
    assert token_times(server.collector.table)["b"] == [7.0]
    assert token_times(server.collector.table)["c"] == [4.0 + i for i in range(8)]
    drained(server)


def test_copies_wait_for_the_steps_that_were_launched_before_them() -> None:
    copies = SimulatedCopies(TransferLink(1000.0), block_bytes=100, copies_per_block=1)
    copies.host_s, copies.stream_s = 1.0, 3.0
    copies.submit_store(7, _specs(5), CPULoadStoreSpec(list(range(5))))
    copies.host_s = 3.25
    assert copies.get_finished() == []
    copies.wait({7})
    assert copies.host_s == pytest.approx(3.5)
    assert copies.waited_s == pytest.approx(0.25)
    assert [result.job_id for result in copies.get_finished()] == [7]


def _specs(blocks: int) -> GPULoadStoreSpec:
    return GPULoadStoreSpec(list(range(1, blocks + 1)), group_sizes=[blocks], block_indices=[0])


# --- what it is good for --------------------------------------------------------------------------------------------


@_CONNECTORS
@_DEPTHS
def test_next_turn_is_loaded_from_the_host_instead_of_computed_again(
    async_scheduling: bool, connector: dict[str, Any]
) -> None:
    """Turn 1 leaves 80 tokens: five chunks of one block."""
    alone = serve(conversation(), async_scheduling=async_scheduling)
    tiered = drained(serve(conversation(), async_scheduling=async_scheduling, **connector))
    assert isinstance(tiered.scheduler.connector, TieredConnector) == ("options" in connector)
    assert rows(alone.collector.table)["turn-2"]["cached_prompt_tokens"] == 0
    assert rows(tiered.collector.table)["turn-2"]["cached_prompt_tokens"] == 80
    assert alone.collector.prefill_tokens - tiered.collector.prefill_tokens == 80
    assert tiered.counters["tier_hit_tokens"] == 80
    assert ttft(tiered, "turn-2") < ttft(alone, "turn-2")


@_DEPTHS
def test_over_a_slow_link_loading_takes_longer_than_computing(async_scheduling: bool) -> None:
    alone = serve(conversation(), async_scheduling=async_scheduling)
    slow = drained(serve(conversation(), kv_offload=offload(), blocks_per_s=5.0, async_scheduling=async_scheduling))
    assert rows(slow.collector.table)["turn-2"]["cached_prompt_tokens"] == 80
    assert ttft(slow, "turn-2") > ttft(alone, "turn-2") + 0.5


@pytest.mark.parametrize(
    ("connector", "cached", "chunks"),
    [
        ({"kv_offload": offload(offload_prompt_only=True)}, 64, 200),
        # Turn 1 leaves 5 full blocks: two chunks of two.
        ({"kv_offload": offload(blocks_per_chunk=2)}, 64, 100),
        ({"system": "fcfs", "options": own_tier(bits=16)}, 80, 200),
        ({"system": "fcfs", "options": own_tier(bits=8)}, 80, 320),
        ({"kv_offload": offload(blocks=6)}, 0, 6),
    ],
    ids=["prompt only", "chunks", "16 bits", "8 bits", "full"],
)
def test_only_what_the_host_keeps_in_full_chunks_is_loaded(connector: dict[str, Any], cached: int, chunks: int) -> None:
    server = drained(serve(conversation(), **connector))
    assert rows(server.collector.table)["turn-2"]["cached_prompt_tokens"] == cached
    assert server.counters["num_tier_chunks"] == chunks
    assert server.tier is not None
    assert (server.counters["tier_evicted_chunks"] > 0) == (server.tier.used_fraction == 1.0) == (cached == 0)


@_CONNECTORS
@_DEPTHS
def test_preempted_request_gets_its_kv_back_when_it_resumes(async_scheduling: bool, connector: dict[str, Any]) -> None:
    """Two requests that together outgrow the pool; without prefix caching, all that is found is on the host."""
    both = [ask(name, 0.0, 60, 70, max_tokens=90, token_ids=ids(200 * i, 60)) for i, name in enumerate(("a", "b"), 1)]
    options = {"num_blocks": 12, "async_scheduling": async_scheduling, "prefix_caching": False, "system": "fcfs"}
    alone, tiered = serve(both, **options), drained(serve(both, **{**connector, **options}))
    for server in (alone, tiered):
        assert server.collector.preemptions > 0
        assert set(server.collector.table.column("output_tokens")) == {70}
    assert tiered.counters["tier_hit_tokens"] >= 64
    saved = alone.collector.prefill_tokens - tiered.collector.prefill_tokens
    assert saved >= tiered.counters["tier_hit_tokens"] - 16


# --- what must not go wrong -----------------------------------------------------------------------------------------


@_DEPTHS
def test_blocks_of_a_request_aborted_during_its_load_come_back_when_the_load_is_through(async_scheduling: bool) -> None:
    workload = conversation()
    follow_up = workload.follow_ups

    def impatient(request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> list[SimRequest]:
        found = list(follow_up(request, finished_s, output_ids))
        for turn in found:
            turn.abort_after_s = 0.25
        return found

    workload.follow_ups = impatient
    server = drained(serve(workload, kv_offload=offload(), blocks_per_s=10.0, async_scheduling=async_scheduling))
    row = rows(server.collector.table)["turn-2"]
    assert (row["finish_reason"], row["output_tokens"]) == ("abort", 0)
    assert row["finish_s"] == pytest.approx(row["arrival_s"] + 0.25, abs=0.01)
    assert server.counters["transfer_load_bytes"] == 5 * BLOCK_BYTES
    assert server.engine.clock() >= row["arrival_s"] + 5 / 10.0


@_DEPTHS
def test_step_that_takes_blocks_still_being_stored_waits_for_the_copy(async_scheduling: bool) -> None:
    """a ends while its blocks go to the host at 1 block per second; b needs the whole pool."""
    requests = [ask("a", 0.0, 90, 3, token_ids=ids(200, 90)), ask("b", 0.5, 150, 3, token_ids=ids(600, 150))]
    server = drained(
        serve(requests, num_blocks=11, kv_offload=offload(), blocks_per_s=1.0, async_scheduling=async_scheduling)
    )
    assert server.counters["transfer_waited_s"] > 1.0
    assert ttft(server, "b") > 1.0


def test_auditor_finds_a_step_that_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedCopies, "wait", lambda self, job_ids: None)
    requests = [ask("a", 0.0, 90, 3, token_ids=ids(200, 90)), ask("b", 0.5, 150, 3, token_ids=ids(600, 150))]
    with pytest.raises(AuditError, match=r"b writes block \d+, which job \d+ reads"):
        serve(requests, num_blocks=11, kv_offload=offload(), blocks_per_s=1.0)


def test_auditor_finds_kv_that_is_used_before_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    on_time = SimulatedCopies.get_finished

    def too_early(copies: SimulatedCopies) -> list[TransferResult]:
        loads = [transfer.job_id for transfer in copies._begun.values() if transfer.direction is Direction.TO_DEVICE]
        return on_time(copies) + [TransferResult(job_id, success=True) for job_id in loads]

    monkeypatch.setattr(SimulatedCopies, "get_finished", too_early)
    with pytest.raises(AuditError, match="turn-2 reads block"):
        serve(conversation(), kv_offload=offload(), blocks_per_s=20.0)


def _upstreams(dice: random.Random, seed: int) -> dict[str, Any]:
    return {
        "kv_offload": offload(
            dice.choice([3, 10, 40, 200]),
            policy=dice.choice(["lru", "arc"]),
            blocks_per_chunk=dice.choice([1, 1, 2, 3]),
        ),
        "system": ("upstream-fcfs", "upstream-priority", "fcfs", "oracle-alise")[seed // 2 % 4],
    }


def _ours(dice: random.Random, seed: int) -> dict[str, Any]:
    options = own_tier(
        dice.choice([5, 10, 40, 200]),
        bits=dice.choice([16, 8]),
        policy=PREFIX_POLICIES[seed % 3],
        store=("early", "auto")[seed // 2 % 2],
    )
    system = ("fcfs", "oracle-alise", "auto", "alise")[seed // 2 % 4]
    return {"options": options, "system": system, "quantise_blocks_per_s": dice.choice([None, 500.0])}


def _gaps(dice: random.Random, seed: int) -> dict[str, Any]:
    options = own_tier(
        dice.choice([5, 10, 40, 200]),
        bits=dice.choice([16, 8]),
        load=("in-step", "auto")[seed // 2 % 2],
        gaps="fused",
    )
    return {
        "options": options,
        "system": ("pensieve", "alise+pensieve", "auto", "pensieve-published")[seed // 2 % 4],
    }


@pytest.mark.parametrize("connector", [_upstreams, _ours, _gaps])
@pytest.mark.parametrize("seed", range(12))
def test_no_copy_is_torn_and_nothing_is_left_whatever_happens(
    seed: int, connector: Callable[[random.Random, int], dict[str, Any]]
) -> None:
    """Conversations, shared prefixes, preemptions, aborts, full host memory, fast and slow links, all systems."""
    dice = random.Random(seed)
    workload = mixed(dice)
    server = serve(
        workload,
        dice.choice([PerTokenCost(), SteadyCost(device=0.01, host=0.002), SteadyCost(device=0.002, host=0.01)]),
        blocks_per_s=dice.choice([8.0, 80.0, 2000.0, 1e5]),
        num_blocks=dice.choice([12, 16, 24]),
        async_scheduling=bool(seed % 2),
        **connector(dice, seed),
    )
    drained(server)
    assert (getattr(server.scheduler, "gaps", None) is not None) == (connector is _gaps)
    assert sorted(server.collector.table.column("req_id").tolist()) == sorted(req_id for req_id, _, _ in workload.ended)
    finished = [row for row in server.collector.table.rows() if row["finish_reason"] != "abort"]
    assert all(row["output_tokens"] == row["true_output_tokens"] for row in finished)


def test_request_preempted_by_a_policy_is_not_loaded_in_the_same_step() -> None:
    """vLLM's connector takes the jobs of a request that is preempted in a step for stores: a load failed an assertion.

    ALISE preempts a request for another, and where room was left vLLM took it back at once, with a load.
    """
    server = serve(
        mixed(random.Random(3)),
        SteadyCost(device=0.002, host=0.01),
        kv_offload=offload(40),
        blocks_per_s=80.0,
        num_blocks=12,
        system="oracle-alise",
    )
    assert drained(server).collector.preemptions > 0


# --- the run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "connector",
    [
        {"kv_offload": offload(20)},
        *(
            {"system": "alise", "options": own_tier(8, policy=policy, store=store)}
            for policy in PREFIX_POLICIES
            for store in ("early", "ahead")
        ),
    ],
    ids=str,
)
@_DEPTHS
def test_run_reports_the_tier_and_repeats_itself(async_scheduling: bool, connector: dict[str, Any]) -> None:
    spec = SimulationSpec(
        engine=engine_spec(num_blocks=14, prefix_caching=True, async_scheduling=async_scheduling, **connector),
        hardware=HARDWARE,
        record=RecordSpec(token_times=True, decisions=True),
    )
    data, again = (simulate(spec, workload=ListWorkload(crowd()), cost=SteadyCost()) for _ in range(2))
    assert fingerprint(data, data.decisions or []) == fingerprint(again, again.decisions or [])
    counters = data.counters
    assert counters["transfer_store_bytes"] > 0
    if "kv_offload" in connector:
        assert counters["transfer_store_bytes"] > counters["transfer_load_bytes"] > 0
        assert counters["tier_hit_tokens"] > 0
    else:
        assert counters["tier_evicted_chunks"] > 0
        assert counters["tier_dropped_chunks"] == 0
    used, moved = data.series.column("tier_used_fraction"), data.series.column("transfer_bytes")
    assert moved[0] == 0
    assert 0 < used.max() <= 1
    assert 0 < moved[-1] <= counters["transfer_store_bytes"] + counters["transfer_load_bytes"]
    assert (moved[1:] >= moved[:-1]).all()


def test_without_a_tier_there_is_no_connector() -> None:
    server = serve([ask("a")], run=False)
    assert server.scheduler.connector is None
    spec = SimulationSpec(engine=engine_spec(num_blocks=14))
    data = simulate(spec, workload=ListWorkload([ask("a")]), cost=SteadyCost())
    assert not [name for name in data.counters if name.startswith(("tier", "transfer", "link"))]
