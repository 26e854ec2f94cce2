"""Ends of conversations, in classes of equal worth by age: what an eviction chooses from.

What a chunk is worth falls with the time since it was used, at a rate that differs from chunk to chunk, so chunks
can't be kept in order of worth. Within a class the rate is the same and the oldest is worth least: an eviction compares
the oldest of each class.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

_Class = TypeVar("_Class", bound=Hashable)
_Key = TypeVar("_Key")

_LEAST_ENTRIES = 64


class Tails(Generic[_Class, _Key]):
    """Keys by class and time of last use.

    Entries are never removed when a key changes; those that hold no more are passed over when they surface.

    Args:
        used_s: When a key was used last; None if it is no tail.
    """

    def __init__(self, used_s: Callable[[_Key], float | None]) -> None:
        self._used_s = used_s
        self._heaps: dict[_Class, list[tuple[float, _Key]]] = {}

    def push(self, number: _Class, key: _Key, num_keys: int) -> None:
        """Add a key that is a tail now.

        Args:
            num_keys: How many keys there are at most: a heap of more than twice as many entries is cleaned.
        """
        used_s = self._used_s(key)
        if used_s is None:
            return
        heap = self._heaps.setdefault(number, [])
        heapq.heappush(heap, (used_s, key))
        if len(heap) > 2 * num_keys + _LEAST_ENTRIES:
            heap[:] = sorted({entry for entry in heap if self._holds(entry)})

    def oldest(self) -> Iterator[tuple[_Class, float]]:
        """Yield each class that has a tail, and when its oldest was used."""
        for number in list(self._heaps):
            heap = self._heaps[number]
            while heap and not self._holds(heap[0]):
                heapq.heappop(heap)
            if heap:
                yield number, heap[0][0]
            else:
                del self._heaps[number]

    def pop(self, number: _Class) -> _Key:
        """Take out the oldest tail of a class that `oldest` named just now."""
        return heapq.heappop(self._heaps[number])[1]

    def __len__(self) -> int:
        """Entries, those that hold no more included."""
        return sum(len(heap) for heap in self._heaps.values())

    def clear(self) -> None:
        """Forget everything."""
        self._heaps.clear()

    def _holds(self, entry: tuple[float, _Key]) -> bool:
        return self._used_s(entry[1]) == entry[0]
