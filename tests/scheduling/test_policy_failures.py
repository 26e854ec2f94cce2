"""Policies that raise or answer nonsense: the step is first come, first served, counted, logged once."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.steering import SCRIPT, Rig, play, workload
from vllm_ext.contract import Rank, Room, Split, Step

DEPTHS = pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])


@pytest.fixture(scope="module")
def upstream_outputs() -> dict[int, dict[str, list[int]]]:
    return {depth: play(Rig(None, depth=depth, num_blocks=28, max_num_seqs=5), workload()) for depth in (1, 2)}


class _Boom(Exception):
    pass


def _boom(*args: object) -> Any:
    raise _Boom("policy")


def _raise_midway(step: Step, room: Room) -> None:
    for candidate in step.waiting():
        room.take(candidate)
        raise _Boom("midway")


def _plan(name: str, wrong: Any) -> Callable[[Step, Room], None]:
    return lambda step, room: setattr(room, name, wrong)


FAILURES: dict[str, Callable[[], None]] = {
    "ordering": lambda: setattr(SCRIPT, "rank", _boom),
    "admission": lambda: setattr(SCRIPT, "select", _boom),
    "admission-midway": lambda: setattr(SCRIPT, "select", _raise_midway),
    "budget": lambda: setattr(SCRIPT, "split", _boom),
    "nan-key": lambda: setattr(SCRIPT, "rank", lambda v, now: Rank((math.nan,))),
    "nan-in-one-key": lambda: setattr(
        SCRIPT, "rank", lambda v, now: Rank((math.nan if v.req_id == "r5" else v.num_prompt_tokens,))
    ),
    "nan-until": lambda: setattr(SCRIPT, "rank", lambda v, now: Rank((1.0,), until_s=math.nan)),
    "no-rank": lambda: setattr(SCRIPT, "rank", lambda v, now: None),
    "text-in-key": lambda: setattr(SCRIPT, "rank", lambda v, now: Rank(("x" if int(v.req_id[1:]) % 2 else 1.0,))),  # type: ignore[arg-type]
    **{
        f"{name}={wrong!r}": lambda name=name, wrong=wrong: setattr(SCRIPT, "select", _plan(name, wrong))
        for name, wrong in [("preempt", None), ("preempt", [[]]), ("admit", 3), ("admit", [3]), ("admit", None)]
    },
    "no-split": lambda: setattr(SCRIPT, "split", lambda step: None),
    "fraction-of-a-token": lambda: setattr(SCRIPT, "split", lambda step: Split(tokens=7.5)),  # type: ignore[arg-type]
}


@DEPTHS
@pytest.mark.parametrize("failure", FAILURES)
def test_a_policy_that_fails_costs_no_request_and_is_counted(
    failure: str, depth: int, upstream_outputs: dict[int, dict[str, list[int]]]
) -> None:
    FAILURES[failure]()
    rig = Rig("scripted", depth=depth, num_blocks=28, max_num_seqs=5)
    assert play(rig, workload()) == upstream_outputs[depth]
    assert rig.state["fallbacks"] > 0


@pytest.mark.parametrize("failure", ["ordering", "admission", "budget", "nan-key"])
def test_a_step_whose_policy_fails_is_first_come_first_served(failure: str) -> None:
    rig = Rig("scripted", max_num_seqs=2)
    SCRIPT.rank = lambda v, now: Rank((-v.num_prompt_tokens,))  # longest prompt first, when it works
    rig.add("a", 5)
    rig.add("b", 6)
    rig.add("c", 7)
    assert rig.waiting == ["c", "b", "a"]
    FAILURES[failure]()
    rig.add("d", 8)  # its rank is asked for
    rig.step()
    assert rig.running == ["a", "b"]
    SCRIPT.reset()
    SCRIPT.rank = lambda v, now: Rank((-v.num_prompt_tokens,))
    rig.drain()


def test_a_failing_policy_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    import vllm_ext.scheduling.scheduler as module

    records: list[str] = []
    monkeypatch.setattr(module.logger, "exception", lambda message, *args: records.append(message % args))
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    SCRIPT.select = _boom
    rig = Rig("scripted", max_num_seqs=1)
    for i in range(5):
        rig.add(f"r{i}", length=3)
    rig.drain()
    assert len(records) == 1
    assert "scripted" in records[0]
    assert rig.state["fallbacks"] >= 3


def test_a_policy_that_recovers_steers_again() -> None:
    rig = Rig("scripted", max_num_seqs=1)
    SCRIPT.rank = _boom
    for name, prompt in (("a", 5), ("b", 6), ("c", 7)):
        rig.add(name, prompt, length=20)
    rig.step()
    assert rig.running == ["a"]
    SCRIPT.rank = lambda v, now: Rank((-v.num_prompt_tokens,))
    rig.scheduler.ranked.prices_changed()
    rig.step(2)
    fallbacks = rig.state["fallbacks"]
    rig.step(3)
    assert rig.waiting == ["c", "b"]
    assert rig.state["fallbacks"] == fallbacks
    rig.drain()


def test_notes_last_until_a_policy_fails() -> None:
    rig, seen = Rig("scripted", max_num_seqs=1), []

    def look(step: Step) -> Split:
        seen.append(dict(step.memo))
        step.memo["mine"] = step.number
        return Split()

    SCRIPT.split = look
    rig.add("a", length=20)
    rig.step(3)
    first = rig.scheduler.current_step - 3
    assert [notes.get("mine", 0) - first for notes in seen[1:]] == [0, 1]
    rig.add("b", length=20)
    SCRIPT.select = _boom
    rig.step()
    rig.step()
    assert seen[-1] == {}
    SCRIPT.reset()
    rig.drain()


def test_changes_are_counted_when_somebody_comes_joins_or_leaves_and_only_then() -> None:
    rig, seen = Rig("scripted", max_num_seqs=2), []

    def look(step: Step) -> Split:
        seen.append((step.changes, set(rig.running), set(rig.waiting)))
        return Split()

    SCRIPT.split = look
    for name, length in (("a", 4), ("b", 9), ("c", 5), ("d", 3)):
        rig.add(name, length=length)
    rig.drain()
    for (number, *who), (next_number, *next_who) in itertools.pairwise(seen):
        assert (number == next_number) == (who == next_who)
    assert len({number for number, *_ in seen}) > 3
