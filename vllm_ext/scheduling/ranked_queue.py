"""A waiting queue in the order of a policy whose cost does not depend on its length."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_ext.scheduling.plan import Rank

_COMPACT_ABOVE = 64
_OLDEST_KEPT_FRESH = 4
"""Requests that arrived first and are ranked again as soon as their rank expires, whatever else is due: aged requests
are served in this order, so that the aging bound holds however long the queue is."""

Entry = tuple[tuple[float, ...], int, Request, Rank]
"""Key with its ties, insertion number, request, rank."""


class RankedQueue(RequestQueue):
    """Requests by rank, with lazy aging, hiding, and an arrival-ordered fallback.

    A heap holds one live entry per request; entries that were superseded stay behind until they surface. A second heap
    knows when ranks expire, so that aging touches only what is due. peek and pop agree within a step: ranks change in
    `begin_step` only, and by requests that join.
    """

    def __init__(self, rank: Callable[[Request], Rank], ties: Callable[[Request], tuple[float, int]]) -> None:
        """Create an empty queue.

        Args:
            rank: Asks the policy; called when a request joins and when its rank expires.
            ties: Arrival time and a unique number of a request; they end every comparison.
        """
        self._rank = rank
        self._ties = ties
        self._live: dict[Request, Entry] = {}
        self._heap: list[Entry] = []
        self._expiry: list[tuple[float, int, Request]] = []
        self._arrivals: list[tuple[tuple[float, int], Request]] = []
        self._rounds: deque[Request] = deque()
        self._counter = 0
        self._hidden: frozenset[str] = frozenset()
        self._aside: list[Entry] = []
        self.by_arrival = False
        """Serve in order of arrival, whatever the ranks: what a step falls back to when a policy fails."""
        self.changes = 0
        """Counts who joined or left."""
        self.levels: dict[int, int] = {}
        """Number of requests per level."""

    # --- vLLM's interface -------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add a request at the place its rank gives it."""
        if request in self._live:
            return
        self.changes += 1
        self._push(request)
        heapq.heappush(self._arrivals, (self._ties(request), request))
        self._rounds.append(request)

    def prepend_request(self, request: Request) -> None:
        """Add a request: its rank decides, there is no front to put it at."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Add requests: their ranks decide."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """Return the visible request of best rank.

        Raises:
            IndexError: every request is hidden, or there is none.
        """
        request = self._first()
        if request is None:
            raise IndexError("peek from an empty queue")
        return request

    def pop_request(self) -> Request:
        """Remove and return the request that peek_request returns."""
        request = self.peek_request()
        self._remove(request)
        return request

    def remove_request(self, request: Request) -> None:
        """Remove a request.

        Raises:
            ValueError: the request is not in the queue.
        """
        if request not in self._live:
            raise ValueError(f"request {request.request_id} is not in the queue")
        self._remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove the requests that are here; vLLM also names some that are not."""
        for request in requests:
            if request in self._live:
                self._remove(request)

    def __bool__(self) -> bool:
        return self._first() is not None

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return (entry[2] for entry in sorted(self._live.values()))

    # --- what steering adds -----------------------------------------------------------------------------------------

    def __contains__(self, request: object) -> bool:
        return request in self._live

    def begin_step(self, now: float, max_expired: int, refresh: int) -> None:
        """Show what was hidden, rank again what expired, and a few others in turn so that estimates stay fresh.

        Args:
            now: Clock time, s.
            max_expired: Bound on expired ranks handled now; the rest follows in the next steps.
            refresh: Number of other requests to rank again.
        """
        self.hide(frozenset())
        self.by_arrival = False
        self._first_arrival()  # drops what is gone from the front
        due: list[Request] = []
        while self._expiry and self._expiry[0][0] <= now and len(due) < max_expired:
            _, number, request = heapq.heappop(self._expiry)
            if (entry := self._live.get(request)) is not None and entry[1] == number:
                due.append(request)
        for _, request in islice(_ascending(self._arrivals), _OLDEST_KEPT_FRESH):
            entry = self._live.get(request)
            if entry is not None and entry[3].until <= now and request not in due:
                due.append(request)
        for request in due:  # after all were taken: one that expires at once must not take the others' turns
            self._push(request)
        for _ in range(min(refresh, len(self._rounds))):
            request = self._rounds.popleft()
            if request in self._live:
                self._rounds.append(request)
                self._push(request)

    def hide(self, req_ids: frozenset[str]) -> None:
        """Keep these requests from being admitted; replaces what was hidden before."""
        for entry in self._aside:
            heapq.heappush(self._heap, entry)
        self._aside.clear()
        self._hidden = req_ids

    def rerank(self, request: Request) -> None:
        """Ask for the rank of a waiting request again, because something about it changed."""
        if request in self._live:
            self._push(request)

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the key of a request in the queue, ties included."""
        return self._live[request][0]

    def level(self, request: Request) -> int:
        """Return the level of a request in the queue."""
        return self._live[request][3].level

    def best(self, count: int) -> Iterator[Request]:
        """Yield up to ``count`` visible requests, best rank first, without changing the queue.

        Superseded entries on the way are looked at too, so it costs little more than ``count`` on average.
        """
        visible = (
            entry[2]
            for entry in _ascending(self._heap)
            if self._live.get(entry[2]) is entry and entry[2].request_id not in self._hidden
        )
        return islice(visible, count)

    def _push(self, request: Request) -> None:
        rank = self._rank(request)
        self._counter += 1
        entry = ((*rank.key, *self._ties(request)), self._counter, request, rank)
        if (old := self._live.get(request)) is not None:
            self._count(old[3].level, -1)
        self._count(rank.level, 1)
        self._live[request] = entry
        heapq.heappush(self._heap, entry)
        if rank.until != math.inf:
            heapq.heappush(self._expiry, (rank.until, self._counter, request))
        self._compact()

    def _remove(self, request: Request) -> None:
        entry = self._live.pop(request)
        self.changes += 1
        self._count(entry[3].level, -1)
        if not self._live:  # nothing to keep alive finished requests for
            for structure in (self._heap, self._expiry, self._arrivals, self._rounds, self._aside):
                structure.clear()

    def _first(self) -> Request | None:
        if self.by_arrival:
            return self._first_arrival()
        heap, live = self._heap, self._live
        while heap:
            entry = heap[0]
            if live.get(entry[2]) is not entry:
                heapq.heappop(heap)
            elif self._hidden and entry[2].request_id in self._hidden:
                self._aside.append(heapq.heappop(heap))
            else:
                return entry[2]
        return None

    def _first_arrival(self) -> Request | None:
        while self._arrivals:
            request = self._arrivals[0][1]
            if request in self._live:
                return request
            heapq.heappop(self._arrivals)
        return None

    def oldest(self) -> Request | None:
        """Return the request that arrived first."""
        return self._first_arrival()

    def _count(self, level: int, change: int) -> None:
        left = self.levels.get(level, 0) + change
        if left:
            self.levels[level] = left
        else:
            self.levels.pop(level, None)

    def _compact(self) -> None:
        """Drop superseded entries once they outnumber the live ones, so that memory follows the queue's length."""
        limit = 2 * len(self._live) + _COMPACT_ABOVE
        if len(self._heap) + len(self._aside) > limit:
            aside = {id(entry) for entry in self._aside}
            self._heap = [e for e in self._live.values() if id(e) not in aside]
            heapq.heapify(self._heap)
        if len(self._expiry) > limit:
            self._expiry = [e for e in self._expiry if (c := self._live.get(e[2])) is not None and c[1] == e[1]]
            heapq.heapify(self._expiry)
        if len(self._arrivals) > limit:
            self._arrivals = [(self._ties(r), r) for r in self._live]
            heapq.heapify(self._arrivals)
        if len(self._rounds) > limit:
            self._rounds = deque(dict.fromkeys(r for r in self._rounds if r in self._live))


_Item = TypeVar("_Item")


def _ascending(heap: list[_Item]) -> Iterator[_Item]:
    """Yield the items of a heap in order without changing it.

    A child never goes before its parent, so the next item is always a child of one that was already yielded.
    """
    frontier = [(heap[0], 0)] if heap else []
    while frontier:
        item, place = heapq.heappop(frontier)
        yield item
        for child in (2 * place + 1, 2 * place + 2):
            if child < len(heap):
                heapq.heappush(frontier, (heap[child], child))
