"""Every knob of a plan: what it does to a step, that no output changes, and that it is put back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.steering import SCRIPT, Rig, knobs, play, workload
from vllm_ext.contract import Rank, Room, Split, Step
from vllm_ext.systems.upstream import InOrder

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


def _preempt_worst(step: Step, room: Room) -> None:
    eligible = [victim for victim in step.victims() if victim.request.progress_tokens >= 3][:1]
    head = next(step.waiting())
    if eligible and room.fits(head, eligible):
        room.take(head, eligible)
    room.preempt.append("unknown")


def _only_the_first(step: Step, room: Room) -> None:
    room.take(next(step.waiting()))


def _last_first(step: Step, room: Room) -> None:
    for candidate in reversed(list(step.waiting())):
        if room.fits(candidate):
            room.take(candidate)
    room.admit.insert(0, "unknown")


def _two_at_a_time(step: Step, room: Room) -> None:
    room.seats = min(room.seats, 2 - step.num_running)
    InOrder().select(step, room)


class _Alternate:
    def __init__(self, *plans: Split) -> None:
        self.plans, self.number = plans, 0

    def __call__(self, step: Step) -> Split:
        self.number += 1
        return self.plans[self.number % len(self.plans)]


KNOBS: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "shuffled-ranks": lambda: setattr(
        SCRIPT, "rank", lambda v, now: Rank((hash((v.num_output_tokens, v.arrival_time)) % 97,))
    ),
    "preempt": lambda: setattr(SCRIPT, "select", _preempt_worst),
    "only-the-first": lambda: setattr(SCRIPT, "select", _only_the_first),
    "last-first": lambda: setattr(SCRIPT, "select", _last_first),
    "two-at-a-time": lambda: setattr(SCRIPT, "select", _two_at_a_time),
    "budget-of-8": lambda: setattr(SCRIPT, "split", lambda step: Split(tokens=8)),
    "budget-above-vllms": lambda: setattr(SCRIPT, "split", lambda step: Split(tokens=10**9)),
    "every-third-step-empty": lambda: setattr(SCRIPT, "split", _Alternate(Split(tokens=0), Split(), Split())),
    "decode-only": lambda: setattr(SCRIPT, "split", _Alternate(Split(prefill=False), Split())),
    "apart": lambda: setattr(SCRIPT, "split", lambda step: Split(apart=True)),
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


def test_exactly_those_who_are_named_join_in_their_order() -> None:
    rig = Rig("scripted")

    def second_and_third(step: Step, room: Room) -> None:
        _first, second, third = step.waiting()
        room.take(third)
        room.take(second)

    SCRIPT.select = second_and_third
    for name in "abc":
        rig.add(name)
    assert _decisions_of_a_step(rig) == {"c": 10, "b": 10}
    assert rig.running == ["c", "b"]
    SCRIPT.reset()
    assert _decisions_of_a_step(rig) == {"c": 1, "b": 1, "a": 10}


def test_naming_nobody_keeps_everybody_out_but_those_who_run() -> None:
    rig = Rig("scripted")
    rig.add("a")
    rig.add("b")
    rig.step()
    SCRIPT.select = lambda step, room: None
    rig.add("c")
    assert _decisions_of_a_step(rig) == {"a": 1, "b": 1}


@pytest.mark.parametrize(("budget", "expected"), [(0, {}), (1, {"a": 1}), (7, {"a": 1, "b": 6}), (-5, {})])
def test_token_budget_of_a_step(budget: int, expected: dict[str, int]) -> None:
    rig = Rig("scripted")
    rig.add("a")
    rig.step()
    SCRIPT.split = lambda step: Split(tokens=budget)
    rig.add("b")
    assert _decisions_of_a_step(rig) == expected


def test_decode_only_keeps_prefills_out_as_long_as_something_decodes() -> None:
    rig = Rig("scripted")
    SCRIPT.split = lambda step: Split(prefill=False)
    rig.add("a", length=3)
    assert _decisions_of_a_step(rig) == {"a": 10}, "nothing decodes yet"
    rig.add("b")
    assert _decisions_of_a_step(rig) == {"a": 1}
    assert _decisions_of_a_step(rig) == {"a": 1}
    assert _decisions_of_a_step(rig) == {"b": 10}, "a is done"


def test_who_sits_a_step_out_keeps_its_blocks_and_returns_in_the_next_one() -> None:
    rig = Rig("scripted")
    rig.add("a")
    rig.step()
    SCRIPT.split = lambda step: Split(apart=True)
    rig.add("b")
    assert _decisions_of_a_step(rig) == {"b": 10}
    assert _decisions_of_a_step(rig) == {"a": 1, "b": 1}, "nobody prefills"


def test_preempting_ids_that_do_not_run_is_passed_over() -> None:
    rig = Rig("scripted", max_num_seqs=1)
    rig.add("a")
    rig.add("b")
    rig.step()
    SCRIPT.select = lambda step, room: room.preempt.extend(("b", "gone", "a", "a"))
    rig.step()
    assert rig.state["preemptions"]["policy"] == 1
    SCRIPT.reset()
    rig.drain()
