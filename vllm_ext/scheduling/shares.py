"""Whose turn it is: how much each client was served, and in which order clients' requests join.

A counter is never written while requests run: it is what ended requests got, and what those that were admitted have by
now, read from vLLM's own numbers. So nothing is done per token, and a step in which nobody waits costs nothing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

from vllm_ext.scheduling.lazy_heap import LazyHeap

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.contract import Origin, Sharing
    from vllm_ext.scheduling.waiting_line import Keyed

MOST_REMEMBERED = 16_384
"""Clients without a request whose counters are remembered."""
_Turn = tuple[float, tuple[str, int]]
"""Counter, at least, and client, with a number of its own."""


class Shares:
    """Virtual token counters of clients.

    Source: VTC (Sheng et al., OSDI '24), Algorithm 2: a client that comes to an empty place in the queue is lifted to
    the least counter of those who wait, or to that of the last who left, so that pauses save nothing up.
    """

    def __init__(
        self,
        sharing: Sharing,
        client: Callable[[Request], str],
        failed: Callable[[], None],
        cached_tokens: Callable[[Request], int],
    ) -> None:
        """Start with nobody.

        Args:
            sharing: Tells clients apart, and has their weights and prices.
            client: Whose a request is, as `name` said.
            failed: Called in an ``except`` block where ``sharing`` raised.
            cached_tokens: Of a waiting request: tokens of its prompt that need no computing.
        """
        self._sharing, self._client, self._failed, self._cached_tokens = sharing, client, failed, cached_tokens
        self._of: dict[Request, str] = {}
        """Clients of requests that wait or were served: vLLM may free a request before it takes it from the queue."""
        self._prompt_price, self._output_price = sharing.prices
        self._weights: dict[str, float] = {}
        self._settled: dict[str, float] = {}
        self._served: dict[str, dict[Request, float]] = {}
        """By client: requests that were admitted, and the price of their prompts."""
        self._waiting: dict[str, int] = {}
        self._bounds: dict[str, _Turn] = {}
        self._current: set[tuple[str, int]] = set()
        self._numbers = count()
        self._turns: LazyHeap[_Turn] = LazyHeap(self._current.__contains__)
        self._last = 0.0

    def name(self, origin: Origin) -> str:
        """Return the client of a new request; one that can't be told belongs to the nameless."""
        try:
            client = str(self._sharing.client(origin))
            if client not in self._weights:
                weight = float(self._sharing.weight(client))
                if not 0 < weight < math.inf:
                    raise ValueError(f"weight={weight!r} of {client!r}: must be greater than 0, and finite")
                self._weights[client] = weight
            return client
        except Exception:  # noqa: BLE001 - whatever a policy raises
            self._failed()
            return ""

    # --- told by the queue ------------------------------------------------------------------------------------------

    def joined(self, request: Request) -> None:
        """Note that a request waits: a new one, a preempted one, or one that vLLM took and puts back."""
        client = self._of[request] = self._of.get(request) or self._client(request)
        taken_back = request in self._served.get(client, ()) and not request.num_preemptions
        if taken_back:
            self._drop(client, request)
        if client not in self._waiting and not taken_back:
            least = self._least()
            floor = self._last if least is None else least
            self._settled[client] = self._settled.get(client, 0.0) + max(0.0, floor - self.counter(client))
        self._waiting[client] = self._waiting.get(client, 0) + 1
        self._bound(client)

    def left(self, request: Request, *, admitted: bool) -> None:
        """Note that a request waits no longer."""
        client = self._of[request]
        if admitted:
            served = self._served.setdefault(client, {})
            if request not in served:  # preempted, it is computed again at nobody's expense
                served[request] = self._entry_price(client, request)
        elif request not in self._served.get(client, ()):
            del self._of[request]
        self._waiting[client] -= 1
        if not self._waiting[client]:
            del self._waiting[client]
            self._current.discard(self._bounds.pop(client)[1])
            self._last = self.counter(client)

    def waiting(self, client: str) -> int:
        """Return how many requests of a client wait."""
        return self._waiting.get(client, 0)

    def finished(self, request: Request, *, waits: bool) -> None:
        """Note that a request ended; one that was never admitted cost nothing.

        Args:
            request: Which.
            waits: Whether it is in the queue still, and will be said to leave it.
        """
        client = self.client(request)
        if not waits:
            self._of.pop(request, None)
        if request in self._served.get(client, ()):
            price = self._served[client][request]
            self._settled[client] = self._settled.get(client, 0.0) + price + self._output(client, request)
            self._drop(client, request)
        if len(self._settled) > MOST_REMEMBERED:
            self._forget()

    def client(self, request: Request) -> str:
        """Return whose a request is, as long as it waits or is served."""
        return self._of.get(request, "")

    # --- asked ------------------------------------------------------------------------------------------------------

    def counter(self, client: str) -> float:
        """Return what a client was served, over its weight. Cost: a look at each of its running requests."""
        served = self._served.get(client)
        if not served:
            return self._settled.get(client, 0.0)
        generated: int = sum([request.num_output_tokens for request in served])
        output = self._output_price * generated / self._weights.get(client, 1.0)
        return self._settled.get(client, 0.0) + sum(served.values()) + output

    def in_turn(self, requests: Callable[[str], Iterator[Keyed]]) -> Iterator[Keyed]:
        """Yield waiting requests in the order in which they join if all that went before did.

        Args:
            requests: Yields a client's waiting requests, best first.
        """
        self._least()
        others = self._turns.ascending()
        following = next(others, None)
        ready: list[tuple[float, str, Iterator[Keyed]]] = []
        while ready or following is not None:
            while following is not None and (not ready or following[0] <= ready[0][0]):
                client, _ = following[1]
                heapq.heappush(ready, (self.counter(client), client, requests(client)))
                following = next(others, None)
            counter, client, theirs = ready[0]
            keyed = next(theirs, None)
            if keyed is None:
                heapq.heappop(ready)
                continue
            yield keyed
            request = keyed[1].request
            again = request in self._served.get(client, ())  # it was preempted: what it was served is counted
            price = 0.0 if again else self._entry_price(client, request)
            heapq.heapreplace(ready, (counter + price, client, theirs))

    def state(self) -> dict[str, float]:
        """Return how many clients wait, and how far their counters lie apart, in weighted tokens."""
        counters = [self.counter(client) for client in self._waiting]
        return {"clients": len(counters), "spread": max(counters) - min(counters) if counters else 0.0}

    # --- parts ------------------------------------------------------------------------------------------------------

    def _output(self, client: str, request: Request) -> float:
        return self._output_price * float(request.num_output_tokens) / self._weights.get(client, 1.0)

    def _entry_price(self, client: str, request: Request) -> float:
        computed: int = request.num_prompt_tokens - self._cached_tokens(request)
        return self._prompt_price * computed / self._weights.get(client, 1.0)

    def _least(self) -> float | None:
        """Return the least counter of those who wait, None if nobody does; the heap's first bound is exact then."""
        while (first := self._turns.first()) is not None:
            if self._bound(first[1][0]) <= first[0]:
                return first[0]
        return None

    def _bound(self, client: str) -> float:
        """Renew what is known of a waiting client's counter, which only grows, where it grew."""
        counter = self.counter(client)
        known = self._bounds.get(client)
        if known is None or counter > known[0]:
            if known is not None:
                self._current.discard(known[1])
            turn = self._bounds[client] = (counter, (client, next(self._numbers)))
            self._current.add(turn[1])
            self._turns.push(turn)
        return counter

    def _drop(self, client: str, request: Request) -> None:
        served = self._served.get(client)
        if served is not None:
            served.pop(request, None)
            if not served:
                del self._served[client]

    def _forget(self) -> None:
        """Forget clients without requests: first those that would be lifted anyway, then those served least."""
        absent = [client for client in self._settled if client not in self._waiting and client not in self._served]
        absent.sort(key=self._settled.__getitem__)
        for client in absent[: len(absent) - MOST_REMEMBERED // 2]:
            del self._settled[client]
            self._weights.pop(client, None)
