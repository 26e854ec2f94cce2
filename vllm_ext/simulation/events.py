"""Events in virtual time, and the order of those that happen at the same moment."""

from __future__ import annotations

import heapq
from enum import IntEnum
from typing import Any, NamedTuple


class EventKind(IntEnum):
    """Kinds of events; of several at one moment, the lower value happens first.

    | kind | why it stands where it stands |
    |---|---|
    | ABORT | the engine core reads its abort queue before it processes a step's output |
    | TRANSFER_END | a copy that is through is reported with the output of the step that ends at that moment |
    | STEP_END | its output frees seats and blocks, and ends requests, before anybody new is looked at |
    | ARRIVAL | requests received while a step ran are added before the next is scheduled |
    | STEP_START | scheduling comes last: it sees everything that has happened by now |
    """

    ABORT = 0
    TRANSFER_END = 1
    STEP_END = 2
    ARRIVAL = 3
    STEP_START = 4


class Event(NamedTuple):
    """Something that happens at a moment. Compared by time, then kind, then order of being planned."""

    time_s: float
    kind: EventKind
    sequence: int
    payload: Any = None


class EventQueue:
    """Future events, earliest first."""

    def __init__(self) -> None:
        self._heap: list[Event] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, time_s: float, kind: EventKind, payload: Any = None) -> None:
        """Plan an event; those of equal time and kind happen in the order in which they were planned."""
        self._count += 1
        heapq.heappush(self._heap, Event(time_s, kind, self._count, payload))

    def pop(self) -> Event:
        """Return the next event and remove it."""
        return heapq.heappop(self._heap)

    def next_time_s(self) -> float | None:
        """Return when the next event happens, or None if none is planned."""
        return self._heap[0].time_s if self._heap else None
