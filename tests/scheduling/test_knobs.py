"""Every knob of a plan: what it does to a step, that no output changes, and that it is put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from vllm_ext.scheduling.plan import AdmissionPlan, BudgetPlan, Rank
from vllm_ext.scheduling.views import StepView

from .steering import SCRIPT, Rig, knobs, play, workload

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def _empty_script() -> Iterator[None]:
    SCRIPT.reset()
    yield
    SCRIPT.reset()


def _random_skips(step: StepView) -> BudgetPlan:
    names = [view.req_id for view in step.running_worst_first()]
    return BudgetPlan(skip=(*names[: len(names) // 2], "unknown"))


def _preempt_worst(step: StepView) -> AdmissionPlan:
    eligible = [v.req_id for v in step.running_worst_first() if v.progress_tokens >= 3]
    return AdmissionPlan(preempt=(*eligible[:1], "unknown"))


def _hold_worst(step: StepView) -> AdmissionPlan:
    names = [view.req_id for view in step.waiting()]
    return AdmissionPlan(hold=frozenset({*names[1:], "unknown"}))


class _Alternate:
    def __init__(self, *plans: BudgetPlan) -> None:
        self.plans, self.number = plans, 0

    def __call__(self, step: StepView) -> BudgetPlan:
        self.number += 1
        return self.plans[self.number % len(self.plans)]


KNOBS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "shuffled-ranks": lambda: setattr(
        SCRIPT, "rank", lambda v, now: Rank((hash((v.num_output_tokens, v.arrival_time)) % 97,))
    ),
    "preempt": lambda: setattr(SCRIPT, "admit", _preempt_worst),
    "hold": lambda: setattr(SCRIPT, "admit", _hold_worst),
    "max-running": lambda: setattr(SCRIPT, "admit", lambda step: AdmissionPlan(max_running=2)),
    "max-running-above-vllms": lambda: setattr(SCRIPT, "admit", lambda step: AdmissionPlan(max_running=10**9)),
    "budget-of-8": lambda: setattr(SCRIPT, "budget", lambda step: BudgetPlan(token_budget=8)),
    "budget-above-vllms": lambda: setattr(SCRIPT, "budget", lambda step: BudgetPlan(token_budget=10**9)),
    "every-third-step-empty": lambda: setattr(
        SCRIPT, "budget", _Alternate(BudgetPlan(token_budget=0), BudgetPlan(), BudgetPlan())
    ),
    "decode-only": lambda: setattr(SCRIPT, "budget", _Alternate(BudgetPlan(decode_only=True), BudgetPlan())),
    "skip": lambda: setattr(SCRIPT, "budget", _random_skips),
}


@pytest.fixture(scope="module")
def upstream_outputs() -> dict[int, dict[str, list[int]]]:
    return {depth: play(Rig(None, depth=depth, num_blocks=28, max_num_seqs=5), workload()) for depth in (1, 2)}


@DEPTHS
@pytest.mark.parametrize("knob", KNOBS)
def test_no_knob_changes_an_output_and_all_are_put_back(
    knob: str, depth: int, upstream_outputs: dict[int, dict[str, list[int]]]
) -> None:
    KNOBS[knob]()
    rig = Rig("scripted", depth=depth, num_blocks=28, max_num_seqs=5)
    before = knobs(rig.scheduler)

    def check(rig: Rig) -> None:
        assert knobs(rig.scheduler) == before

    assert play(rig, workload(), each_step=check) == upstream_outputs[depth]
    state = rig.state
    assert state["fallbacks"] == 0
    assert state["policy_steps"] > 0
    if knob == "preempt":
        assert state["preemptions"]["policy"] > 5


def _decisions_of_a_step(rig: Rig) -> dict[str, int]:
    decision = rig.step()
    assert decision is not None
    return dict(decision.scheduled)


def test_held_requests_wait_for_exactly_one_step() -> None:
    rig = Rig("scripted")
    SCRIPT.admit = lambda step: AdmissionPlan(hold=frozenset({"a"}))
    rig.add("a")
    rig.add("b")
    assert _decisions_of_a_step(rig) == {"b": 10}
    SCRIPT.reset()
    assert _decisions_of_a_step(rig) == {"b": 1, "a": 10}


def test_max_running_blocks_admissions_only() -> None:
    rig = Rig("scripted")
    rig.add("a")
    rig.add("b")
    rig.step()
    SCRIPT.admit = lambda step: AdmissionPlan(max_running=1)
    rig.add("c")
    assert _decisions_of_a_step(rig) == {"a": 1, "b": 1}


@pytest.mark.parametrize(("budget", "expected"), [(0, {}), (1, {"a": 1}), (7, {"a": 1, "b": 6}), (-5, {})])
def test_token_budget_of_a_step(budget: int, expected: dict[str, int]) -> None:
    rig = Rig("scripted")
    rig.add("a")
    rig.step()
    SCRIPT.budget = lambda step: BudgetPlan(token_budget=budget)
    rig.add("b")
    assert _decisions_of_a_step(rig) == expected


def test_decode_only_keeps_prefills_out_as_long_as_something_decodes() -> None:
    rig = Rig("scripted")
    SCRIPT.budget = lambda step: BudgetPlan(decode_only=True)
    rig.add("a", length=3)
    assert _decisions_of_a_step(rig) == {"a": 10}, "nothing decodes yet"
    rig.add("b")
    assert _decisions_of_a_step(rig) == {"a": 1}
    assert _decisions_of_a_step(rig) == {"a": 1}
    assert _decisions_of_a_step(rig) == {"b": 10}, "a is done"


def test_a_skipped_request_keeps_its_blocks_and_returns_in_the_next_step() -> None:
    rig = Rig("scripted")
    rig.add("a")
    rig.add("b")
    rig.step()
    SCRIPT.budget = lambda step: BudgetPlan(skip=("a",))
    assert _decisions_of_a_step(rig) == {"b": 1}
    SCRIPT.reset()
    assert _decisions_of_a_step(rig) == {"a": 1, "b": 1}


def test_preempting_ids_that_do_not_run_is_passed_over() -> None:
    rig = Rig("scripted", max_num_seqs=1)
    rig.add("a")
    rig.add("b")
    rig.step()
    SCRIPT.admit = lambda step: AdmissionPlan(preempt=("b", "gone", "a", "a"))
    rig.step()
    assert rig.state["preemptions"]["policy"] == 1
    SCRIPT.reset()
    rig.drain()
