"""Waiting requests that compete by cost over waiting, at a cost that does not depend on how many there are.

All scores fall as time goes on, each at its own rate, so that no heap of scores would hold. But of requests of one cost
the oldest is always first: they stand in lanes of an eighth of an octave of cost, in order of arrival, and only the
heads of lanes compete. Within a lane costs count as equal.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_ext.scheduling.lazy_heap import LazyHeap

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.contract import Ageing, Rank

_PER_OCTAVE = 8
_Lane = tuple[tuple[float, ...], int]
_Entry = tuple[float, int, int, Any, Any]
"""Arrival time, number of arrival, insertion number, request, rank."""


class Lanes:
    """Requests whose ranks have a cost.

    Attributes:
        now: Clock time (s) for which they compete: the same for a whole step.
    """

    def __init__(self, ageing: Ageing, live: Callable[[Request, int], bool]) -> None:
        """Start empty.

        Args:
            ageing: How waiting counts.
            live: Says whether the insertion of such a number is the request's last one.
        """
        self._ageing, self._is_live = ageing, live
        self._lanes: dict[_Lane, LazyHeap[_Entry]] = {}
        self.now = 0.0

    def add(self, request: Request, rank: Rank, ties: tuple[float, int], number: int) -> None:
        """Add a request in its lane."""
        lane = (rank.key, math.floor(_PER_OCTAVE * math.log2(rank.cost)))
        heap = self._lanes.get(lane)
        if heap is None:
            heap = self._lanes[lane] = LazyHeap(self._counts)
        heap.push((*ties, number, request, rank))

    def key(self, rank: Rank, ties: tuple[float, int]) -> tuple[float, ...]:
        """Return the key by which a request competes in this step, ties included."""
        return (*rank.key, self._ageing.score(rank.cost, self.now - ties[0]), *ties)

    def ascending(self) -> Iterator[tuple[tuple[float, ...], Request]]:
        """Yield key and request in the order of this step, without changing anything. Cost: a look at each lane."""
        heads = []
        for lane, heap in list(self._lanes.items()):
            first = heap.first()
            if first is None:
                del self._lanes[lane]
                continue
            heads.append((self._keyed(first), lane))
        heapq.heapify(heads)
        followers: dict[_Lane, Iterator[_Entry]] = {}
        while heads:
            (key, entry), lane = heads[0]
            yield key, entry[3]
            if lane not in followers:
                followers[lane] = self._lanes[lane].ascending()
                next(followers[lane])
            behind = next(followers[lane], None)
            if behind is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (self._keyed(behind), lane))

    def tidy(self) -> None:
        """Drop superseded entries that looks met often."""
        for heap in self._lanes.values():
            heap.tidy()

    def rebuild(self, entries: Iterator[tuple[Request, Rank, tuple[float, int], int]]) -> None:
        """Start again from these."""
        self._lanes.clear()
        for entry in entries:
            self.add(*entry)

    @property
    def held(self) -> int:
        """Entries held, superseded ones included."""
        return sum(map(len, self._lanes.values()))

    def _counts(self, entry: _Entry) -> bool:
        return self._is_live(entry[3], entry[2])

    def _keyed(self, entry: _Entry) -> tuple[tuple[float, ...], _Entry]:
        return self.key(entry[4], entry[:2]), entry
