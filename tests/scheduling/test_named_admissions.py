"""Exactly those join who were chosen: nobody hidden, nobody unchecked, nobody held up by a cap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm.v1.request import RequestStatus

from tests.support.loads import Loads
from tests.support.preempting import PREEMPTING
from tests.support.steering import Rig
from vllm_ext.simulation.engine.harness import make_request
from vllm_ext.systems import table
from vllm_ext.systems.baselines import SkipJoin
from vllm_ext.systems.past_future import PeakMemory

SYSTEMS = [system.name for system in table(unserved=True) if not system.oracle and system.paper]


def add_compiling(rig: Rig, count: int) -> None:
    """Requests whose grammar is never there."""
    for number in range(count):
        req_id = f"g{number}"
        rig.lengths[req_id] = 4
        request = make_request(req_id, [7 + number] * 20, max_tokens=50, arrival_time=rig.clock(), hasher=rig._hasher)
        request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        waits = SimpleNamespace(grammar=None, is_grammar_ready=False)
        request.structured_output_request = waits
        rig.loop.add(request)


@pytest.mark.parametrize("system", SYSTEMS)
def test_requests_whose_grammar_compiles_hide_nobody(system: str) -> None:
    """32 of them made five systems take 480 steps with one running, where vLLM takes 60 with 8."""

    def taken(system: str | None) -> tuple[int, int]:
        rig = Rig(system, max_num_seqs=8, num_blocks=400, max_num_batched_tokens=512)
        add_compiling(rig, 32)
        for number in range(24):
            rig.add(f"n{number}", 20, length=20, osl=20, max_tokens=64)
        steps = most = 0
        while any(f"n{number}" in rig.scheduler.requests for number in range(24)):
            rig.step(seconds=0.01)
            steps, most = steps + 1, max(most, len(rig.running))
        return steps, most

    steps, most = taken(None)
    ours, together = taken(system)
    assert together == most
    # Prompts apart take steps of their own; a forward pass of 64 tokens takes three prompts.
    assert ours <= 1.05 * steps + {"sarathi-chunked-only": 12, "vllm-2023": 12, "fastgen": 6}.get(system, 0)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "later"])
def test_a_grammar_that_fails_ends_its_request_and_no_other(system: str, at_once: bool) -> None:
    rig = Rig(system, max_num_seqs=8, num_blocks=400)
    add_compiling(rig, 1)
    rig.add("other", 20, length=6)
    state = rig.scheduler.requests["g0"].structured_output_request
    for number in range(12):
        if number == (0 if at_once else 3):
            state.grammar, state.is_grammar_ready = ValueError("no grammar"), True
        rig.step(seconds=0.01)
    assert "g0" not in rig.scheduler.requests, "its client waits for ever"
    rig.drain(seconds=0.01)


@pytest.mark.parametrize("system", ["past-future", "auto+past-future", "orca"])
def test_loads_count_in_forecasts(system: str) -> None:
    """20 hits in host memory, with bounds that fill the pool: past-future, which admits one, let 20 loads begin."""
    rig = Rig(system, max_num_seqs=32, num_blocks=400, max_num_batched_tokens=256, enable_prefix_caching=False)
    loads = Loads(rig, {f"L{number}": 64 for number in range(20)})
    for number in range(20):
        rig.add(f"L{number}", 80, length=8, max_tokens=2000)
    for _ in range(4):
        rig.step(seconds=0.01)
    bounds = 512 // 16 + 1
    assert 2 <= len(loads.started) <= 400 // bounds


def test_the_first_rank_knows_what_the_host_has() -> None:
    """The connector is told of a request after the queue; priced in full, it would stay behind what is shorter."""
    rig = Rig(PREEMPTING, num_blocks=400, enable_prefix_caching=False)
    loads = Loads(rig, {})
    loads.untold["cached"] = 320
    rig.scheduler.tier = loads
    rig.add("cached", 330, osl=4)
    rig.scheduler.tier = None
    rig.add("short", 30, osl=4)
    view = rig.scheduler.tracked.view(rig.scheduler.tracked["cached"])
    assert view.cached_tokens == 320
    assert rig.scheduler.ranked.key(rig.scheduler.requests["cached"])[2] == view.predicted_remaining_s
    assert rig.waiting == ["cached", "short"]


def test_a_load_takes_its_seat_when_its_kv_has_come() -> None:
    """As upstream has it. Loads that took seats from the start cost tier rows up to 2.7 % of their end-to-end time."""
    rig = Rig(PREEMPTING, max_num_seqs=3, num_blocks=400, max_num_batched_tokens=256, enable_prefix_caching=False)
    loads = Loads(rig, {f"L{number}": 64 for number in range(9)})
    for number in range(9):
        rig.add(f"L{number}", 80, length=8)
    for _ in range(4):
        rig.step(seconds=0.01)
    assert len(loads.started) == 9
    loads.finish()
    rig.add("short", 16, length=8)
    rig.step()
    assert len(rig.running) == 3
    assert "short" not in rig.running


@pytest.mark.parametrize("system", ["past-future", "orca", "accelgen", "auto", "alise"])
def test_what_has_loaded_is_held_up_by_nobody(system: str) -> None:
    """Three loads that were ready at step 3 ran at step 101, holding their blocks all the while."""
    rig = Rig(system, max_num_seqs=8, num_blocks=64, max_num_batched_tokens=256, enable_prefix_caching=False)
    loads = Loads(rig, {"L0": 64, "L1": 64})
    for name in ("L0", "L1"):
        rig.add(name, 80, length=8, max_tokens=8)
    rig.step()
    assert loads.started == ["L0", "L1"]
    rig.add("large", 40, length=300, max_tokens=400)
    rig.step()
    for number in range(4):
        rig.add(f"e{number}", 80, length=8, max_tokens=100)
    rig.step()
    loads.finish()
    rig.step()
    assert {"L0", "L1"} <= set(rig.running)
    assert rig.state["stalls"] == 0


def test_whom_vllm_passes_over_is_replaced_by_nobody_unchecked() -> None:
    """The connector can't tell yet what it has of the one that was chosen; the next one does not fit the forecast."""
    rig = Rig("past-future", max_num_seqs=8, num_blocks=64, max_num_batched_tokens=256, enable_prefix_caching=False)
    loads = Loads(rig, {})
    loads.undecided.add("chosen")
    rig.add("x", 40, length=400, max_tokens=450)
    rig.step()
    rig.add("chosen", 40, length=5, max_tokens=20)
    rig.add("refused", 300, length=5, max_tokens=600)
    rig.step()
    assert rig.running == ["x"]
    assert rig.state["why_waiting"] == {"refused": "peak_memory"}
    loads.undecided.clear()
    rig.step()
    assert rig.running == ["x", "chosen"]


def test_others_leave_only_for_those_who_fit_at_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forecast that was dropped in steps that preempt refused 511 of 515 admissions by a fresh draw."""
    sizes = {"max_num_seqs": 2, "num_blocks": 40, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    rig = Rig(f"{PREEMPTING}+past-future", options={"admission": {"reserve": 0.02}}, **sizes)
    for name in ("a", "b"):
        rig.add(name, 20, length=280, osl=280, max_tokens=280)
    rig.step(20, seconds=0.01)
    rig.add("short", 20, length=2, osl=2, max_tokens=460)  # by its bound it does not fit beside one of them
    rig.step(4, seconds=0.01)
    assert rig.running == ["a", "b"]
    monkeypatch.setattr(PeakMemory, "gate", lambda self, step: _Open())
    rig.scheduler.planner.memo.clear()
    rig.step(4, seconds=0.01)
    assert rig.state["preemptions"]["policy"] == 1, "or the test shows nothing of the forecast"


class _Open:
    name, closed = "open", False

    def fits(self, *args: object) -> bool:
        return True

    def take(self, *args: object) -> None:
        pass


def test_nobody_leaves_for_a_request_that_would_get_no_token() -> None:
    """The budget is asked first: of 47 steps that preempted 23 admitted nobody."""
    rig = Rig(
        f"{PREEMPTING}+sarathi",
        max_num_seqs=4,
        num_blocks=400,
        options={"slo": {"tbt_ms": 20.0}, "admission": {"priced": False}, "budget": {"min_prefill_tokens": 8}},
    )
    preempting = admitted = 0
    for number in range(40):
        rig.add(f"r{number}", 30, length=40 - number, osl=40 - number, max_tokens=80)
        before = rig.state["preemptions"]["policy"]
        decision = rig.step(seconds=0.02)
        if decision is not None and rig.state["preemptions"]["policy"] > before:
            preempting += 1
            admitted += bool(decision.new or decision.resumed)
    assert preempting > 5
    assert admitted == preempting
    rig.drain(seconds=0.02)


def test_victims_are_ranked_by_what_they_have_left_now() -> None:
    """Under FastServe's queues one victim in three was chosen by a queue it had left, and resumed in the same step."""
    rig = Rig(
        "fastserve",
        max_num_seqs=4,
        num_blocks=400,
        options={"ordering": {"base_quantum_s": 0.05}, "admission": {"min_progress_tokens": 1}},
    )
    policy = SkipJoin(base_quantum_s=0.05)
    wrong = victims = 0
    original = rig.scheduler.preempt_now

    def preempt(request: object, reason: str, *, drop_output: bool) -> None:
        nonlocal wrong, victims
        views = [rig.scheduler.tracked.view(rig.scheduler.tracked[req_id]) for req_id in rig.running]
        levels = {view.req_id: policy.level(view) for view in views}
        victims += 1
        wrong += levels[request.request_id] < max(levels.values())  # type: ignore[attr-defined]
        original(request, reason, drop_output=drop_output)

    rig.scheduler.preempt_now = preempt
    for number in range(60):
        rig.add(f"r{number}", 10 + number % 30, length=60, max_tokens=200)
        rig.step(3, seconds=0.02)
    rig.drain(seconds=0.02)
    assert victims > 20
    assert wrong == 0


@pytest.mark.parametrize("system", ["alise", "past-future", "auto", "accelgen", "orca"])
def test_prompts_are_cut_where_vllm_cuts_them(system: str) -> None:
    """With --long-prefill-token-threshold three prompts share a step, of which one would take all of it."""

    def tokens(system: str | None) -> list[int]:
        rig = Rig(system, num_blocks=400, max_num_batched_tokens=256, enable_prefix_caching=False)
        rig.scheduler.scheduler_config.long_prefill_token_threshold = 100
        for name in "abc":
            rig.add(name, 300, length=4, max_tokens=8)
        decision = rig.step()
        assert decision is not None
        return sorted(tokens for _, tokens in decision.scheduled)

    assert tokens(None) == [56, 100, 100]
    assert tokens(system) == ([100] if system == "orca" else [56, 100, 100]), "orca takes whole prompts"
