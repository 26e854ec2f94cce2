"""A heap whose entries may be superseded: they stay behind until they surface or outnumber the others."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

_LEFT_ALONE = 64
"""Superseded entries that are left alone, however few others there are."""
_KEPT = 64
"""Live entries among which superseded ones are dropped that looks met often."""

T = TypeVar("T", bound=tuple[Any, ...])


class LazyHeap(Generic[T]):
    """Entries in ascending order, looked at without changing the heap. It grows to twice its live entries at most."""

    def __init__(self, live: Callable[[Any], bool]) -> None:
        """Start empty.

        Args:
            live: Says of an entry's second item, its number, whether the entry still counts: as it is asked for each,
                best a set's or dictionary's ``__contains__``.
        """
        self._live = live
        self._heap: list[T] = []
        self._most = self._met = 0

    def __len__(self) -> int:
        """Entries held, superseded ones included."""
        return len(self._heap)

    def push(self, entry: T) -> None:
        """Add an entry."""
        heapq.heappush(self._heap, entry)
        if len(self._heap) > self._most + _LEFT_ALONE:
            live = self._live
            self._heap = [entry for entry in self._heap if live(entry[1])]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap)

    def first(self) -> T | None:
        """Return the least entry that counts; those before it are dropped."""
        heap = self._heap
        while heap:
            if self._live(heap[0][1]):
                return heap[0]
            heapq.heappop(heap)
        return None

    def pop_until(self, most: float, count: int) -> list[T]:
        """Take out up to ``count`` entries that count and begin with ``most`` or less, least first."""
        found: list[T] = []
        while len(found) < count and (first := self.first()) is not None and first[0] <= most:
            found.append(heapq.heappop(self._heap))
        return found

    def ascending(self) -> Iterator[T]:
        """Yield the entries that count in order; the heap must not change meanwhile.

        A child never goes before its parent, so the next one is always a child of one that was already yielded.
        """
        self._tidy()
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, place = heapq.heappop(frontier)
            if self._live(entry[1]):
                yield entry
            else:
                self._met += 1
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))

    def _tidy(self) -> None:
        """Drop superseded entries among the first, if looks have met many."""
        if self._met <= _LEFT_ALONE:
            return
        self._met = 0
        heap = self._heap.copy()  # another look at what is here may not be over
        kept: list[T] = []
        while heap and len(kept) < _KEPT:
            entry = heapq.heappop(heap)
            if self._live(entry[1]):
                kept.append(entry)
        for entry in kept:
            heapq.heappush(heap, entry)
        self._heap = heap

    def clear(self) -> None:
        """Drop all."""
        self._heap.clear()
