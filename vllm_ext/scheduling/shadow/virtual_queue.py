"""What another order would have made of the requests that a server serves: a queue that is replayed beside it.

Mean waits do not change where requests merely swap the moments at which they start: an order gains as short requests
give their seats and KV memory back sooner. So the replay has a server of its own. There a request takes as long as it
ran on the real one, and requests start until as much is in use as was there while somebody waited: seats where these
were all taken, else KV memory. Who starts early here may not have ended there, so that the replay lags behind the
server: it goes on only as far as nothing that is still unknown can matter.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

from vllm.v1.request import RequestStatus

from vllm_ext.scheduling.tracked_requests import TrackedRequest


@dataclass(slots=True, eq=False, kw_only=True)
class VirtualRequest:
    """A request as if it had not started, whatever the server made of it: what views and queues read of one."""

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    priority: int
    arrived: float
    """When it came, in seconds of the scheduler's clock, as the next three."""
    tracked: TrackedRequest | None = None
    """What is known of it; its own, as the server's changes while the request runs."""
    cached_tokens: int = 0
    kv_tokens: int = 0
    """What it is expected to hold, on average, of KV memory."""
    started: float | None = None
    """When the server first scheduled it; None: not yet."""
    left: float | None = None
    """When it left the server."""
    begins: float | None = None
    """When it starts in the replay; None: not yet."""
    counts: bool = True
    """Whether its waits are compared; else it only takes a seat."""

    status: RequestStatus = RequestStatus.WAITING
    lora_request: None = None
    num_output_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Length of the sequence: nothing has been generated."""
        return self.num_prompt_tokens

    @property
    def service_s(self) -> float:
        """How long it was served, from the first step to the end, once it has left."""
        return 0.0 if self.started is None or self.left is None else self.left - self.started


class Order(Protocol):
    """The requests that wait in the replay."""

    def __len__(self) -> int: ...

    def add(self, request: VirtualRequest, now: float) -> None:
        """Have a request wait from clock time ``now`` (s) on."""

    def remove(self, request: VirtualRequest) -> None:
        """Take out a request, if it waits."""

    def first(self, now: float) -> VirtualRequest:
        """Return the best one at clock time ``now`` (s)."""

    def pop(self) -> VirtualRequest:
        """Take out the one that `first` returned."""


@dataclass(slots=True)
class _Use:
    """What running requests take."""

    requests: int = 0
    kv_tokens: int = 0

    def add(self, request: VirtualRequest, number: int) -> None:
        """Add a request, or take it off again."""
        self.requests += number
        self.kv_tokens += number * request.kv_tokens


_Timed = list[tuple[float, int, VirtualRequest]]


class VirtualQueue:
    """Replays arrivals, departures and seats of a server in another order. Each call is O(log n), but `advance`.

    Attributes:
        now: Its clock, at most the server's, in seconds.
    """

    def __init__(self, order: Order, judged: Callable[[VirtualRequest], None], seats: int) -> None:
        """Start with an empty server.

        Args:
            order: Who goes first.
            judged: Told of each request once both of its starts and its end are known.
            seats: Most requests that run at a time.
        """
        self._order, self._judged = order, judged
        self.now = -math.inf
        self._told = -math.inf
        """The server's clock."""
        self._log: deque[tuple[float, Callable[[Any], None], Any]] = deque()
        self._ends: _Timed = []
        """Of those who started here and have left the server."""
        self._ahead: _Timed = []
        """Starts here of those whom the server had not started: how long they take is not known at all."""
        self._leads: _Timed = []
        """Of those who run on the server: how much earlier they started here, negated."""
        self._count = count()
        self._real_waiting = 0
        self._real, self._virtual = _Use(), _Use()
        self._changed = False
        """Whether anything happened on the server since its last step."""
        self._most_seats = seats
        self._seats, self._kv_tokens = float(seats), math.inf
        """What may be in use here."""
        self._may_begin = False

    def __len__(self) -> int:
        """Events that are still to be replayed."""
        return len(self._log)

    # --- what the server does ---------------------------------------------------------------------------------------

    def arrived(self, request: VirtualRequest) -> None:
        """Note a new request."""
        self._real_waiting += 1
        self._note(request.arrived, self._arrives, request)

    def started(self, request: VirtualRequest, now: float) -> None:
        """Note that the server schedules a request for the first time."""
        request.started = self._told = now
        self._changed = True
        self._real_waiting -= 1
        self._real.add(request, 1)
        self._lead(request)

    def left(self, request: VirtualRequest, now: float, *, aborted: bool) -> None:
        """Note that a request ended; one that was aborted waits no longer here either."""
        request.left = self._told = now
        self._changed = True
        if request.started is None:
            self._real_waiting -= 1
        else:
            self._real.add(request, -1)
        if aborted:
            self._note(now, self._order.remove, request)
        self._settle(request)

    def stepped(self, now: float, *, seats_taken: bool) -> None:
        """Note that the server scheduled a step, after whom it `started`, and whether it has no seat left."""
        self._told = now
        if self._changed:
            self._note(now, self._steps, (self._real.requests, self._real.kv_tokens, self._real_waiting, seats_taken))
            self._changed = False

    def _note(self, now: float, replay: Callable[[Any], None], what: Any) -> None:
        self._told, self._changed = now, True
        self._log.append((now, replay, what))

    # --- the replay -------------------------------------------------------------------------------------------------

    def advance(self, most: float = math.inf) -> None:
        """Replay up to so many events and starts, as far as all that matters is known."""
        while most > 0:
            if self._may_begin and self._has_room():
                self._begin(self._order.pop())
            elif not self._next():
                return
            most -= 1

    def _next(self) -> bool:
        """Replay the next event; return False where there is none, or it can't be told what is next."""
        end = self._ends[0][0] if self._ends else math.inf
        logged = self._log[0][0] if self._log else math.inf
        if min(end, logged) > self._horizon() or end == logged == math.inf:
            return False
        if end <= logged:
            self.now, self._may_begin = end, True
            self._virtual.add(heapq.heappop(self._ends)[2], -1)
        else:
            self.now, replay, what = self._log.popleft()
            replay(what)
        return True

    def _horizon(self) -> float:
        """Return until when nobody can end here of whom that is not known: each runs at least as long as it has."""
        while self._ahead and (self._ahead[0][2].started is not None or self._ahead[0][2].left is not None):
            heapq.heappop(self._ahead)
        while self._leads and self._leads[0][2].left is not None:
            heapq.heappop(self._leads)
        until = self._told
        if self._ahead:
            until = min(until, self._ahead[0][0])
        if self._leads:
            until = min(until, self._told + self._leads[0][0])
        return until

    def _arrives(self, request: VirtualRequest) -> None:
        self._may_begin = False  # as on the server, until the next step
        self._order.add(request, self.now)

    def _steps(self, state: tuple[int, int, int, bool]) -> None:
        requests, kv_tokens, waiting, seats_taken = state
        self._may_begin = True
        if not waiting:  # there may be more room than was needed
            self._seats, self._kv_tokens = max(self._seats, requests), max(self._kv_tokens, kv_tokens)
        elif seats_taken:
            self._seats, self._kv_tokens = requests, math.inf
        else:
            self._seats, self._kv_tokens = self._most_seats, kv_tokens

    def _has_room(self) -> bool:
        """Whether somebody waits, and the best one may start."""
        used = self._virtual
        self._may_begin = (
            len(self._order) > 0
            and used.requests < self._seats
            and used.kv_tokens + self._order.first(self.now).kv_tokens <= self._kv_tokens
        )
        return self._may_begin

    def _begin(self, request: VirtualRequest) -> None:
        request.begins = self.now
        self._virtual.add(request, 1)
        if request.started is None and request.left is None:
            heapq.heappush(self._ahead, (self.now, next(self._count), request))
        self._lead(request)
        self._settle(request)

    def _lead(self, request: VirtualRequest) -> None:
        if request.begins is not None and request.started is not None and request.left is None:
            heapq.heappush(self._leads, (request.begins - request.started, next(self._count), request))

    def _settle(self, request: VirtualRequest) -> None:
        """Note when a request ends here, and have it judged, once all of it is known."""
        if request.begins is not None and request.left is not None:
            heapq.heappush(self._ends, (request.begins + request.service_s, next(self._count), request))
            if request.counts:
                self._judged(request)
