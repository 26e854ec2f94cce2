"""A plan that lets nothing run costs the next step its plan; the server never stands still."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.steering import SCRIPT, Rig, play, workload
from vllm_ext.contract import Room, Split, Step

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


def _nobody(step: Step, room: Room) -> None:
    pass


def _a_stranger(step: Step, room: Room) -> None:
    room.admit.append("unknown")


MISTAKES: dict[str, Callable[[], None]] = {
    "no-tokens": lambda: setattr(SCRIPT, "split", lambda step: Split(tokens=0)),
    "admits-nobody": lambda: setattr(SCRIPT, "select", _nobody),
    "admits-a-stranger": lambda: setattr(SCRIPT, "select", _a_stranger),
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
    SCRIPT.split = lambda step: Split(tokens=0 if step.num_running else None)
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

    def one_at_a_time(step: Step, room: Room) -> None:
        if room.idle:
            room.take(next(step.waiting()))

    SCRIPT.select = one_at_a_time
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
