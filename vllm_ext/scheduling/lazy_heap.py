"""A heap whose entries may be superseded: they stay behind until they surface or outnumber the others."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

COMPACT_ABOVE = 64
"""Superseded entries that are left alone, however few others there are."""
_SEEN, _KEPT = 64, 64
"""Superseded entries that looks may meet before they are dropped, and live ones among which that is done."""

T = TypeVar("T", bound=tuple[Any, ...])


class LazyHeap(Generic[T]):
    """Entries in ascending order, looked at without changing the heap."""

    def __init__(self, live: Callable[[T], bool]) -> None:
        """Start empty.

        Args:
            live: Says whether an entry still counts.
        """
        self._live = live
        self._heap: list[T] = []
        self._met = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, entry: T) -> None:
        """Add an entry."""
        heapq.heappush(self._heap, entry)

    def first(self) -> T | None:
        """Return the least entry that counts; those before it are dropped."""
        heap = self._heap
        while heap:
            if self._live(heap[0]):
                return heap[0]
            heapq.heappop(heap)
        return None

    def ascending(self) -> Iterator[T]:
        """Yield the entries that count in order, without changing the heap.

        A child never goes before its parent, so the next one is always a child of one that was already yielded.
        """
        heap = self._heap
        frontier = [(heap[0], 0)] if heap else []
        while frontier:
            entry, place = heapq.heappop(frontier)
            if self._live(entry):
                yield entry
            else:
                self._met += 1
            for child in (2 * place + 1, 2 * place + 2):
                if child < len(heap):
                    heapq.heappush(frontier, (heap[child], child))

    def tidy(self) -> None:
        """Drop superseded entries among the first, if looks have met many."""
        if self._met <= _SEEN:
            return
        self._met = 0
        kept: list[T] = []
        while self._heap and len(kept) < _KEPT:
            entry = heapq.heappop(self._heap)
            if self._live(entry):
                kept.append(entry)
        for entry in kept:
            heapq.heappush(self._heap, entry)

    def compact(self, most: int, entries: Callable[[], Iterable[T]]) -> None:
        """Start again from ``entries`` if there are more than twice as many as the ``most`` that can count."""
        if len(self._heap) > 2 * most + COMPACT_ABOVE:
            self._heap = list(entries())
            heapq.heapify(self._heap)

    def clear(self) -> None:
        """Drop all."""
        self._heap.clear()
