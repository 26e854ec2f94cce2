"""Ends of conversations, in classes of equal worth by age: what an eviction chooses from.

What a chunk is worth falls with the time since it was used, at a rate that differs from chunk to chunk, so chunks
can't be kept in order of worth. Within a class the rate is the same and the oldest is worth least: an eviction compares
the oldest of each class, and after each chunk that it takes those of the classes that changed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey

_LEAST_ENTRIES = 64
_Entry = tuple[float, int, OffloadKey]
"""Time of last use, end, chunk: of those used at the same time the first one in its sequence goes first."""


class Tails:
    """Chunks by class and time of last use.

    Entries are never removed when a chunk changes; those that hold no more are passed over when they surface.

    Args:
        used_s: When a chunk was used last; None if it is no tail.
    """

    def __init__(self, used_s: Callable[[OffloadKey], float | None]) -> None:
        self._used_s = used_s
        self._heaps: dict[Hashable, list[_Entry]] = {}
        self._changed: dict[Hashable, None] = {}
        """Classes that were added to since an eviction looked, in that order."""

    def push(self, number: Hashable, key: OffloadKey, end: int, num_chunks: int) -> None:
        """Add a chunk if it is a tail now.

        Args:
            number: Its class.
            key: The chunk.
            end: Tokens up to its end.
            num_chunks: How many there are at most: a heap of more than twice as many entries is cleaned.
        """
        used_s = self._used_s(key)
        if used_s is None:
            return
        heap = self._heaps.setdefault(number, [])
        heapq.heappush(heap, (used_s, end, key))
        self._changed[number] = None
        if len(heap) > 2 * num_chunks + _LEAST_ENTRIES:
            heap[:] = sorted({entry for entry in heap if self._holds(entry)})

    def take(self, value: Callable[[Any, float], float]) -> Iterator[OffloadKey]:
        """Take out chunks, those of least value first; what is pushed meanwhile takes part.

        Args:
            value: Of what is in a class and was used at a time; less for what was used earlier.
        """
        values: dict[Hashable, float] = {}
        self._changed = dict.fromkeys(self._heaps)
        while True:
            for number in self._changed:
                if (used_s := self._oldest(number)) is not None:
                    values[number] = value(number, used_s)
                else:
                    values.pop(number, None)
            self._changed = {}
            if not values:
                return
            number = min(values, key=values.__getitem__)
            self._changed[number] = None
            if self._holds(entry := heapq.heappop(self._heaps[number])):
                yield entry[-1]

    def _oldest(self, number: Hashable) -> float | None:
        """Return when the oldest tail of a class was used; None if it has none."""
        heap = self._heaps[number]
        while heap and not self._holds(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def __len__(self) -> int:
        """Entries, those that hold no more included."""
        return sum(len(heap) for heap in self._heaps.values())

    def clear(self) -> None:
        """Forget everything."""
        self._heaps.clear()
        self._changed.clear()

    def _holds(self, entry: _Entry) -> bool:
        return self._used_s(entry[-1]) == entry[0]
