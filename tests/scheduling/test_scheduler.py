"""SteeredScheduler on vLLM's own machinery: what each step decides. Time stands still by default."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from tests.support.distributions import nine
from tests.support.steering import Rig, save_profile

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


@pytest.fixture
def cheap(tmp_path: Path) -> dict[str, Any]:
    """Options whose runtime model says: 10 ms per step, 0.1 ms per prefill token."""
    return {"profile": save_profile(tmp_path / "cheap.json")}


@pytest.fixture
def dear(tmp_path: Path) -> dict[str, Any]:
    """As `cheap`, but a prefill token takes half a second."""
    return {"profile": save_profile(tmp_path / "dear.json", prefill_token_s=0.5)}


# --- who runs ---------------------------------------------------------------------------------------------------------


def test_a_short_job_takes_the_seat_of_a_long_one(cheap: dict[str, Any]) -> None:
    rig = Rig(options=cheap, max_num_seqs=2)
    rig.add("long1", length=100, osl=100)
    rig.add("long2", length=200, osl=200)
    rig.step(3)
    rig.add("short", length=2, osl=2)
    seen = []
    for _ in range(3):
        rig.step()
        seen.append((rig.running, rig.waiting))
    assert seen == [
        (["long1", "short"], ["long2"]),  # admitted behind; the list is sorted when the next step begins
        (["long1"], ["long2"]),  # short got its second and last token
        (["long1", "long2"], []),
    ]
    assert rig.state["preemptions"] == {"policy": 1, "memory": 0}
    rig.drain()
    assert rig.record("long2")["num_preemptions"] == 1


def test_a_long_job_keeps_its_seat_if_recomputing_it_costs_more_than_is_gained(dear: dict[str, Any]) -> None:
    rig = Rig(options=dear, max_num_seqs=2)
    rig.add("long1", length=100, osl=100)
    rig.add("long2", length=200, osl=200)
    rig.step(3)
    rig.add("short", length=2, osl=2)
    rig.step(3)
    assert (sorted(rig.running), rig.waiting) == (["long1", "long2"], ["short"])
    assert rig.state["preemptions"]["policy"] == 0


def test_no_preemption_when_it_is_switched_off(cheap: dict[str, Any]) -> None:
    rig = Rig(options={**cheap, "admission": {"preempt": False}}, max_num_seqs=1)
    rig.add("long", length=100, osl=100)
    rig.step(3)
    rig.add("longer", length=200, osl=200)
    rig.add("short", length=2, osl=2)
    rig.step(3)
    assert (rig.running, rig.waiting) == (["long"], ["short", "longer"])


def test_a_job_is_not_preempted_again_before_it_made_progress(cheap: dict[str, Any]) -> None:
    rig = Rig(options={**cheap, "admission": {"min_progress_tokens": 5}}, max_num_seqs=1)
    rig.add("long", length=200, osl=200)
    rig.step(4)
    rig.add("short1", length=1, osl=1)
    rig.step()
    assert rig.waiting == ["long"]
    rig.step()  # short1 is done, long is computed again: 1 token of progress
    rig.add("short2", length=1, osl=1)
    steps_until_preempted = 0
    while "short2" in rig.waiting:
        rig.step()
        steps_until_preempted += 1
        assert steps_until_preempted < 20
    # short2 joins in the step that finds 5 tokens of progress; one was there when it came
    assert steps_until_preempted == 5
    rig.drain()
    assert rig.record("long")["num_preemptions"] == 2


def test_when_kv_memory_runs_out_the_worst_ranked_job_leaves(cheap: dict[str, Any]) -> None:
    """8 usable blocks of 16; FCFS would preempt the youngest, which here is the shortest."""
    rig = Rig(options=cheap, num_blocks=9, max_model_len=128, max_num_seqs=3, enable_prefix_caching=False)
    rig.add("longest", 30, length=90, osl=90)
    rig.step(2)
    rig.add("middle", 30, length=60, osl=60)
    rig.step(2)
    rig.add("shortest", 30, length=40, osl=40)
    rig.step()
    # ranked before the step in which the shortest joins at the end
    assert rig.running == ["middle", "longest", "shortest"]
    while not rig.waiting:
        rig.step()
    assert rig.waiting == ["longest"]
    assert rig.state["preemptions"] == {"policy": 0, "memory": 1}
    rig.drain()


def test_a_job_that_outlives_its_estimate_is_demoted_and_its_estimate_doubles(cheap: dict[str, Any]) -> None:
    rig = Rig(options=cheap)
    rig.add("liar", length=40, osl=4)
    job = rig.scheduler.tracked["liar"]
    history = []
    while rig.loop.has_work:
        rig.step()
        history.append((job.estimate, job.demotions))
    changes = [history[0], *(b for a, b in itertools.pairwise(history) if a != b)]
    assert changes == [(4, 0), (8, 1), (16, 2), (32, 3), (64, 4)]
    assert rig.state["demotions"] == 4
    assert rig.record("liar")["demotions"] == 4
    assert rig.record("liar")["predicted_tokens"] == 4, "the record keeps the first prediction"


def test_the_estimate_stops_at_max_tokens(cheap: dict[str, Any]) -> None:
    rig = Rig(options=cheap)
    rig.add("bounded", length=400, osl=3, max_tokens=10)
    job = rig.scheduler.tracked["bounded"]
    rig.drain()
    assert job.estimate == 10
    assert job.demotions == 2
    assert rig.record("bounded")["finish_reason"] == "length"


def test_a_new_prediction_moves_a_waiting_request(cheap: dict[str, Any]) -> None:
    preferred = {"sources": ["retrieval", "hint"]}
    rig = Rig(options={**cheap, "admission": {"preempt": False}, "prediction": preferred}, max_num_seqs=1)
    rig.add("running", length=100, osl=100)
    rig.step()
    rig.add("a", osl=20)
    rig.add("b", osl=30)
    assert rig.waiting == ["a", "b"]
    rows = [["b", nine(5), "retrieval"], ["unknown", nine(5), "retrieval"]]
    assert rig.scheduler.update_predictions(rows) == 1
    assert rig.waiting == ["b", "a"]


def test_a_new_prediction_moves_a_running_request(cheap: dict[str, Any]) -> None:
    rig = Rig(options={**cheap, "prediction": {"sources": ["retrieval", "history"]}})
    rig.add("a", length=50)
    rig.add("b", length=50)
    rig.step(2)
    assert rig.running == ["a", "b"]
    rig.scheduler.update_predictions([["b", nine(20), "retrieval"]])
    rig.step()
    assert rig.running == ["b", "a"]
    rig.drain()
    assert (rig.record("b")["prediction_source"], rig.record("b")["predicted_tokens"]) == ("retrieval", 20)


def test_a_late_prediction_below_what_was_generated_is_no_demotion(cheap: dict[str, Any]) -> None:
    """A predictor that answers late must not be taken for several doublings at once."""
    rig = Rig(options=cheap)
    rig.add("a", length=60)
    rig.step(33)
    rig.scheduler.update_predictions([["a", nine(2), "retrieval"]])
    assert rig.scheduler.tracked["a"].demotions <= 1


def test_waiting_requests_are_promoted_with_time(cheap: dict[str, Any]) -> None:
    options = {**cheap, "admission": {"preempt": False}, "ordering": {"num_levels": 2, "age_limit_s": 1.0}}
    rig = Rig(options=options, max_num_seqs=1)
    rig.add("running", length=300, osl=300)
    rig.step()
    rig.add("old", osl=300)
    rig.step(seconds=1.5)
    rig.add("short", osl=1)
    rig.step(seconds=0.4)
    assert rig.state["waiting_by_level"] == {"0": 2}
    assert rig.waiting == ["short", "old"]
    rig.step(seconds=0.2)
    rig.step()
    assert rig.waiting == ["old", "short"], "2.1 s of waiting pass both queues"
    assert rig.state["waiting_by_level"] == {"-1": 1, "0": 1}
    assert rig.state["oldest_wait_s"] == pytest.approx(2.1)


@DEPTHS
def test_prefills_do_not_stall_decodes(cheap: dict[str, Any], depth: int) -> None:
    """A prompt longer than the budget, of a job that ranks first, takes only what the decodes leave."""
    rig = Rig(options=cheap, depth=depth, max_num_batched_tokens=32, num_blocks=128)
    rig.add("decode", length=100, osl=100)
    rig.step(4)
    rig.add("prompt", 300, length=1, osl=1)
    while "prompt" in rig.scheduler.requests and rig.loop.outcomes["prompt"].finish_reason is None:
        decision = rig.step()
        assert decision is not None
        assert ("decode", 1) in decision.scheduled
    assert rig.loop.outcomes["decode"].finish_reason is None


def test_no_preemption_when_a_long_prompt_leaves_no_tokens_to_admit_with(cheap: dict[str, Any]) -> None:
    """A seat freed while a prefill takes the whole budget stays empty: its KV would be dropped for nothing."""
    rig = Rig(options=cheap, max_num_batched_tokens=32, num_blocks=128, max_num_seqs=4)
    for i in range(3):
        rig.add(f"long{i}", length=200, osl=200)
    rig.step(4)
    rig.add("prompt", 400, length=1, osl=1)
    rig.step(2)
    assert len(rig.running) == 4
    for i in range(4):
        rig.add(f"short{i}", length=1, osl=1)
    for _ in range(5):
        rig.step()
        assert len(rig.running) == 4, f"seats stand empty while {rig.waiting} wait"


# --- pauses, aborts, resets -------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])
def test_nothing_is_planned_while_paused(cheap: dict[str, Any], depth: int, state: PauseState) -> None:
    rig = Rig(options=cheap, depth=depth, max_num_seqs=1)
    rig.add("long", length=100, osl=100)
    rig.step(3)
    rig.add("short", length=1, osl=1)
    rig.scheduler.set_pause_state(state)
    planned = rig.state["policy_steps"]
    rig.step(3)
    assert rig.running == ["long"]
    assert (rig.state["policy_steps"], rig.state["preemptions"]["policy"]) == (planned, 0)
    rig.scheduler.set_pause_state(PauseState.UNPAUSED)
    rig.step(2)
    assert "short" not in rig.waiting
    rig.drain()


@DEPTHS
def test_reset_of_the_prefix_cache_counts_under_its_own_reason(cheap: dict[str, Any], depth: int) -> None:
    rig = Rig(options=cheap, depth=depth)
    rig.add("a", length=30)
    rig.add("b", length=30)
    rig.step(4)
    rig.loop.reset_prefix_cache()
    assert rig.state["preemptions"] == {"policy": 0, "memory": 0, "reset": 2}
    rig.drain()
    assert [rig.record(r)["output_tokens"] for r in ("a", "b")] == [30, 30]


@DEPTHS
@pytest.mark.parametrize("system", ["fcfs", "alise"])
def test_nothing_is_remembered_of_requests_that_are_gone(system: str, depth: int) -> None:
    rig = Rig(system, depth=depth, num_blocks=28, max_num_seqs=4, options={"record_capacity": 10})
    rng = random.Random(7)
    ids: list[str] = []
    for number in range(400):
        if number % 2 == 0:
            ids.append(f"r{number}")
            rig.add(ids[-1], rng.randint(1, 90), length=rng.choice((1, 3, 30)), max_tokens=rng.choice((1, 5, 40)))
        if number % 3 == 0:
            rig.loop.abort([rng.choice(ids)], while_executing=number % 2 == 0)
        if number % 97 == 96:
            rig.loop.reset_prefix_cache()
        rig.step(seconds=0.05)
    rig.drain(seconds=0.05)
    scheduler = rig.scheduler
    assert scheduler.tracked.by_id == {}
    assert scheduler.observer._awaiting_first_token == {}
    assert scheduler.observer.timer._in_flight == {}
    assert rig.state["next_record"] == len(ids)
    assert len(rig.state["records"]) == 10
    if system == "alise":
        assert scheduler.running_order.keys == {}
        order = scheduler.running_order
        kept = (order._ranked, order._by_time, order._by_step, order._stale, order.tbt_s, order._numbers)
        assert sum(map(len, kept)) == 0
        prefixes = scheduler.prefixes
        assert (prefixes._starts, prefixes._behind, prefixes._told) == ({}, {}, {})
        queue = scheduler.ranked
        assert (queue.levels, queue._numbers, queue._stays) == ({}, set(), set())
        assert max(map(len, (*queue._lines.get("", {}).values(), queue._expiry, queue._arrivals))) <= 2 * len(ids) + 64
        assert not queue.apart()
        # Once it is idle, what is left behind is a constant, whatever the queue's length was.
        rig.add("last", length=2)
        rig.drain()
        assert max(map(len, (*queue._lines.get("", {}).values(), queue._expiry, queue._arrivals))) <= 64 + 2


@pytest.mark.parametrize("system", ["fcfs", "alise"])
def test_aborting_a_waiting_request_frees_its_place(system: str) -> None:
    rig = Rig(system, max_num_seqs=1)
    rig.add("a", length=5)
    rig.add("b", length=5)
    rig.step()
    rig.loop.abort(["b", "unknown"])
    assert rig.waiting == []
    record = rig.record("b")
    assert record["finish_reason"] == "abort"
    assert (record["queue_s"], record["ttft_s"], record["output_tokens"]) == (None, None, 0)
    rig.drain()


# --- odd sizes --------------------------------------------------------------------------------------------------------


@DEPTHS
def test_a_prompt_longer_than_the_budget_and_a_single_token_answer(depth: int) -> None:
    rig = Rig(depth=depth, max_num_batched_tokens=16)
    rig.add("long-prompt", 300, length=1, max_tokens=1)
    rig.add("one", 1, length=9, max_tokens=1)
    rig.drain(seconds=0.01)
    assert [rig.record(r)["output_tokens"] for r in ("long-prompt", "one")] == [1, 1]
    assert [rig.record(r)["finish_reason"] for r in ("long-prompt", "one")] == ["stop", "length"]


def test_a_step_without_requests_plans_and_returns_nothing() -> None:
    rig = Rig()
    output = rig.scheduler.schedule()
    assert output.total_num_scheduled_tokens == 0
    assert rig.state["fallbacks"] == 0


def test_huge_hints_and_priorities_are_served() -> None:
    rig = Rig(max_num_seqs=1, scheduling_policy="priority")
    rig.add("a", osl=1_000_000, priority=2**63 - 1)
    rig.add("b", osl=1, priority=-(2**63))
    rig.add("c", osl=1_000_000, priority=10**30)
    rig.drain()
    assert rig.state["fallbacks"] == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    "system", ["fcfs", "fcfs-tuned", "alise", "auto", "accelgen", "past-future", "fair+alise", "fastserve"]
)
def test_priority_counts_where_vllm_was_told_so_and_nowhere_else(system: str, policy: str) -> None:
    rig = Rig(system, max_num_seqs=1, scheduling_policy=policy)
    rig.add("running", length=200, osl=200, priority=-9)
    rig.step()
    for name, priority in (("c", 1), ("a", -1), ("b", -1), ("d", 2**63)):
        rig.add(name, 10, length=9, osl=9, priority=priority)
        rig.clock.advance(0.01)
    assert rig.waiting == (["a", "b", "c", "d"] if policy == "priority" else ["c", "a", "b", "d"])
    rig.drain(seconds=0.01)
    assert rig.state.get("fallbacks", 0) == 0


@pytest.mark.parametrize(
    "system", ["fcfs-tuned", "alise", "auto", "accelgen", "accelgen-published", "past-future", "sarathi"]
)
def test_nobody_is_let_in_before_those_of_higher_priority(system: str) -> None:
    """However much better its demand fits what is left of a step."""
    rig = Rig(system, max_num_seqs=1, scheduling_policy="priority")
    rig.add("running", length=5, osl=5, priority=-9)
    rig.step()
    rig.add("low", 60, length=9, osl=9, priority=1)
    rig.add("high", 5, length=9, osl=9, priority=0)
    while rig.running == ["running"]:
        rig.step()
    rig.step()
    assert rig.running == ["high"]
    rig.drain()
    assert rig.state.get("fallbacks", 0) == 0


def test_out_of_memory_who_has_the_least_priority_leaves() -> None:
    rig = Rig("alise", num_blocks=8, scheduling_policy="priority", enable_prefix_caching=False)
    rig.add("least", 30, length=80, osl=1, priority=5)
    rig.add("most", 30, length=80, osl=300, priority=0)
    while rig.scheduler.vllm_ext_state()["preemptions"].get("memory", 0) == 0:
        rig.step()
    assert rig.running == ["most"]
    rig.drain()


def test_malformed_hints_are_left_out_and_counted() -> None:
    rig = Rig()
    rig.add("a", osl=-3)
    rig.add("b", osl=4)
    rig.drain()
    assert rig.state["bad_hints"] == 1
    assert rig.record("a")["prediction_source"] == "prior"
    assert rig.record("b")["prediction_source"] == "hint"
