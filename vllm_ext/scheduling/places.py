"""Waiting requests in the order of their ranks: one heap of keys, and lanes for ranks that have a cost."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from vllm_ext.scheduling.lanes import Lanes
from vllm_ext.scheduling.lazy_heap import COMPACT_ABOVE, LazyHeap

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.contract import Ageing, Rank

    Entry = tuple[tuple[float, ...], int, Request, Rank]
    """Key with its ties, insertion number, request, rank."""


class Places:
    """The waiting requests that are compared by rank: all of them, or those of one client."""

    def __init__(self, ageing: Ageing | None, live: Callable[[Request, int], bool]) -> None:
        """Start empty.

        Args:
            ageing: How waiting counts against costs; None: no rank has one.
            live: Says whether the insertion of such a number is the request's last one.
        """
        self._heap: LazyHeap[Entry] = LazyHeap(lambda entry: live(entry[2], entry[1]))
        self._lanes = None if ageing is None else Lanes(ageing, live)
        self._entered = 0

    def __len__(self) -> int:
        """Entries held, superseded ones included."""
        return len(self._heap) + (0 if self._lanes is None else self._lanes.held)

    def begin_step(self, now: float) -> None:
        """Compare as of clock time ``now`` (s), and drop what looks met often."""
        self._heap.tidy()
        if self._lanes is not None:
            self._lanes.now = now
            self._lanes.tidy()

    def enter(self, entry: Entry, ties: tuple[float, int]) -> None:
        """Add a request."""
        _, number, request, rank = entry
        self._entered += 1
        if self._lanes is None or not rank.cost:
            self._heap.push(entry)
        else:
            self._lanes.add(request, rank, ties, number)

    def key(self, entry: Entry, ties: tuple[float, int]) -> tuple[float, ...]:
        """Return the key of an entry as it is in this step, ties included."""
        return entry[0] if self._lanes is None or not entry[3].cost else self._lanes.key(entry[3], ties)

    def first(self) -> Request | None:
        """Return the request of the best rank."""
        if self._lanes is not None:
            return next(self.ascending(), None)
        first = self._heap.first()
        return None if first is None else first[2]

    def ascending(self) -> Iterator[Request]:
        """Yield requests in order, without changing anything."""
        if self._lanes is None:
            return (entry[2] for entry in self._heap.ascending())
        ranked = ((entry[0], entry[2]) for entry in self._heap.ascending())
        return (request for _, request in heapq.merge(ranked, self._lanes.ascending()))

    def compact(
        self, count: int, entries: Callable[[], Iterator[Entry]], ties: Callable[[Request], tuple[float, int]]
    ) -> None:
        """Drop superseded entries once they outnumber the live ones, so that memory follows the queue's length.

        Args:
            count: Live entries, at most.
            entries: Yields them.
            ties: Arrival time and a unique number of a request.
        """
        self._heap.compact(count, lambda: (entry for entry in entries() if self._lanes is None or not entry[3].cost))
        if self._lanes is not None and self._entered % COMPACT_ABOVE == 0 and self._lanes.held > 2 * count:
            costly = (entry for entry in entries() if entry[3].cost)
            self._lanes.rebuild((request, rank, ties(request), number) for _, number, request, rank in costly)

    def clear(self) -> None:
        """Drop all."""
        self._heap.clear()
        if self._lanes is not None:
            self._lanes.rebuild(iter(()))
