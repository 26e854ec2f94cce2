"""A plan that lets nothing run costs the next step its plan; the server never stands still."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from vllm_ext.scheduling.plan import AdmissionPlan, BudgetPlan
from vllm_ext.scheduling.views import StepView

from .steering import SCRIPT, Rig, play, workload

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


@pytest.fixture(autouse=True)
def _empty_script() -> Iterator[None]:
    SCRIPT.reset()
    yield
    SCRIPT.reset()


def _skip_all(step: StepView) -> BudgetPlan:
    return BudgetPlan(skip=tuple(view.req_id for view in step.running_worst_first()))


def _skip_decodes_and_allow_nothing_else(step: StepView) -> BudgetPlan:
    return BudgetPlan(skip=step.decoding(), decode_only=True)


def _hold_all(step: StepView) -> AdmissionPlan:
    return AdmissionPlan(hold=frozenset(view.req_id for view in step.waiting()))


MISTAKES: dict[str, Callable[[], None]] = {
    "skips-everything": lambda: setattr(SCRIPT, "budget", _skip_all),
    "skips-decodes-in-a-decode-only-step": lambda: setattr(SCRIPT, "budget", _skip_decodes_and_allow_nothing_else),
    "no-tokens": lambda: setattr(SCRIPT, "budget", lambda step: BudgetPlan(token_budget=0)),
    "admits-nobody": lambda: setattr(SCRIPT, "admit", lambda step: AdmissionPlan(max_running=0)),
    "holds-everybody": lambda: setattr(SCRIPT, "admit", _hold_all),
}


@DEPTHS
@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_request_ends_with_upstreams_output_and_the_stalls_are_counted(mistake: str, depth: int) -> None:
    expected = play(Rig(None, depth=depth, num_blocks=28, max_num_seqs=5), workload())
    MISTAKES[mistake]()
    rig = Rig("scripted", depth=depth, num_blocks=28, max_num_seqs=5)
    assert play(rig, workload()) == expected
    assert rig.state["stalls"] > 0
    assert rig.state["fallbacks"] == 0


def test_the_plan_after_an_empty_step_is_not_followed_and_the_one_after_that_is() -> None:
    rig = Rig("scripted")
    SCRIPT.budget = _skip_all
    rig.add("a", length=30)
    tokens = []
    for _ in range(6):
        decision = rig.step()
        assert decision is not None
        tokens.append(decision.num_tokens)
    assert tokens == [10, 0, 1, 0, 1, 0]
    assert rig.state["stalls"] == 3


def test_an_empty_step_that_had_nothing_to_do_is_no_stall() -> None:
    """Async: the only request awaits its last token while the plan keeps the next one out."""
    rig = Rig("scripted", depth=2)
    SCRIPT.admit = lambda step: AdmissionPlan(max_running=max(1, step.num_running))
    rig.add("a", length=3, max_tokens=3)
    rig.add("b", length=3, max_tokens=3)
    rig.drain()
    empty = [decision for decision in rig.loop.decisions if not decision.num_tokens]
    assert empty, "no step was empty: nothing was tried"
    assert rig.state["stalls"] == 0


def test_a_plan_that_restricts_nothing_is_never_blamed() -> None:
    rig = Rig("scripted", depth=2)
    rig.add("a", length=3, max_tokens=3)
    rig.drain()
    assert rig.state["stalls"] == 0
