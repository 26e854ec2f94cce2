"""Asks the residency policy what becomes of KV, and tells the KV tier.

Everything here is estimates: how long a preempted request will wait, how long its blocks stay, what copies take. What
came of the estimates is kept for the metrics.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from vllm_ext.policies.residency.fate import Fate, Parting
from vllm_ext.scheduling.step import LOOK_AHEAD

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.kv.scheduler_side import TierScheduler
    from vllm_ext.scheduling.ledger import Job
    from vllm_ext.scheduling.scheduler import SteeredScheduler
    from vllm_ext.scheduling.step import SchedulerStep
    from vllm_ext.scheduling.views import RequestView


class Residence:
    """One scheduler's dealings with its KV tier.

    Args:
        scheduler: Whose requests are preempted.
        tier: The scheduler's side of the connector.
    """

    def __init__(self, scheduler: SteeredScheduler, tier: TierScheduler) -> None:
        self._scheduler = scheduler
        self._tier = tier
        self._policy = scheduler.policies.residency
        self._every_steps = getattr(self._policy, "every_steps", 1)
        self._promoted_after_s = getattr(scheduler.policies.ordering, "max_wait_behind_younger_s", math.inf)

    def look_ahead(self, step: SchedulerStep) -> None:
        """Let the tier copy the KV of those who will have to leave; one that stores early has done so."""
        if not self._tier.stores_early and step.number % self._every_steps == 0:
            self._tier.leaving = frozenset(self._policy.leaving_soon(step))

    def preempting(self, request: Request) -> None:
        """Decide about the KV of a running request that is preempted now.

        Raises:
            TypeError: the policy returned something else than a fate.
        """
        scheduler = self._scheduler
        job = scheduler.ledger.get(request.request_id)
        if job is None:
            return
        parting = self.parting(job)
        fate = self._policy.on_preempt(scheduler.ledger.view(job), parting)
        if not isinstance(fate, Fate):
            raise TypeError(f"on_preempt returned {fate!r}: must be a Fate")
        self._tier.decide(request.request_id, fate)
        scheduler.observer.parted(fate.value)
        job.expected_wait_s = parting.wait_s
        computed = min(request.num_computed_tokens, request.num_tokens - 1)
        job.kept_tokens = self._tier.prices.kept_tokens(computed) if self._tier.keeps(fate) else 0

    def parting(self, job: Job) -> Parting:
        """Return what it costs if a running request is preempted now, in seconds."""
        request, prices = job.request, self._tier.prices
        computed = min(request.num_computed_tokens, request.num_tokens)
        return Parting(
            wait_s=self._wait_s(job),
            reuse_s=self._reuse_s(),
            out_s=prices.store_s(self._tier.missing_tokens(request.request_id, computed)),
            back_s=prices.load_s(computed),
        )

    def priced(self, victim: RequestView) -> RequestView:
        """Return the view of a running request with what its preemption would cost it, and everybody else.

        A victim waits until its KV is back; the others wait while it is computed again, or while it is copied out.
        """
        computed = victim.num_computed_tokens
        if not computed:
            return victim
        prices = self._tier.prices
        out_s = prices.store_s(self._tier.missing_tokens(victim.req_id, computed))
        rest_s = victim.recompute_s * (1 - prices.kept_tokens(computed) / computed)
        swap_s = out_s + prices.load_s(computed) + rest_s
        if swap_s >= victim.recompute_s:
            return victim
        return victim._replace(restore_s=swap_s, stall_s=out_s + rest_s)

    def load_s(self, num_tokens: int) -> float:
        """Return the time to load the KV of so many tokens."""
        return self._tier.prices.load_s(num_tokens)

    def resumed(self, job: Job, waited_s: float) -> None:
        """Compare how long a preempted request waited with what was expected."""
        if job.expected_wait_s is not None:
            self._scheduler.observer.resumed(job.expected_wait_s, waited_s)
            job.expected_wait_s = None
        job.kept_tokens = 0

    def _wait_s(self, job: Job) -> float:
        """Return the estimated wait time (ALISE, eq. 7) of a running request that is preempted now.

        The paper sums the predicted times of all that go before, as if they ran one after the other. Here they run
        side by side, in as many places as there are: the sum is divided by those. What is beyond the first requests of
        the queue counts with the mean of these.
        """
        scheduler = self._scheduler
        key = scheduler.key_of(job.request.request_id)
        ahead, sum_s = 0, 0.0
        for request in scheduler.ranked.best(LOOK_AHEAD):
            if scheduler.ranked.key(request) > key:
                break
            ahead += 1
            sum_s += scheduler.ledger.view(scheduler.ledger[request.request_id]).predicted_remaining_s
        if ahead == LOOK_AHEAD:
            sum_s *= len(scheduler.ranked) / ahead
        best = scheduler.running_order.best()
        until_free_s = 0.0
        if best is not None and best is not job.request:
            until_free_s = scheduler.ledger.view(scheduler.ledger[best.request_id]).predicted_remaining_s
        promoted_s = max(0.0, self._promoted_after_s - job.waited_s)
        return min(until_free_s + sum_s / max(1, len(scheduler.running)), promoted_s)

    def _reuse_s(self) -> float:
        """Return how long the blocks of a request that leaves now stay: those given up before are taken first."""
        scheduler = self._scheduler
        pace = scheduler.ledger.pace.pace
        wanted = sum(scheduler.kv_space.blocks_to_admit(request) for request in scheduler.ranked.best(1))
        left = scheduler.kv_space.unused_blocks() - wanted
        if left <= 0:
            return 0.0
        per_step = max(len(scheduler.running), 1) / scheduler.kv_space.block_size
        return left / per_step * pace.step_s
