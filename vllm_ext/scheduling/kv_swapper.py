"""Asks the residency policy what becomes of KV, and tells the KV tier.

Everything here is estimates: how long a preempted request will wait, how long its blocks stay, what copies take. What
came of the estimates is kept for the metrics.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ext.contract import KvDisposition, PreemptionCost, RequestView, Room, Victim
from vllm_ext.scheduling.step import LOOK_AHEAD, pool_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm.v1.request import Request

    from vllm_ext.contract import Rank, Residency
    from vllm_ext.kv.connector.cached_prefixes import CachedPrefixes
    from vllm_ext.kv.connector.scheduler import TierScheduler
    from vllm_ext.scheduling.engine_state import EngineState
    from vllm_ext.scheduling.observer import Observer
    from vllm_ext.scheduling.running_order import RunningOrder
    from vllm_ext.scheduling.step import EngineStep
    from vllm_ext.scheduling.tracked_requests import TrackedRequest, TrackedRequests
    from vllm_ext.scheduling.waiting_table import WaitingTable


class KvSwapper:
    """One scheduler's dealings with its KV tier.

    Attributes:
        queue: Who waits, by rank; None where vLLM orders its queue itself.
        order: Who runs, by rank; likewise.
        rank: Asks for the rank of a request; likewise.
    """

    queue: WaitingTable | None = None
    order: RunningOrder | None = None
    rank: Callable[[RequestView], Rank] | None = None

    def __init__(
        self,
        engine: EngineState,
        tier: TierScheduler,
        policy: Residency,
        *,
        tracked: TrackedRequests,
        prefixes: CachedPrefixes,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        """Take vLLM's scheduler, the scheduler's side of the connector, and the policy."""
        self._engine, self._tier, self._policy = engine, tier, policy
        self._tracked, self._prefixes, self._observer, self._clock = tracked, prefixes, observer, clock

    def look_ahead(self, step: EngineStep, room: Room) -> None:
        """Let the tier copy the KV of those who will have to leave; one that stores early has done so."""
        stores = self._tier.stores
        if stores is not None and step.number % self._policy.look_ahead_steps == 0:
            stores.leaving = frozenset(self._policy.leaving_soon(step, room))

    def preempting(self, request: Request) -> None:
        """Decide about the KV of a running request that is preempted now.

        Raises:
            TypeError: the policy returned something else than a disposition.
        """
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        view = self._tracked.view(tracked)
        cost = self._cost(tracked, view)
        disposition = self._policy.on_preempt(view, cost)
        if not isinstance(disposition, KvDisposition):
            raise TypeError(f"on_preempt returned {disposition!r}: must be a KvDisposition")
        self._tier.decide(request.request_id, disposition)
        self._observer.parted(disposition.value)
        tracked.expected_wait_s = cost.wait_s
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        tracked.kept_tokens = self._tier.prices.kept_tokens(computed) if self._tier.keeps(disposition) else 0

    def priced(self, victim: RequestView, blocks: int) -> Victim:
        """Return what the preemption of a running request would cost it, and everybody else.

        A victim waits until its KV is back; the others wait while it is computed again, or while it is copied out.
        """
        computed, recompute_s = victim.num_computed_tokens, victim.recompute_s
        if computed:
            prices = self._tier.prices
            out_s = prices.store_s(self._tier.missing_tokens(victim.req_id, computed))
            rest_s = recompute_s * (1 - prices.kept_tokens(computed) / computed)
            swap_s = out_s + prices.load_s(computed) + rest_s
            if swap_s < recompute_s:
                return Victim(victim, (), blocks, swap_s, out_s + rest_s)
        return Victim(victim, (), blocks, recompute_s, recompute_s)

    def load_s(self, num_tokens: int) -> float:
        """Return the time to load the KV of so many tokens."""
        return self._tier.prices.load_s(num_tokens)

    def resumed(self, tracked: TrackedRequest, waited_s: float) -> None:
        """Compare how long a preempted request waited with what was expected."""
        if tracked.expected_wait_s is not None:
            self._observer.resumed(tracked.expected_wait_s, waited_s)
            tracked.expected_wait_s = None
        tracked.kept_tokens = 0

    def _cost(self, tracked: TrackedRequest, view: RequestView) -> PreemptionCost:
        """Return what it costs if a running request is preempted now, in seconds.

        Copies of a direction cost nothing until one was measured: by a guess that they don't pay none ever would be.
        """
        request, prices = tracked.request, self._tier.prices
        computed = min(request.num_computed_tokens, request.num_tokens)
        missing = self._tier.missing_tokens(request.request_id, computed)
        return PreemptionCost(
            wait_s=self._wait_s(tracked, view),
            reuse_s=self._reuse_s(),
            out_s=prices.store_s(missing) if prices.out.known else 0.0,
            back_s=prices.load_s(computed) if prices.back.known else 0.0,
        )

    def _wait_s(self, tracked: TrackedRequest, view: RequestView) -> float:
        """Return the estimated wait time (ALISE, eq. 7) of a running request that is preempted now.

        The paper sums the predicted times of all that go before, as if they ran one after the other. Here they run
        side by side, in as many places as there are: the sum is divided by those. What is beyond the first requests of
        the queue counts with the mean of these. Aging ends the wait of whoever is promoted before.
        """
        now = self._clock()
        running = self._engine.running
        first = self.order.best() if self.order is not None else next(iter(running), None)
        until_free_s = 0.0
        if first is not None and first is not tracked.request:
            until_free_s = self._view_of(first).predicted_remaining_s
        if self.queue is None or self.rank is None:
            return until_free_s  # vLLM puts it back in front of all others
        place = self.rank(view._replace(waiting_since=now, num_preemptions=view.num_preemptions + 1))
        ahead = [self._view_of(request) for request in self._before((*place.key, *tracked.ties))]
        sum_s = sum(each.predicted_remaining_s for each in ahead)
        if len(ahead) == LOOK_AHEAD:
            sum_s *= len(self.queue) / len(ahead)
        return min(until_free_s + sum_s / max(1, len(running)), max(0.0, place.older_only_s - now))

    def _view_of(self, request: Request) -> RequestView:
        return self._tracked.view(self._tracked[request.request_id])

    def _before(self, key: tuple[float, ...]) -> Iterator[Request]:
        assert self.queue is not None
        for request in self.queue.best(LOOK_AHEAD):
            if self.queue.key(request) > key:
                return
            yield request

    def _reuse_s(self) -> float:
        """Return how long the blocks of a request that leaves now stay: those given up before are taken first."""
        engine, pool = self._engine, pool_of(self._engine)
        head = None if self.queue is None else next(self.queue.best(1), None)
        wanted = 0
        if head is not None:
            wanted = pool.blocks_for(head.num_tokens) - self._prefixes.of(head).held_blocks
        left = pool.unused - wanted
        if left <= 0:
            return 0.0
        per_step = max(len(engine.running), 1) / pool.block_size
        return left / per_step * self._tracked.step_stats.latest.step_s
