"""A waiting queue in the order of a policy, at a cost that does not depend on its length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_ext.contract import Ageing, Rank
from vllm_ext.scheduling.deadlines import Deadlines
from vllm_ext.scheduling.engine_state import awaits_grammar, grammar_failed
from vllm_ext.scheduling.lazy_heap import LazyHeap
from vllm_ext.scheduling.load import LongestWaits
from vllm_ext.scheduling.places import Places
from vllm_ext.scheduling.shares import Shares

_MAX_DUE = 16
"""Bound on ranks that are asked for again in a step; the rest follows in the next ones."""
_OLDEST_KEPT_FRESH = 4
"""Requests that arrived first and are ranked again as soon as their rank expires, whatever else is due: aged requests
are served in this order, so that the aging bound holds however long the queue is."""
_BLOCKED_ASKED = 64
"""Requests whose grammar is being compiled that are looked at in a step, in turn."""

Entry = tuple[tuple[float, ...], int, Request, Rank]
"""Key with its ties, insertion number, request, rank."""


class RankedQueue(RequestQueue):
    """Requests by rank, with lazy aging, offers, and an arrival-ordered fallback.

    They stand in `Places`, one for all or one per client; a heap knows when ranks expire, so that aging touches only
    what is due. peek and pop agree within a step: ranks change in `begin_step` only, and by requests that join.
    Requests whose grammar is being compiled stand apart: vLLM would pass over them, and however many there are they
    hide nobody.
    """

    def __init__(
        self,
        rank: Callable[[Request], Rank],
        ties: Callable[[Request], tuple[float, int]],
        ageing: Ageing | None = None,
        shares: Shares | None = None,
    ) -> None:
        """Create an empty queue.

        Args:
            rank: Asks the policy; called when a request joins and when its rank expires.
            ties: Arrival time and a unique number of a request; they end every comparison.
            ageing: How waiting counts against costs; None: no rank has one.
            shares: Whose turn it is; None: everybody's.
        """
        self._rank = rank
        self._ties = ties
        self._live: dict[Request, Entry] = {}
        self._ageing, self.shares = ageing, shares
        self._all = Places(ageing, self._in_force)
        self._of_clients: dict[str, Places] = {}
        self._looked_at: dict[str, Places] = {}
        self._now = 0.0
        self._known_first: tuple[object, Request | None] = (None, None)
        """The request of the best rank, and for which state of the queue it is."""
        self._expiry = Deadlines(self._in_force)
        self._arrivals: LazyHeap[tuple[tuple[float, int], Request]] = LazyHeap(lambda entry: entry[1] in self._live)
        self._blocked: dict[Request, None] = {}
        self._failed: dict[Request, None] = {}
        self._stale: deque[Request] = deque()
        self._counter = 0
        self._offered: deque[Request] | None = None
        self.by_arrival = False
        """Serve in order of arrival, whatever the ranks: what a step falls back to when a policy fails."""
        self.changes = 0
        """Counts who joined or left."""
        self.levels: dict[int, int] = {}
        """Number of requests per level."""
        self.longest_waits = LongestWaits()

    # --- vLLM's interface -------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add a request at the place its rank gives it."""
        if request in self._live:
            return
        self.changes += 1
        if awaits_grammar(request):
            self._blocked[request] = None
        elif grammar_failed(request):
            self._failed[request] = None
        self._push(request)
        self._arrivals.push((self._ties(request), request))

    def prepend_request(self, request: Request) -> None:
        """Add a request: its rank decides, there is no front to put it at."""
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Add requests: their ranks decide."""
        for request in requests:
            self.add_request(request)

    def peek_request(self) -> Request:
        """Return the next request that is offered, or the one of best rank where nobody in particular is.

        Raises:
            IndexError: there is none.
        """
        request = self._first()
        if request is None:
            raise IndexError("peek from an empty queue")
        return request

    def pop_request(self) -> Request:
        """Remove and return the request that peek_request returns."""
        request = self.peek_request()
        self._remove(request, admitted=True)
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
        return iter(sorted(self._live, key=self.key))

    # --- what steering adds -----------------------------------------------------------------------------------------

    def __contains__(self, request: object) -> bool:
        return request in self._live

    def begin_step(self, now: float) -> None:
        """Rank again what is due at clock time ``now`` (s), and let those in whose grammar has come."""
        self.offer(None)
        self.by_arrival = False
        self._now = now
        self._all.begin_step(now)
        self._looked_at.clear()
        self._unblock()
        self._arrivals.first()  # drops what is gone from the front
        due = list(islice(self._expiry.due(now), _MAX_DUE))
        for _, request in islice(self._arrivals.ascending(), _OLDEST_KEPT_FRESH):
            if self._live[request][3].until_s <= now and request not in due:
                due.append(request)
        while self._stale and len(due) < _MAX_DUE:
            request = self._stale.popleft()
            if request in self._live and request not in due:
                due.append(request)
        for request in due:  # after all were taken: one that expires at once must not take the others' turns
            self._push(request)

    def offer(self, requests: Sequence[Request] | None) -> None:
        """Show vLLM exactly these, in their order, until the next step or offer; None: everybody, by rank.

        Whoever is taken out and put back is not offered again. Those whose grammar failed are offered first: vLLM does
        not admit them, but tells their clients.
        """
        if requests is None:
            self._offered = None
            return
        named = (*self._failed, *(request for request in requests if request in self._live))
        self._offered = deque(dict.fromkeys(named))  # whoever is named twice comes once

    def rerank(self, request: Request) -> None:
        """Ask for the rank of a waiting request again, because something about it changed."""
        if request in self._live:
            self._push(request)

    def rerank_all(self) -> None:
        """Ask for all ranks again, some in each of the next steps: what they were made of changed."""
        self._stale = deque(self._live)

    def finished(self, request: Request) -> None:
        """Note that a request ended, wherever it was."""
        if self.shares is not None:
            self.shares.finished(request, waits=request in self._live)

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the key of a request in the queue, ties included, as it is in this step."""
        return self._places(request).key(self._live[request], self._ties(request))

    def rank(self, request: Request) -> Rank:
        """Return the rank of a request in the queue."""
        return self._live[request][3]

    def best(self, count: int) -> Iterator[Request]:
        """Yield up to ``count`` requests that wait for nothing but room, best rank first; the queue stays as it is."""
        return islice(self._by_rank(), count)

    def _by_rank(self) -> Iterator[Request]:
        return self._all.ascending() if self.shares is None else self.shares.in_turn(self._in_order)

    def _in_order(self, client: str) -> Iterator[Request]:
        return self._freshened(client).ascending()

    def _places(self, request: Request) -> Places:
        return self._all if self.shares is None else self._freshened(self.shares.client(request))

    def _freshened(self, client: str) -> Places:
        """Return a client's places as of this step; those that nobody looks at cost nothing."""
        places = self._looked_at.get(client)
        if places is None:
            places = self._of_clients.get(client)
            if places is None:
                places = self._of_clients[client] = Places(self._ageing, self._in_force)
            places.begin_step(self._now)
            self._looked_at[client] = places
        return places

    def oldest(self) -> Request | None:
        """Return the request that arrived first."""
        first = self._arrivals.first()
        return None if first is None else first[1]

    def _push(self, request: Request) -> None:
        rank = self._rank(request)
        self._counter += 1
        entry = ((*rank.key, *self._ties(request)), self._counter, request, rank)
        if (old := self._live.get(request)) is not None:
            self._count(old[3].level, -1)
        elif self.shares is not None:
            self.shares.joined(request)
        self._count(rank.level, 1)
        self._live[request] = entry
        if request not in self._blocked:
            self._places(request).enter(entry, self._ties(request))
        self._expiry.add(rank.until_s, self._counter, request, requests=len(self._live))
        self._compact(request)

    def _in_force(self, request: Request, number: int) -> bool:
        entry = self._live.get(request)
        return entry is not None and entry[1] == number

    def _unblock(self) -> None:
        """Look at some of those whose grammar is being compiled, in turn; whose grammar has come waits like others."""
        for request in list(islice(self._blocked, _BLOCKED_ASKED)):
            del self._blocked[request]
            if awaits_grammar(request):
                self._blocked[request] = None
                continue
            self.changes += 1
            self._places(request).enter(self._live[request], self._ties(request))
            if grammar_failed(request):
                self._failed[request] = None

    def _remove(self, request: Request, *, admitted: bool = False) -> None:
        entry = self._live.pop(request)
        if admitted and not request.num_preemptions:
            self.longest_waits.admitted(entry[3].level, self._now - self._ties(request)[0], self._now)
        if self.shares is not None:
            client = self.shares.client(request)
            self.shares.left(request, admitted=admitted)
            if not self.shares.waiting(client):
                self._of_clients.pop(client, None)
                self._looked_at.pop(client, None)
        if self._offered and request in self._offered:
            self._offered.remove(request)
        self._blocked.pop(request, None)
        self._failed.pop(request, None)
        self.changes += 1
        self._count(entry[3].level, -1)
        if not self._live:  # nothing to keep alive finished requests for
            self._known_first = (None, None)
            for structure in (self._all, self._of_clients, self._looked_at, self._expiry, self._arrivals, self._stale):
                structure.clear()

    def _first(self) -> Request | None:
        if self.by_arrival:
            return self.oldest()
        if self._offered is not None:
            return self._offered[0] if self._offered else None
        asked = (self.changes, self._counter, self._now)
        if self._known_first[0] != asked:  # several ask in a step, and each would look at every lane
            first = self._all.first() if self.shares is None else next(self._by_rank(), None)
            self._known_first = (asked, first)
        return self._known_first[1]

    def _count(self, level: int, change: int) -> None:
        left = self.levels.get(level, 0) + change
        if left:
            self.levels[level] = left
        else:
            self.levels.pop(level, None)

    def _compact(self, request: Request) -> None:
        """Drop superseded entries once they outnumber the live ones, so that memory follows the queue's length."""
        count = len(self._live)
        self._arrivals.compact(count, lambda: ((self._ties(r), r) for r in self._live))
        if self.shares is None:
            self._all.compact(count, self._open, self._ties)
        else:
            client = self.shares.client(request)
            self._places(request).compact(
                self.shares.waiting(client), lambda: (e for e in self._open() if self._client(e) == client), self._ties
            )

    def _client(self, entry: Entry) -> str:
        return "" if self.shares is None else self.shares.client(entry[2])

    def _open(self) -> Iterator[Entry]:
        return (entry for entry in self._live.values() if entry[2] not in self._blocked)
