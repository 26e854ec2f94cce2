"""Who waits: vLLM's waiting queue in the order of a policy, at a cost that does not depend on its length."""

from __future__ import annotations

import enum
import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from operator import attrgetter
from typing import TYPE_CHECKING

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

from vllm_ext.contract import Ageing, AgeLimit, Rank
from vllm_ext.contract.room import ADAPTERS, AdapterPlaces
from vllm_ext.scheduling.aged_turns import AgedTurns
from vllm_ext.scheduling.engine_state import adapter_of, awaits_grammar, grammar_failed
from vllm_ext.scheduling.lazy_heap import LazyHeap
from vllm_ext.scheduling.load import LongestWaits
from vllm_ext.scheduling.shares import Shares
from vllm_ext.scheduling.waiting_line import Entry, WaitingLine

if TYPE_CHECKING:
    from vllm_ext.scheduling.waiting_line import Keyed

_MAX_DUE = 16
"""Bound on ranks that are asked for again in a step because they expired; the rest follows in the next ones."""
_OLDEST_KEPT_FRESH = 4
"""Requests that arrived first and are ranked again as soon as their rank expires, whatever else is due: aged requests
are served in this order, so that the aging bound holds however long the queue is."""
_BEST_KEPT_CURRENT = 2
"""Requests of best rank that are ranked again before they compete, if prices changed since."""
_ROUND_EVERY = 4
"""Steps after which one more of those is ranked again that do not compete yet, once prices have changed."""
_OLDEST_LOOKED_AT = 512
"""Requests that arrived first and are looked at for whose turn it is as they have waited longest."""
_BLOCKED_ASKED = 64
"""Requests whose grammar is being compiled that are looked at in a step, in turn."""


class Apart(enum.Enum):
    """Why a request that waits could not join now, however much room there is."""

    GRAMMAR = "grammar"
    """Its grammar is being compiled."""
    FAILED = "failed grammar"
    """vLLM has yet to tell its client."""
    UNDECIDED = "undecided"
    """A connector could not tell what KV it has of it when it was asked last, or vLLM passed over it."""


class WaitingTable(RequestQueue):
    """Waiting requests by rank, with lazy ageing, offers, and an arrival-ordered fallback.

    They stand in `WaitingLine`, one for each client and LoRA adapter; a heap knows when ranks expire, so that ageing
    touches only what is due. peek and pop agree within a step: ranks change in `begin_step` only, and by requests that
    join. However many there are who could not join now, they hide nobody: they stand apart, and those whose adapter has
    no place in lines of their own.
    """

    def __init__(
        self,
        rank: Callable[[Request], Rank],
        ties: Callable[[Request], tuple[float, int]],
        ageing: Ageing | None = None,
        shares: Shares | None = None,
        turns: AgedTurns | None = None,
    ) -> None:
        """Create an empty table.

        Args:
            rank: Asks the policy; called when a request joins and when its rank expires.
            ties: Arrival time and a unique number of a request; they end every comparison.
            ageing: How waiting counts against costs; None: no rank has one.
            shares: Whose turn it is; None: everybody's.
            turns: What those are owed who have waited longest; None: nothing.
        """
        self._rank, self._ties, self._ageing, self.shares, self._turns = rank, ties, ageing, shares, turns
        self._due: dict[Request, None] = {}
        """Those who go before all others in this step, as they have waited longest."""
        self._entries: OrderedDict[Request, Entry] = OrderedDict()
        """In the order in which they were ranked last."""
        self._lines: dict[str, dict[int, WaitingLine]] = {}
        self._apart: dict[Apart, OrderedDict[Request, None]] = {state: OrderedDict() for state in Apart}
        self._numbers: set[int] = set()
        """Of ranks that hold."""
        self._stays: set[int] = set()
        """Numbers of the first ranks of those who wait."""
        self.passed_over = self._apart[Apart.UNDECIDED]
        """Those whom vLLM passed over when they were offered last, or would have."""
        self._undecided = WaitingLine(ageing, self._numbers.__contains__)
        self._expiry: LazyHeap[tuple[float, int, Entry]] = LazyHeap(self._numbers.__contains__)
        self._arrivals: LazyHeap[tuple[tuple[float, int], int, Request]] = LazyHeap(self._stays.__contains__)
        self._steps = 0
        self._ranks = 0
        """Counts ranks."""
        self._epoch = 0
        """Of prices."""
        self._looked_at = (0, 0, 0)
        """The state in which those who compete were last ranked by these prices."""
        self._taken: set[Request] = set()
        """Whom vLLM took in this step: whoever comes back was passed over."""
        self._offered: deque[Request] | None = None
        self._known_first: tuple[object, Request | None] = (None, None)
        """The request of the best rank, and for which state of the table it is."""
        self._now = 0.0
        self.adapters = AdapterPlaces()
        """LoRA adapters that have a place in this step."""
        self.by_arrival = False
        """Serve in order of arrival, whatever the ranks: what a step falls back to when a policy fails."""
        self.changes = 0
        """Counts who joined or left."""
        self.levels: dict[int, int] = {}
        """Number of requests per level."""
        self.longest_waits = LongestWaits()

    # --- vLLM's interface -------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Add a request at the place its rank gives it; one that vLLM took in this step and gives back stands apart."""
        if request in self._entries:
            return
        self.changes += 1
        if awaits_grammar(request):
            self._apart[Apart.GRAMMAR][request] = None
        elif grammar_failed(request):
            self._apart[Apart.FAILED][request] = None
        elif request in self._taken:
            self._apart[Apart.UNDECIDED][request] = None
        self._push(request)
        self._arrivals.push((self._ties(request), self._entries[request].joined, request))

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
        self._taken.add(request)
        self._remove(request, admitted=True)
        return request

    def remove_request(self, request: Request) -> None:
        """Remove a request.

        Raises:
            ValueError: the request is not in the queue.
        """
        if request not in self._entries:
            raise ValueError(f"request {request.request_id} is not in the queue")
        self._remove(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove the requests that are here; vLLM also names some that are not."""
        for request in requests:
            if request in self._entries:
                self._remove(request)

    def __bool__(self) -> bool:
        return self._first() is not None

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return iter(sorted(self._entries, key=self.key))

    def __contains__(self, request: object) -> bool:
        return request in self._entries

    # --- what steering adds -----------------------------------------------------------------------------------------

    def begin_step(self, now: float, adapters: AdapterPlaces | None = None) -> None:
        """Rank again what is due at clock time ``now`` (s), and let those in whose grammar has come.

        Args:
            now: Clock time.
            adapters: LoRA adapters in use, and how many there may be; None: any number.
        """
        self.end_step()
        self.by_arrival = False
        self._now = now
        self.adapters = adapters or AdapterPlaces()
        self._unblock()
        self._arrivals.first()  # drops what is gone from the front
        self._steps += 1
        in_turn = () if self._steps % _ROUND_EVERY else self._ranked_longest_ago()
        for request in dict.fromkeys((*self._expired(), *in_turn)):
            self._push(request)  # after all were found: one that expires at once must not come twice
        if self._turns is not None:
            self._give_turns(self._turns.due())

    def begin_look(self) -> None:
        """Rank again who competes by a rank of older prices; called before anybody looks at the queue."""
        state = (self.changes, self._ranks, self._epoch)
        if state == self._looked_at or not any(self._ranked_longest_ago()):
            return
        for request in [*self.best(_BEST_KEPT_CURRENT)]:
            if self._entries[request].epoch != self._epoch:
                self._push(request)
        self._looked_at = state

    def end_step(self) -> None:
        """Note that vLLM has scheduled the step: whoever comes back from now on was not passed over, but preempted."""
        self.offer(None)
        self._taken.clear()

    def offer(self, requests: Sequence[Request] | None, ask: Sequence[Request] = ()) -> None:
        """Show vLLM exactly these, in their order, until the next step or offer; None: everybody, by rank.

        Whoever is taken out and put back is not offered again. Those whose grammar failed are offered first: vLLM does
        not admit them, but tells their clients.

        Args:
            requests: Who may join.
            ask: Of whom to ask again what KV there is, each before those who rank behind it.
        """
        if requests is None:
            self._offered = None
            return
        named = [request for request in requests if request in self._entries]
        for request in ask:
            if request in self._entries:
                key = self.key(request)
                named.insert(next((n for n, other in enumerate(named) if self.key(other) > key), len(named)), request)
        self._offered = deque(dict.fromkeys((*self._apart[Apart.FAILED], *named)))  # whoever is named twice comes once

    def part(self, request: Request) -> None:
        """Have a waiting request stand apart that vLLM would pass over if it were offered."""
        self.passed_over[request] = None
        self._push(request)

    def rerank(self, request: Request) -> None:
        """Ask for the rank of a waiting request again, because something about it changed."""
        if request in self._entries:
            self._push(request)

    def prices_changed(self) -> None:
        """Hold all ranks for outdated: those of who competes are asked for again, of the others one every few steps."""
        self._epoch += 1

    def finished(self, request: Request) -> None:
        """Note that a request ended, wherever it was."""
        if self.shares is not None:
            self.shares.finished(request, waits=request in self._entries)

    def key(self, request: Request) -> tuple[float, ...]:
        """Return the key of a request in the queue, ties included, as it is in this step."""
        return self._entries[request].key(self._ageing, self._now)

    def rank(self, request: Request) -> Rank:
        """Return the rank of a request in the queue."""
        return self._entries[request].rank

    def best(self, count: int) -> Iterator[Request]:
        """Yield up to ``count`` requests that wait for nothing but room, best rank first; the queue stays as it is.

        Those whose adapter has no place are not among them, also if it was given away since the look began.
        """
        return (entry.request for _, entry in islice(self.ranked(), count))

    def ranked(self) -> Iterator[Keyed]:
        """Yield all of those, with the keys by which they compete in this step."""
        return self._line_up("") if self.shares is None else self.shares.in_turn(self._line_up)

    def ahead_of(self, request: Request, most: int) -> int | None:
        """Return how many rank before a request, ``most`` for that or more; None if it is not in the queue."""
        if request not in self._entries:
            return None
        key = self.key(request)
        return sum(1 for _ in takewhile(lambda found: found[0] < key, islice(self.ranked(), most)))

    def undecided(self, count: int) -> list[Request]:
        """Return up to ``count`` of those whom vLLM passed over when they were offered last, or would have, in turn."""
        return _next_in_turn(self.passed_over, count)

    def apart(self) -> dict[str, int]:
        """Return how many could not join now, however much room there is, by reason."""
        lines = (line for of_client in self._lines.values() for line in of_client.items())
        placeless = sum(line.members for adapter, line in lines if not self.adapters.fits(adapter))
        found = {state.value: len(requests) for state, requests in self._apart.items()} | {ADAPTERS: placeless}
        return {reason: count for reason, count in found.items() if count}

    def oldest(self) -> Request | None:
        """Return the request that arrived first."""
        first = self._arrivals.first()
        return None if first is None else first[2]

    # --- parts ------------------------------------------------------------------------------------------------------

    def _line_up(self, client: str) -> Iterator[Keyed]:
        """Yield those of a client whose adapters have a place, by rank."""
        lines, fits = self._lines.get(client, {}), self.adapters.fits
        heads = []
        for adapter, line in list(lines.items()):
            if not adapter or fits(adapter):
                look = line.ascending(self._now)
                if (first := next(look, None)) is None:
                    del lines[adapter]
                else:
                    heads.append((*first, adapter, look))
        heapq.heapify(heads)  # no two keys are the same
        while heads:
            key, entry, adapter, look = heads[0]
            behind = None
            if not adapter or fits(adapter):
                yield key, entry
                behind = next(look, None)
            if behind is None:
                heapq.heappop(heads)
            else:
                heapq.heapreplace(heads, (*behind, adapter, look))

    def _give_turns(self, due: Mapping[str, int]) -> None:
        """Let the oldest ones go before all others that have a turn now, and those that had one as they were ranked."""
        before = self._due
        if not before and not due:
            return
        self._due = dict.fromkeys(r for client, count in due.items() for r in islice(self._turns_of(client), count))
        for request in (*before, *self._due):
            if (request in before) != (request in self._due):
                self._push(request)

    def _turns_of(self, client: str) -> Iterator[Request]:
        """Yield those of a client's aged requests for whom a turn is worth something, oldest first.

        Not those who would have to stand behind others all the same, as their priority is low.
        """
        first = next(self._line_up(client), None)
        if self._turns is None or first is None:
            return
        for entry in islice(self._aged(client, self._turns.limit, placed=True), _OLDEST_LOOKED_AT):
            if (*self._turns.rank(entry.request).key, *entry.ties) <= first[0]:
                yield entry.request

    def _aged(self, client: str, limit: AgeLimit, *, placed: bool) -> Iterator[Entry]:
        """Yield those of a client who have waited beyond the limit, oldest first; if ``placed``, whose adapters fit."""
        fits = self.adapters.fits
        lines = [line for adapter, line in self._lines.get(client, {}).items() if not placed or fits(adapter)]
        oldest = heapq.merge(*(line.by_arrival() for line in lines), key=attrgetter("ties"))
        return takewhile(lambda entry: self._now - entry.ties[0] > limit.limit_s, oldest)

    def _note_admission(self, request: Request, client: str) -> None:
        """Count who joined towards the turns of those who have waited longest."""
        if self._turns is not None:
            # Whose adapter has no place keeps its turn for when it has: the one who joined may have taken the last.
            aged = next(self._aged(client, self._turns.limit, placed=False), None) is not None
            self._turns.admitted(client, aged=aged, by_turn=request in self._due)

    def _push(self, request: Request) -> None:
        old, rank = self._entries.get(request), self._rank(request)
        if self._turns is not None and request in self._due:
            rank = self._turns.rank(request)
        self._ranks += 1
        joined = self._ranks if old is None else old.joined
        entry = Entry(request, rank, self._ties(request), self._ranks, joined, self._epoch)
        self._numbers.add(entry.number)
        self._stays.add(entry.joined)
        if old is not None:
            self._left(old)
        elif self.shares is not None:
            self.shares.joined(request)
        self._count(entry, 1)
        self._entries[request] = entry
        self._entries.move_to_end(request)
        self._enter(entry)
        if rank.until_s < math.inf:
            self._expiry.push((rank.until_s, self._ranks, entry))

    def _enter(self, entry: Entry) -> None:
        request = entry.request
        if request in self._apart[Apart.GRAMMAR]:
            return
        if request in self._apart[Apart.UNDECIDED]:
            entry.line = self._undecided
            entry.line.enter(entry)
            return
        lines = self._lines.setdefault("" if self.shares is None else self.shares.client(request), {})
        adapter = adapter_of(request)
        entry.line = lines.get(adapter)
        if entry.line is None:
            entry.line = lines[adapter] = WaitingLine(self._ageing, self._numbers.__contains__)
        entry.line.enter(entry)

    def _expired(self) -> list[Request]:
        """Return some of those whose ranks hold no longer, and of the oldest all."""
        if not self._expiry:
            return []
        due = [entry.request for _, _, entry in self._expiry.pop_until(self._now, _MAX_DUE)]
        oldest = [request for _, _, request in islice(self._arrivals.ascending(), _OLDEST_KEPT_FRESH)]
        return due + [request for request in oldest if self._entries[request].rank.until_s <= self._now]

    def _ranked_longest_ago(self) -> Iterator[Request]:
        """Yield the request that was ranked longest ago, if prices have changed since."""
        return (request for request in islice(self._entries, 1) if self._entries[request].epoch != self._epoch)

    def _unblock(self) -> None:
        """Look at some of those whose grammar is being compiled, in turn; whose grammar has come waits like others."""
        blocked = self._apart[Apart.GRAMMAR]
        for request in _next_in_turn(blocked, _BLOCKED_ASKED):
            if awaits_grammar(request):
                continue
            del blocked[request]
            self.changes += 1
            self._enter(self._entries[request])
            if grammar_failed(request):
                self._apart[Apart.FAILED][request] = None

    def _remove(self, request: Request, *, admitted: bool = False) -> None:
        entry = self._entries.pop(request)
        self._stays.discard(entry.joined)
        if admitted and not request.num_preemptions:
            self.longest_waits.admitted(entry.rank.level, self._now - entry.ties[0], self._now)
        client = "" if self.shares is None else self.shares.client(request)
        if admitted:
            self._note_admission(request, client)
        self._due.pop(request, None)
        if self.shares is not None:
            self.shares.left(request, admitted=admitted)
            if not self.shares.waiting(client):
                self._lines.pop(client, None)
                if self._turns is not None:
                    self._turns.forget(client)
        if self._offered and request in self._offered:
            self._offered.remove(request)
        for requests in self._apart.values():
            requests.pop(request, None)
        self.changes += 1
        self._left(entry)
        if not self._entries:  # nothing to keep alive finished requests for
            self._known_first = (None, None)
            for structure in (self._lines, self._expiry, self._arrivals, self._due):
                structure.clear()

    def _left(self, entry: Entry) -> None:
        """Note that an entry is superseded, or its request gone."""
        self._count(entry, -1)
        self._numbers.discard(entry.number)
        if entry.line is not None:
            entry.line.left()

    def _first(self) -> Request | None:
        if self.by_arrival:
            return self.oldest()
        if self._offered is not None:
            return self._offered[0] if self._offered else None
        asked = (self.changes, self._ranks, self._now)
        if self._known_first[0] != asked:  # several ask in a step, and each would look at every line
            self._known_first = (asked, self._first_of_all())
        return self._known_first[1]

    def _first_of_all(self) -> Request | None:
        """Return the best one that vLLM may be shown where it decides itself: it passes over whom it can't take."""
        adapters, self.adapters = self.adapters, AdapterPlaces()
        try:
            first = next(self.ranked(), None)
        finally:
            self.adapters = adapters
        undecided = next(self._undecided.ascending(self._now), None)
        if first is None or (undecided is not None and undecided[0] <= first[0]):
            first = undecided
        return None if first is None else first[1].request

    def _count(self, entry: Entry, change: int) -> None:
        level = entry.rank.level
        left = self.levels.get(level, 0) + change
        if left:
            self.levels[level] = left
        else:
            self.levels.pop(level, None)


def _next_in_turn(requests: OrderedDict[Request, None], count: int) -> list[Request]:
    found = list(islice(requests, count))
    for request in found:
        requests.move_to_end(request)
    return found
