"""Virtual time: its clock, its events, and the order of those that happen at the same moment."""

from __future__ import annotations

import heapq
from enum import IntEnum
from typing import Any, NamedTuple


class EventKind(IntEnum):
    """Kinds of events; of several at one moment, the lower value happens first.

    | kind | why it stands where it stands |
    |---|---|
    | ABORT | the engine core reads its abort queue before it processes a step's output |
    | STEP_END | its output frees seats and blocks, and ends requests, before anybody new is looked at |
    | ARRIVAL | requests received while a step ran are added before the next is scheduled |
    | STEP_START | scheduling comes last of what the host does: it sees everything that has happened by now |
    | TRANSFER_END | copies are looked for when a step is handed to the device, after it was scheduled |

    Aborts and arrivals are kept in queues. The others are moments of the engine core's one thread: what comes before
    them in this table, and is due, is taken from the queues first (`EventQueue.due`).
    """

    ABORT = 0
    STEP_END = 1
    ARRIVAL = 2
    STEP_START = 3
    TRANSFER_END = 4


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

    def due(self, moment_s: float, before: EventKind) -> bool:
        """Return whether the next event happens before an event of another kind at ``moment_s``."""
        return bool(self._heap) and self._heap[0][:2] < (moment_s, before)

    def goes_before(self, other: EventQueue) -> bool:
        """Return whether this queue's next event happens before the other's; False if this one is empty."""
        return bool(self._heap) and (not other._heap or self._heap[0][:2] < other._heap[0][:2])

    def next_time_s(self) -> float | None:
        """Return when the next event happens, or None if none is planned."""
        return self._heap[0].time_s if self._heap else None


class VirtualClock:
    """A clock to hand to schedulers and simulators: call it for the time in seconds.

    Args:
        start_s: The first reading.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Let time pass; raises ValueError as `advance_to`."""
        self.advance_to(self._now_s + seconds)

    def advance_to(self, moment_s: float) -> None:
        """Let time pass until ``moment_s``, exactly.

        Raises:
            ValueError: that moment is past; the clock never goes back.
        """
        if not moment_s >= self._now_s:
            raise ValueError(f"moment_s={moment_s!r}: it is {self._now_s} s already, a clock never goes back")
        self._now_s = moment_s
