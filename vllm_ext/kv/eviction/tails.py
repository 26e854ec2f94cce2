"""Ends of conversations, in classes of equal worth by age: what an eviction chooses from.

What a chunk is worth falls with the time since it was used, at a rate that differs from chunk to chunk, so chunks
can't be kept in order of worth. Within a class the rate is the same and the oldest is worth least: an eviction compares
the oldest of each class, once for all that it takes.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Generator, Hashable
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
        self._pushed: Callable[[_Class, float], None] | None = None
        """Told of each new oldest of a class while keys are taken."""

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
        if self._pushed is not None and heap[0][0] == used_s:
            self._pushed(number, used_s)

    def take(self, value: Callable[[_Class, float], float]) -> Generator[_Key, None, None]:
        """Take out keys, those of least value first; what is pushed meanwhile, until this is closed, takes part.

        Args:
            value: Of what is in a class and was used at a time; less for what was used earlier.
        """
        ranked: list[tuple[float, int, _Class, float]] = []
        order = itertools.count()  # of what is worth the same

        def rank(number: _Class, used_s: float) -> None:
            heapq.heappush(ranked, (value(number, used_s), next(order), number, used_s))

        for number in list(self._heaps):
            if (used_s := self._oldest(number)) is not None:
                rank(number, used_s)
        self._pushed = rank
        try:
            while ranked:
                _, _, number, used_s = heapq.heappop(ranked)
                oldest = self._oldest(number)
                if oldest == used_s:
                    key = heapq.heappop(self._heaps[number])[1]
                    oldest = self._oldest(number)
                    if oldest is not None:
                        rank(number, oldest)
                    yield key
                elif oldest is not None and oldest > used_s:
                    rank(number, oldest)
        finally:
            self._pushed = None

    def _oldest(self, number: _Class) -> float | None:
        """Return when the oldest tail of a class was used; None if it has none."""
        heap = self._heaps.get(number)
        if heap is None:
            return None
        while heap and not self._holds(heap[0]):
            heapq.heappop(heap)
        if not heap:
            del self._heaps[number]
            return None
        return heap[0][0]

    def __len__(self) -> int:
        """Entries, those that hold no more included."""
        return sum(len(heap) for heap in self._heaps.values())

    def clear(self) -> None:
        """Forget everything."""
        self._heaps.clear()

    def _holds(self, entry: tuple[float, _Key]) -> bool:
        return self._used_s(entry[1]) == entry[0]
