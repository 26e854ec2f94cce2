"""Our KV tier in virtual time: the connector that serves, at its own sizes, under every system."""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec

from vllm_ext.config_checks import ConfigError
from vllm_ext.config_kv import PREFIX_POLICIES
from vllm_ext.kv.connector import TieredConnector
from vllm_ext.kv.retention import RetentionCachePolicy
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec
from vllm_ext.simulation.run import build_scheduler, simulate_parts
from vllm_ext.simulation.spec import RecordSpec, SimulationSpec
from vllm_ext.simulation.tier import build_tier

from .parts import ListWorkload, PerTokenCost, SteadyCost, ask, crowd, engine_spec, fingerprint, rows
from .tier_parts import BLOCK_BYTES, HARDWARE, conversation, drained, ids, mixed, offload, own_tier, serve

_DEPTHS = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])
_SYSTEMS = pytest.mark.parametrize("system", ["fcfs", "alise", "auto"])
_STORES = pytest.mark.parametrize("store", ["early", "late"])
_BITS = pytest.mark.parametrize("bits", [16, 8])


# --- what it is good for --------------------------------------------------------------------------------------------


@_STORES
@_BITS
@_SYSTEMS
@_DEPTHS
def test_next_turn_is_loaded_instead_of_computed(async_scheduling: bool, system: str, bits: int, store: str) -> None:
    """Turn 1 leaves 80 tokens: five chunks of one block."""
    options = own_tier(bits=bits, store=store, chunk_tokens=16)
    server = drained(serve(conversation(), async_scheduling=async_scheduling, system=system, options=options))
    assert isinstance(server.scheduler.connector, TieredConnector)
    assert rows(server.collector.table)["turn-2"]["cached_prompt_tokens"] == 80
    assert server.counters["tier_hit_tokens"] == 80


@pytest.mark.parametrize(("bits", "found"), [(16, 64), (8, 64)])
def test_chunks_have_the_size_that_serving_gives_them(bits: int, found: int) -> None:
    """32 tokens at 16 bits, 64 at 8: of 80 tokens 64 are in whole chunks either way."""
    server = drained(serve(conversation(), system="fcfs", options=own_tier(bits=bits)))
    assert rows(server.collector.table)["turn-2"]["cached_prompt_tokens"] == found
    assert server.tier is not None
    assert server.scheduler.connector.connector_scheduler.config.blocks_per_chunk == {16: 2, 8: 4}[bits]


@_STORES
@_DEPTHS
def test_preempted_request_comes_back_by_loading(async_scheduling: bool, store: str) -> None:
    """Two requests that together outgrow the pool; without prefix caching, all that is found is on the host."""
    both = [ask(name, 0.0, 60, 70, max_tokens=90, token_ids=ids(200 * i, 60)) for i, name in enumerate(("a", "b"), 1)]
    options = {"num_blocks": 12, "async_scheduling": async_scheduling, "prefix_caching": False, "system": "fcfs"}
    alone = serve(both, **options)
    tiered = drained(serve(both, options=own_tier(store=store, chunk_tokens=16), **options))
    for server in (alone, tiered):
        assert server.collector.preemptions > 0
        assert set(server.collector.table.ints("output_tokens")) == {70}
    assert tiered.counters["tier_hit_tokens"] >= 64
    assert alone.collector.prefill_tokens - tiered.collector.prefill_tokens >= tiered.counters["tier_hit_tokens"] - 16


def test_late_stores_copy_less_often_than_early_ones() -> None:
    early, late = (
        drained(serve(conversation(), system="fcfs", options=own_tier(store=store, chunk_tokens=16)))
        for store in ("early", "late")
    )
    assert late.auditor.checked_jobs < early.auditor.checked_jobs
    assert late.counters["transfer_store_bytes"] == early.counters["transfer_store_bytes"]


def test_8_bits_hold_1_9_times_the_chunks_and_move_as_many_bytes_less() -> None:
    wide, narrow = (
        drained(serve(conversation(), system="fcfs", options=own_tier(400, bits=bits, chunk_tokens=64)))
        for bits in (16, 8)
    )
    assert wide.counters["num_tier_chunks"] == 100
    assert narrow.counters["num_tier_chunks"] == 191
    assert wide.counters["tier_hit_tokens"] == narrow.counters["tier_hit_tokens"] == 64
    for name in ("transfer_load_bytes", "transfer_store_bytes"):
        assert wide.counters[name] / narrow.counters[name] == pytest.approx(1.91, abs=0.005)
    assert wide.counters["transfer_load_bytes"] == 4 * BLOCK_BYTES
    assert narrow.counters["link_load_busy_fraction"] < wide.counters["link_load_busy_fraction"]


def test_quantisation_that_is_not_hidden_takes_its_time() -> None:
    """64 tokens come back as four blocks, at 10 blocks per second: 0.4 s beside the copy's."""
    hidden, shown = (
        drained(serve(conversation(), system="fcfs", options=own_tier(bits=8), quantise_blocks_per_s=rate))
        for rate in (None, 10.0)
    )
    turns = [rows(server.collector.table)["turn-2"] for server in (hidden, shown)]
    waits = [turn["first_token_s"] - turn["arrival_s"] for turn in turns]
    assert waits[1] - waits[0] == pytest.approx(0.4, abs=0.01)
    busy = [server.counters["link_load_busy_fraction"] * server.engine.clock() for server in (hidden, shown)]
    assert busy[1] - busy[0] == pytest.approx(0.4, abs=1e-9)


def test_devices_of_a_group_share_the_tier() -> None:
    """The heads of OPT-13B on two devices: the same chunks in all, and half of each on a device."""
    counts = []
    for devices in (1, 2):
        hardware = HardwareSpec(model="opt-13b", device="a100-40", tensor_parallel=devices)
        scheduler = build_scheduler(engine_spec(system="fcfs", options=own_tier(400, bits=8)), 14, hardware)
        tier = build_tier(scheduler, hardware, CostSpec())
        counts.append((tier.counters(0.0)["num_tier_chunks"], tier.copies.block_bytes * devices))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("devices", [1, 4])
def test_what_a_copy_is_learned_to_take_is_what_it_takes(devices: int, bits: int) -> None:
    hardware = HardwareSpec(model="opt-13b", device="a100-40", tensor_parallel=devices)
    options = own_tier(400, bits=bits, chunk_tokens=32)
    scheduler = build_scheduler(engine_spec(system="fcfs", options=options), 14, hardware)
    copies, prices = build_tier(scheduler, hardware, CostSpec()).copies, scheduler.connector.connector_scheduler.prices
    device = GPULoadStoreSpec([1, 2], group_sizes=[2], block_indices=[0])
    copies.submit_store(7, device, BlockIDsLoadStoreSpec([0]))
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
    options = own_tier(blocks, policy=policy, chunk_tokens=16, store="early", bits=16)
    ours = serve(mixed(random.Random(seed)), options=options, **shared)
    assert drained(upstream).engine.decisions == drained(ours).engine.decisions
    assert upstream.counters == ours.counters
    assert repr(list(upstream.collector.table.rows())) == repr(list(ours.collector.table.rows()))  # nan is not nan


# --- the run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", PREFIX_POLICIES)
@_STORES
@_DEPTHS
def test_same_seed_same_bytes(async_scheduling: bool, store: str, policy: str) -> None:
    spec = SimulationSpec(
        engine=engine_spec(
            system="alise",
            prefix_caching=True,
            async_scheduling=async_scheduling,
            options=own_tier(8, policy=policy, store=store, chunk_tokens=16),
        ),
        hardware=HARDWARE,
        record=RecordSpec(token_times=True, decisions=True),
    )
    runs = [simulate_parts(spec, workload=ListWorkload(crowd()), cost=SteadyCost(), num_blocks=14) for _ in range(2)]
    assert fingerprint(runs[0][0], runs[0][1] or []) == fingerprint(runs[1][0], runs[1][1] or [])
    counters = runs[0][0].counters
    assert counters["transfer_store_bytes"] > 0
    assert counters["tier_evicted_chunks"] > 0
    assert counters["tier_dropped_chunks"] == 0


def test_eviction_goes_by_virtual_time() -> None:
    server = serve([ask("a")], system="fcfs", options=own_tier(policy="retention"), run=False)
    policy = server.scheduler.connector.connector_scheduler.manager._policy
    assert isinstance(policy, RetentionCachePolicy)
    server.engine.clock.advance(7.0)
    assert policy.clock() == 7.0


@pytest.mark.parametrize("seed", range(12))
def test_no_copy_is_torn_and_nothing_is_left_whatever_happens(seed: int) -> None:
    dice = random.Random(seed)
    workload = mixed(dice)
    options = own_tier(
        dice.choice([5, 10, 40, 200]),
        bits=dice.choice([16, 8]),
        policy=PREFIX_POLICIES[seed % 3],
        store=("early", "late")[seed // 2 % 2],
        chunk_tokens=dice.choice([16, 16, 32, 48]),
    )
    server = serve(
        workload,
        dice.choice([PerTokenCost(), SteadyCost(device=0.01, host=0.002), SteadyCost(device=0.002, host=0.01)]),
        options=options,
        blocks_per_s=dice.choice([8.0, 80.0, 2000.0, 1e5]),
        quantise_blocks_per_s=dice.choice([None, 500.0]),
        num_blocks=dice.choice([12, 16, 24]),
        async_scheduling=bool(seed % 2),
        system=("fcfs", "oracle-alise", "auto", "alise")[seed // 2 % 4],
    )
    drained(server)
    assert sorted(server.collector.table.texts("req_id")) == sorted(req_id for req_id, _, _ in workload.ended)
    finished = [row for row in server.collector.table.rows() if row["finish_reason"] != "abort"]
    assert all(row["output_tokens"] == row["true_output_tokens"] for row in finished)


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(hardware: HardwareSpec | None = HARDWARE, **options: Any) -> ConfigError | ValueError:
    with pytest.raises(ValueError) as caught:
        build_scheduler(engine_spec(**{"system": "fcfs", **options}), 14, hardware)
    return caught.value


def test_an_engine_has_one_connector() -> None:
    error = refused(kv_offload=offload(), options=own_tier())
    assert isinstance(error, ConfigError)
    assert "kv_tier" in str(error)
    assert "must be left out beside kv_offload" in str(error)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (own_tier(1), "kv_tier.gib=0.0122"),
        (own_tier(bits=4), "kv_tier.bits=4: must be 16 or 8"),
        (own_tier(chunk_tokens=24), "kv_tier.chunk_tokens=24: must be a multiple of vLLM's KV block, 16 tokens here"),
        (own_tier(policy="fifo"), "kv_tier.policy='fifo'"),
        ({"kv_tier": {"gibs": 1}}, "kv_tier.gibs=1: unknown option"),
        (own_tier(disk_dir="/nowhere", disk_gib=1.0), "must be left out in a simulation, which has no disk"),
    ],
    ids=["less than a chunk", "bits", "chunk", "policy", "unknown", "disk"],
)
def test_bad_options_are_refused_as_by_the_server(options: dict[str, Any], says: str) -> None:
    assert says in str(refused(options=options))


def test_fp8_kv_is_not_quantised_again() -> None:
    hardware = HardwareSpec(model="opt-13b", device="a100-40", kv_dtype_bytes=1)
    assert "needs KV of type" in str(refused(hardware, options=own_tier(bits=8)))


def test_the_hardware_is_needed_for_the_size_of_a_block() -> None:
    assert "hardware=None: needed for kv_tier" in str(refused(None, options=own_tier()))


def test_vllm_alone_has_no_tier_of_ours() -> None:
    assert "must be empty for upstream-fcfs" in str(refused(system="upstream-fcfs", options=own_tier()))


def test_without_memory_there_is_no_tier() -> None:
    assert serve([ask("a")], system="fcfs", options={"kv_tier": {"gib": 0}}, run=False).scheduler.connector is None
