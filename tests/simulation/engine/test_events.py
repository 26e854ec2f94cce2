"""Events happen by time, then by kind, then in the order in which they were planned."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.engine.events import EventKind, EventQueue


def drain(queue: EventQueue) -> list[object]:
    return [queue.pop().payload for _ in range(len(queue))]


def test_earlier_events_happen_first() -> None:
    queue = EventQueue()
    for moment in (3.0, 1.0, 2.0):
        queue.push(moment, EventKind.ARRIVAL, moment)
    assert queue.next_time_s() == 1.0
    assert drain(queue) == [1.0, 2.0, 3.0]


def test_events_of_one_moment_happen_in_the_order_of_the_table() -> None:
    queue = EventQueue()
    for kind in reversed(EventKind):
        queue.push(1.0, kind, kind.name)
    assert drain(queue) == ["ABORT", "STEP_END", "ARRIVAL", "STEP_START", "TRANSFER_END"]


def test_events_of_one_moment_and_kind_happen_in_the_order_of_their_planning() -> None:
    """Payloads are never compared: requests have no order."""
    queue = EventQueue()
    payloads = [object() for _ in range(20)]
    for payload in payloads:
        queue.push(1.0, EventKind.ARRIVAL, payload)
    assert drain(queue) == payloads


def test_empty_queue_has_no_next_moment() -> None:
    queue = EventQueue()
    assert queue.next_time_s() is None
    assert not queue
    queue.push(0.0, EventKind.ABORT)
    queue.pop()
    assert queue.next_time_s() is None


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from(EventKind))))
def test_order_is_that_of_a_stable_sort(planned: list[tuple[float, EventKind]]) -> None:
    queue = EventQueue()
    for number, (moment, kind) in enumerate(planned):
        queue.push(moment, kind, number)
    assert drain(queue) == sorted(range(len(planned)), key=lambda number: planned[number])
