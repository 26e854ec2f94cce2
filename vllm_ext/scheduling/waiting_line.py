"""Waiting requests in the order of their ranks, at a cost that does not depend on how many there are.

Of requests whose ranks have a cost all scores fall as time goes on, each at its own rate, so that no heap of scores
would hold. But of requests of one cost the oldest is always first: they stand in buckets of an eighth of an octave of
cost, in order of arrival, and only the heads of buckets compete. Within a bucket costs count as equal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING

from vllm_ext.scheduling.lazy_heap import LazyHeap

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.contract import Ageing, Rank

    Keyed = tuple[tuple[float, ...], "Entry"]
    """Key by which a request competes in this step, ties included."""

_PER_OCTAVE = 8
_KEYED = itemgetter(0, 2)


@dataclass(slots=True, eq=False)
class Entry:
    """A waiting request as it was ranked last."""

    request: Request
    rank: Rank
    ties: tuple[float, int]
    """Arrival time, and a number of its own."""
    number: int
    """Counts ranks: no two are compared further than this."""
    joined: int
    """The number of its first rank since it waits."""
    epoch: int
    """Of the prices that the rank was made of."""
    line: WaitingLine | None = None
    """Where it stands; None: apart."""

    @property
    def lasting_key(self) -> tuple[float, ...]:
        """The key of a rank without a cost, ties included: it is the same at any time."""
        return (*self.rank.key, *self.ties)

    def key(self, ageing: Ageing | None, now: float) -> tuple[float, ...]:
        """Return the key by which it competes at clock time ``now`` (s), ties included."""
        if ageing is None or not self.rank.cost:
            return self.lasting_key
        return (*self.rank.key, ageing.score(self.rank.cost, now - self.ties[0]), *self.ties)


Live = Callable[[int], bool]


class WaitingLine:
    """Requests that are compared by rank alone: those of one client that want the same LoRA adapter.

    Attributes:
        members: How many there are.
    """

    def __init__(self, ageing: Ageing | None, live: Live) -> None:
        """Start empty.

        Args:
            ageing: How waiting counts against costs; None: no rank has one.
            live: Says of an entry's number whether it is its request's last one.
        """
        self._ageing, self._live = ageing, live
        self._by_key: LazyHeap[tuple[tuple[float, ...], int, Entry]] = LazyHeap(live)
        self._by_arrival: LazyHeap[tuple[tuple[float, int], int, Entry]] = LazyHeap(live)
        self._costly: dict[tuple[float, ...], _Buckets] = {}
        self._costly_keys: LazyHeap[tuple[tuple[float, ...], int, _Buckets]] = LazyHeap(self._is_used)
        self._numbered: dict[int, tuple[float, ...]] = {}
        self._count = count()
        self.members = 0

    def __len__(self) -> int:
        """Entries held, superseded ones included."""
        by_rank = len(self._by_key) + len(self._costly_keys) + sum(map(len, self._costly.values()))
        return by_rank + len(self._by_arrival)

    def enter(self, entry: Entry) -> None:
        """Add a request."""
        self.members += 1
        self._by_arrival.push((entry.ties, entry.number, entry))
        if self._ageing is None or not entry.rank.cost:
            self._by_key.push((entry.lasting_key, entry.number, entry))
            return
        key = entry.rank.key
        buckets = self._costly.get(key)
        if buckets is not None:
            buckets.enter(entry)
            return
        buckets = self._costly[key] = _Buckets(self._ageing, self._live)
        buckets.enter(entry)
        number = next(self._count)
        self._numbered[number] = key
        self._costly_keys.push((key, number, buckets))

    def left(self) -> None:
        """Note that somebody left, or was ranked again; with the last one goes all that was kept."""
        self.members -= 1
        if not self.members:
            self._by_key.clear()
            self._by_arrival.clear()
            self._costly.clear()
            self._numbered.clear()
            self._costly_keys.clear()

    def ascending(self, now: float) -> Iterator[Keyed]:
        """Yield requests in their order at clock time ``now`` (s); the line must not change meanwhile.

        Of ranks that have a cost, only those of keys that are reached are looked at.
        """
        plain: Iterator[Keyed] = map(_KEYED, self._by_key.ascending())
        return heapq.merge(plain, self._by_score(now)) if self._costly else plain

    def by_arrival(self) -> Iterator[Entry]:
        """Yield requests, the oldest first; the line must not change meanwhile."""
        return (entry for _, _, entry in self._by_arrival.ascending())

    def _by_score(self, now: float) -> Iterator[Keyed]:
        for _, _, buckets in self._costly_keys.ascending():
            yield from buckets.ascending(now)

    def _is_used(self, number: int) -> bool:
        """Say whether anybody is in these buckets; of those of a key that nobody has any more nothing is kept."""
        key = self._numbered.get(number)
        if key is None:
            return False
        if not self._costly[key].is_empty:
            return True
        del self._numbered[number], self._costly[key]
        return False


class _Buckets:
    """Requests of one key whose ranks have a cost, by that."""

    def __init__(self, ageing: Ageing, live: Live) -> None:
        self._ageing, self._live = ageing, live
        self._buckets: dict[int, LazyHeap[tuple[tuple[float, int], int, Entry]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    @property
    def is_empty(self) -> bool:
        return all(heap.first() is None for heap in self._buckets.values())

    def enter(self, entry: Entry) -> None:
        number = math.floor(_PER_OCTAVE * math.log2(entry.rank.cost))
        heap = self._buckets.get(number)
        if heap is None:
            heap = self._buckets[number] = LazyHeap(self._live)
        heap.push((entry.ties, entry.number, entry))

    def ascending(self, now: float) -> Iterator[Keyed]:
        """Yield requests by score. Cost: a look at each bucket."""
        heads = []
        for number, heap in list(self._buckets.items()):
            first = heap.first()
            if first is None:
                del self._buckets[number]
            else:
                heads.append((first[2].key(self._ageing, now), number, first[2]))
        heapq.heapify(heads)
        followers: dict[int, Iterator[tuple[tuple[float, int], int, Entry]]] = {}
        while heads:
            key, number, entry = heads[0]
            yield key, entry
            if number not in followers:
                followers[number] = self._buckets[number].ascending()
                next(followers[number])
            behind = next(followers[number], None)
            if behind is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (behind[2].key(self._ageing, now), number, behind[2]))
