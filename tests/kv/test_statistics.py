"""Statistics add up, whatever happens to the tier."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    DirectionalTransferStats,
    OffloadingWorkerMetadata,
    TransferStats,
)

from tests.support.tier_audit import resident
from tests.support.tier_rig import BLOCK_SIZE, Setup, TierRig, quiet
from tests.support.tier_walk import walk
from vllm_ext.kv.connector.statistics import TierAccount
from vllm_ext.kv.connector.tiered import TierWorkerMetadata
from vllm_ext.kv.host import tally
from vllm_ext.kv.host.report import LOAD, STORE, WorkerReport


def check(rig: TierRig) -> dict[str, Any]:
    """Compare the statistics with the books, and return them."""
    state: dict[str, Any] = rig.scheduler.vllm_ext_state()["kv_tier"]
    assert json.loads(json.dumps(state)) == state
    host, manager = state["host"], rig.side.manager
    chunks = resident(manager.policy)
    assert host["used_chunks"] == len(chunks) <= host["capacity_chunks"] == rig.setup.host_chunks
    assert host["writing_chunks"] == sum(chunk.ref_cnt < 0 for chunk in chunks.values())
    assert host["reading_chunks"] == sum(chunk.ref_cnt > 0 for chunk in chunks.values())
    assert host["used_bytes"] == host["used_chunks"] * state["chunk_bytes"]
    gone = state["gone_chunks"]
    assert set(gone) == set(tally.REASONS)
    assert state["placed_chunks"] == host["used_chunks"] + sum(gone.values())
    ready = host["used_chunks"] - host["writing_chunks"]
    assert state["stored_chunks"] >= ready
    found = state["conversations"]
    assert found["running"] + found["kept"] + found["gone"] == len(rig.side.keeper.book)
    return state


@pytest.mark.parametrize(
    ("store", "prefix_caching", "meant"),
    [("auto", True, "ahead"), ("auto", False, "early"), ("early", True, "early")],
)
def test_how_chunks_are_stored_is_told(store: str, prefix_caching: bool, meant: str) -> None:
    rig = TierRig(Setup(store=store, prefix_caching=prefix_caching))
    assert check(rig)["store"] == rig.side.store == meant
    assert (rig.side.stores is not None) == (meant == "ahead")


def test_placed_chunks_are_there_or_gone_for_a_reason() -> None:
    def check_after_each_step(rig: TierRig) -> None:
        audit = rig.audit

        def audit_and_check() -> None:
            audit()
            gone = check(rig)["gone_chunks"]
            assert gone["unwritten"] + gone["unreadable"] == rig.side.manager.dropped_chunks

        rig.audit = audit_and_check  # type: ignore[method-assign]

    walk(2_400, 0, steps_per_engine=200, watch=check_after_each_step)


def test_a_time_to_live_and_a_hand_are_told_apart() -> None:
    rig = quiet(host_chunks=40)
    for number, session in enumerate(("a", "b")):
        rig.add(range(100 * (number + 1), 100 * (number + 1) + 3 * BLOCK_SIZE), 2, session=session)
    rig.settle()
    keeper = rig.side.keeper
    first, second = (keeper.book.find(name)[""] for name in ("a", "b"))
    held = len(first.keys), len(second.keys)
    assert min(held) >= 3
    keeper.drop(first)
    second.ttl_s = 0.0
    keeper.book.leave(keeper.book.enter("b", "", [], rig.clock()), [], rig.clock())
    keeper.sweep(rig.clock())
    gone = check(rig)["gone_chunks"]
    assert (gone[tally.DROPPED], gone[tally.EXPIRED]) == held
    assert check(rig)["conversations"] == {
        "running": 0, "kept": 0, "gone": 2, "expired": 1, "dropped": 1
    }  # fmt: skip


def test_chunks_that_find_no_place_are_refused() -> None:
    rig = quiet(host_chunks=1)
    rig.add(range(100, 100 + 8 * BLOCK_SIZE), 2)
    rig.settle()
    state = check(rig)
    assert state["refused_chunks"] > 0
    assert state["host"]["used_chunks"] <= 1


def test_seconds_are_those_of_one_worker() -> None:
    rig = TierRig(Setup(bits=8))
    account = rig.scheduler.tier_account
    account.num_workers = 2
    stats = TransferStats(
        load=DirectionalTransferStats(100, 2.0, [50, 50]), store=DirectionalTransferStats(400, 8.0, [200, 200])
    )
    report = WorkerReport(wait_s={STORE: 1.0, LOAD: 0.5}, codec_s={STORE: 6.0, LOAD: 1.0})
    account.observe(stats, report)
    state = account.state()
    assert state["copied_bytes"] == {"store": 400, "load": 100}
    assert state["copy_jobs"] == {"store": 1, "load": 1}
    assert state["copy_s"] == {"store": 4.0, "load": 1.0}
    assert state["exposed_s"] == {"store": 0.5, "load": 0.25}
    assert state["quantise_s"] == {"store": 3.0, "load": 0.5}


def test_kv_that_is_kept_as_it_is_takes_no_time_to_quantise() -> None:
    account = TierRig(Setup(bits=16)).scheduler.tier_account
    account.observe(TransferStats(), WorkerReport(codec_s={STORE: 6.0, LOAD: 1.0}))
    assert account.state()["quantise_s"] == {"store": 0.0, "load": 0.0}


def test_without_others_to_compute_a_load_holds_the_engine_up() -> None:
    rig = TierRig(Setup(host_chunks=40, prefix_caching=False, slow=0.9))
    tokens = range(100, 100 + 8 * BLOCK_SIZE)
    rig.add(tokens, 2)
    rig.settle()
    before = rig.scheduler.tier_account.stalled_s
    rig.add(tokens, 2)
    rig.settle()
    state = check(rig)
    assert state["loaded_chunks"] > 0
    assert state["exposed_s"]["load"] >= rig.scheduler.tier_account.stalled_s
    idle_s = rig.scheduler.tier_account.stalled_s
    assert idle_s > before
    rig.clock.advance(1000.0)
    rig.add(range(500, 500 + 4 * BLOCK_SIZE), 2)
    rig.settle()
    assert rig.scheduler.tier_account.stalled_s == idle_s, "an engine without requests does not wait"


def test_a_reset_takes_all_chunks() -> None:
    rig = quiet(host_chunks=40)
    rig.add(range(100, 100 + 6 * BLOCK_SIZE), 2)
    rig.settle()
    held = check(rig)["host"]["used_chunks"]
    assert rig.scheduler.reset_connector_cache()
    state = check(rig)
    assert (state["gone_chunks"][tally.RESET], state["host"]["used_chunks"]) == (held, 0)
    assert held >= 6


COMPUTES, LOADS, IDLES = 5, 0, -1
"""What a step does: computes so many tokens, or none while something is loaded, or none at all."""


@pytest.mark.parametrize(
    ("steps", "stalled_s"),
    [
        ([(COMPUTES, 0.0), "end", (LOADS, 1.0), "end", (LOADS, 1.5), "end", (COMPUTES, 3.0)], 2.0),
        ([(COMPUTES, 0.0), (LOADS, 1.0), "end", "end", (LOADS, 2.0), (COMPUTES, 2.5)], 0.5),
        ([(IDLES, 0.0), (COMPUTES, 9.0)], 0.0),
        ([(LOADS, 1.0), ("last", 1.25), (COMPUTES, 100.0)], 0.25),
    ],
    ids=["nobody computes", "beside one that computes", "nothing is loaded", "its request was aborted"],
)
def test_empty_steps_count_while_kv_is_loaded_and_nobody_computes(steps: list[Any], stalled_s: float) -> None:
    loading = SimpleNamespace(is_store=False)
    tier: Any = SimpleNamespace(_jobs={})
    account = TierAccount(tier, SimpleNamespace(), 1)  # type: ignore[arg-type]
    begun: list[int] = []
    for step in steps:
        if step == "end" or step[0] == "last":
            account.finished(begun.pop(0), lambda step=step: step == "end", step[1] if step != "end" else 0.0)
            continue
        tokens, now = step
        tier._jobs = {1: loading} if tokens == LOADS else {2: SimpleNamespace(is_store=True)}
        begun.append(max(0, tokens))
        account.scheduled(begun[-1], now)
    assert account.stalled_s == stalled_s


def test_reports_of_several_workers_add_up() -> None:
    one = TierWorkerMetadata({1: 1}, report=WorkerReport({3}, {5}, {1}, {STORE: 1.0, LOAD: 2.0}, {STORE: 3.0, LOAD: 4}))
    two = TierWorkerMetadata({1: 1}, report=WorkerReport({4}, {6}, {2}, {STORE: 0.5, LOAD: 0.25}, {STORE: 1, LOAD: 4}))
    merged = one.aggregate(two).aggregate(OffloadingWorkerMetadata({2: 1}))
    assert merged.completed_jobs == {1: 2, 2: 1}
    waits, codecs = {STORE: 1.5, LOAD: 2.25}, {STORE: 4.0, LOAD: 8.0}
    assert merged.report == WorkerReport({3, 4}, {5, 6}, {1, 2}, waits, codecs)
    assert (one.report.chunks, one.report.wait_s) == ({3}, {STORE: 1.0, LOAD: 2.0}), "what was reported is not changed"
