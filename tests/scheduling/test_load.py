"""What an operator sees of a load: shares of time, and who waited longest."""

from __future__ import annotations

import pytest

from tests.support.steering import Rig
from vllm_ext.scheduling.load import Load, LongestWaits
from vllm_ext.systems.alise import cost_class


def test_a_share_follows_time_and_not_steps() -> None:
    load = Load()
    load.stepped(0.0, waiting=False, kv_used=0.5)
    assert load.state() == {"waiting_share": 0.0, "kv_share": 0.5}
    for _ in range(1000):  # many short steps with a queue, in one second
        load.stepped(1.0, waiting=True, kv_used=0.5)
    assert load.waiting_share < 0.01
    load.stepped(601.0, waiting=True, kv_used=0.5)
    assert load.waiting_share == pytest.approx(1, abs=0.01)
    assert load.kv_share == pytest.approx(0.5)


def test_longest_waits_are_kept_for_some_minutes() -> None:
    waits = LongestWaits()
    waits.admitted(1, 5.0, 0.0)
    waits.admitted(1, 2.0, 100.0)
    waits.admitted(2, 1.0, 100.0)
    assert waits.state(140.0) == {"1": 5.0, "2": 1.0}
    waits.admitted(1, 3.0, 160.0)
    assert waits.state(299.0) == {"1": 5.0, "2": 1.0}
    assert waits.state(310.0) == {"1": 3.0}
    assert waits.state(1000.0) == {}


@pytest.mark.parametrize(("steps", "level"), [(1e-9, 1), (3.9, 1), (4.0, 2), (15.9, 2), (16.0, 3), (1e30, 12)])
def test_classes_of_cost(steps: float, level: int) -> None:
    assert cost_class(steps) == level


def test_the_state_of_a_server_tells_its_load_and_who_pays() -> None:
    rig = Rig("alise", max_num_seqs=1)
    rig.add("first", length=30, osl=30)
    rig.step(1, seconds=1.0)
    rig.add("long", 10, length=200, osl=200)
    rig.add("short", 10, length=2, osl=2)
    rig.drain(seconds=1.0)
    state = rig.state
    waits = [wait for _, wait in sorted(state["longest_wait_by_level"].items(), key=lambda item: int(item[0]))]
    assert waits == sorted(waits)
    assert 30 <= waits[-1] <= 40
    assert 0 < state["load"]["waiting_share"] < 0.5
