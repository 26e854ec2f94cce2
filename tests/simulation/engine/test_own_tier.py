"""Our KV tier in virtual time: the connector that serves, at its own sizes, under every system."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec

from tests.support.simulation_parts import ListWorkload, ask, engine_spec, rows
from tests.support.tier_parts import (
    BLOCK_BYTES,
    HARDWARE,
    conversation,
    drained,
    ids,
    mixed,
    offload,
    own_tier,
    serve,
)
from vllm_ext.kv.eviction.retention import RetentionCachePolicy
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.engine.tier import build_tier
from vllm_ext.simulation.run import build_scheduler
from vllm_ext.simulation.spec import Resolved, SimulationSpec, resolve
from vllm_ext.simulation.workloads.requests import SimRequest

_DEPTHS = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
FP8 = HardwareSpec(model="opt-13b", device="a100-40", kv_dtype_bytes=1)


# --- what it is good for --------------------------------------------------------------------------------------------


def test_8_bits_hold_more_chunks_and_move_as_many_bytes_less() -> None:
    """In blocks of 16 tokens 1.6 times as many, since four bytes of each channel are minimum and scale."""
    wide, narrow = (drained(serve(conversation(), system="fcfs", options=own_tier(400, bits=bits))) for bits in (16, 8))
    assert wide.counters["num_tier_chunks"] == 400
    assert narrow.counters["num_tier_chunks"] == 640
    assert wide.counters["tier_hit_tokens"] == narrow.counters["tier_hit_tokens"] == 80
    for name in ("transfer_load_bytes", "transfer_store_bytes"):
        assert wide.counters[name] / narrow.counters[name] == pytest.approx(1.6)
    assert wide.counters["transfer_load_bytes"] == 5 * BLOCK_BYTES
    assert narrow.counters["link_load_busy_fraction"] < wide.counters["link_load_busy_fraction"]


def test_quantisation_that_is_not_hidden_takes_its_time() -> None:
    """80 tokens come back as five blocks, at 10 blocks per second: 0.5 s beside the copy's."""
    hidden, shown = (
        drained(serve(conversation(), system="fcfs", options=own_tier(bits=8), quantise_blocks_per_s=rate))
        for rate in (None, 10.0)
    )
    turns = [rows(server.collector.table)["turn-2"] for server in (hidden, shown)]
    waits = [turn["first_token_s"] - turn["arrival_s"] for turn in turns]
    assert waits[1] - waits[0] == pytest.approx(0.5, abs=0.01)
    busy = [server.counters["link_load_busy_fraction"] * server.engine.clock() for server in (hidden, shown)]
    assert busy[1] - busy[0] == pytest.approx(0.5, abs=1e-3)


def resolved(hardware: HardwareSpec, **engine: Any) -> Resolved:
    described = engine_spec(**{"system": "fcfs", "num_blocks": 14, **engine})
    return resolve(SimulationSpec(engine=described, hardware=hardware))


def test_devices_of_a_group_share_the_tier() -> None:
    """The heads of OPT-13B on two devices: the same chunks in all, and half of each on a device."""
    counts = []
    for devices in (1, 2):
        hardware = HardwareSpec(model="opt-13b", device="a100-40", tensor_parallel=devices)
        described = resolved(hardware, options=own_tier(400, bits=8))
        tier = build_tier(build_scheduler(described), described)
        counts.append((tier.counters(0.0)["num_tier_chunks"], tier.copies.block_bytes * devices))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("devices", [1, 4])
def test_what_a_copy_is_learned_to_take_is_what_it_takes(devices: int, bits: int) -> None:
    hardware = HardwareSpec(model="opt-13b", device="a100-40", tensor_parallel=devices)
    described = resolved(hardware, options=own_tier(400, bits=bits))
    scheduler = build_scheduler(described)
    copies, prices = build_tier(scheduler, described).copies, scheduler.connector.connector_scheduler.prices
    device = GPULoadStoreSpec([1, 2], group_sizes=[2], block_indices=[0])
    copies.submit_store(7, device, BlockIDsLoadStoreSpec([0, 1]))
    copies.step_begins(1e6, 1e6)
    (result,) = copies.get_finished()
    prices.out.observe(result.transfer_size, result.transfer_time)
    assert prices.store_s(32) == pytest.approx(result.transfer_time, rel=0.01)


# --- what it has in common with vLLM's ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "arc"])
@_DEPTHS
@pytest.mark.parametrize("seed", range(4))
def test_at_16_bits_and_chunks_of_a_block_it_decides_as_vllms_own(
    seed: int, async_scheduling: bool, policy: str
) -> None:
    """Same policy, same bytes, same requests: every step is the same, and every copy ends at the same time."""
    blocks = (6, 12, 24, 200)[seed]
    shared = {"num_blocks": 14, "async_scheduling": async_scheduling, "system": "fcfs", "blocks_per_s": 200.0}
    upstream = serve(mixed(random.Random(seed)), kv_offload=offload(blocks, policy=policy), **shared)
    options = own_tier(blocks, policy=policy, store="early", bits=16)
    ours = serve(mixed(random.Random(seed)), options=options, **shared)
    assert drained(upstream).engine.decisions == drained(ours).engine.decisions
    assert upstream.counters == ours.counters
    assert repr(list(upstream.collector.table.rows())) == repr(list(ours.collector.table.rows()))  # nan is not nan


def test_eviction_goes_by_virtual_time() -> None:
    server = serve([ask("a")], system="fcfs", options=own_tier(policy="retention"), run=False)
    policy = server.scheduler.connector.connector_scheduler.manager._policy
    assert isinstance(policy, RetentionCachePolicy)
    server.engine.clock.advance(7.0)
    assert policy.clock() == 7.0


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"options": own_tier(0.5)}, "kv_tier.gib=0.0061"),
        ({"options": own_tier(bits=4)}, "kv_tier.bits=4: must be one of 16, 8"),
        ({"options": own_tier(policy="fifo")}, "kv_tier.policy='fifo'"),
        ({"options": {"kv_tier": {"gibs": 1}}}, "kv_tier.gibs=1: unknown option"),
        ({"options": own_tier(disk_dir="/no", disk_gib=1.0)}, "must be left out in a simulation, which has no disk"),
        ({"options": own_tier(bits=8), "hardware": FP8}, "needs KV of type"),
        ({"options": own_tier(), "system": "upstream-fcfs"}, "must be empty for upstream-fcfs"),
        ({"options": own_tier(), "kv_offload": offload()}, "kv_tier={'gib'"),
        ({"options": own_tier(), "kv_offload": offload()}, "must be left out beside kv_offload"),
        (
            {"kv_offload": {"cpu_bytes": 2 * BLOCK_BYTES - 1, "blocks_per_chunk": 2}},
            "cpu_bytes=26214399: must hold at least one chunk of 26214400 bytes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_can_not_be_are_refused_as_by_the_server(settings: dict[str, Any], says: str) -> None:
    hardware = settings.get("hardware", HARDWARE)
    engine = {name: value for name, value in settings.items() if name != "hardware"}
    with pytest.raises(ValueError) as caught:
        build_scheduler(resolved(hardware, **engine))
    assert says in str(caught.value)


def test_without_memory_there_is_no_tier() -> None:
    assert serve([ask("a")], system="fcfs", options={"kv_tier": {"gib": 0}}, run=False).scheduler.connector is None


# --- what was generated ---------------------------------------------------------------------------------------------


def talks(*, drops: bool) -> ListWorkload:
    """Twelve conversations of two turns, one after the other; next turns repeat the answer or have another instead."""
    first = [
        ask(f"turn-1-{i}", 10.0 * i, 64, 33, token_ids=ids(200 + 400 * i, 64), session_id=f"s{i}") for i in range(12)
    ]
    others = [ask(f"other-{i}", 2.5 * i + 1.0, 90, 4, token_ids=ids(9000 + 200 * i, 90)) for i in range(48)]

    def follow_up(request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> list[SimRequest]:
        if not request.req_id.startswith("turn-1"):
            return []
        answer = ids(100, len(output_ids)) if drops else list(output_ids)
        prompt = [*(request.token_ids or ()), *answer, *ids(150, 20)]
        name = request.req_id.replace("turn-1", "turn-2")
        return [ask(name, finished_s + 5.0, len(prompt), 3, token_ids=prompt, session_id=request.session_id)]

    return ListWorkload(sorted([*first, *others], key=lambda asked: asked.arrival_s), follow_up)


@pytest.mark.parametrize("drops", [False, True])
def test_what_next_turns_leave_out_is_not_stored_once_that_is_known(drops: bool) -> None:
    stored = {}
    for prompt_only in ("auto", False):
        server = drained(serve(talks(drops=drops), system="fcfs", options=own_tier(400, prompt_only=prompt_only)))
        state = server.scheduler.vllm_ext_state()["kv_tier"]  # type: ignore[attr-defined]
        counted = state["generated_chunks"]
        assert (counted["contained"], counted["omitted"]) == ((0, 24) if drops else (24, 0))
        assert state["low_reuse_salts"] == drops
        assert (counted["left_out"] > 0) == (prompt_only == "auto" and drops)
        stored[prompt_only] = state["stored_chunks"]
    assert (stored["auto"] < stored[False]) == drops
