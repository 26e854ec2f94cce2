"""Multi-level queues by predicted remaining time, with virtual aging."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_ext.contract import AGED, Ordering, Rank, RequestView
from vllm_ext.contract.checks import require
from vllm_ext.policies.ordering.aging import ages_at, outlived_at


@dataclass(frozen=True, kw_only=True)
class RemainingTimeLevels(Ordering):
    """Order requests by predicted remaining time in priority queues of doubling width.

    Queue 0 takes requests with less than ``base_level_s`` left, queue k those with less than ``base_level_s * 2**k``,
    the last one all the rest; inside a queue the shorter remaining time goes first. A request that outlived its
    estimate k times is never above queue k. Each ``age_limit_s`` of waiting promotes by one queue, and one promoted
    past queue 0 goes before everybody that is not, oldest first, whatever its priority; so no request waits longer than
    ``num_levels * age_limit_s`` behind younger ones. Promotions are kept while it runs and when it is preempted.

    Source: ALISE, section 3.1 (preemptive scheduling, virtual aging, demotion). The paper leaves the number of queues,
    their widths and the unit of the age threshold K open. ``priority`` of vLLM's API is honoured before the queues.
    """

    num_levels: int = 6
    """Number of queues, at least 1."""
    base_level_s: float = 0.5
    """Remaining time below which a request belongs to the highest queue, in seconds."""
    age_limit_s: float = 20.0
    """Waiting time per promotion, in seconds: the paper's K."""

    def __post_init__(self) -> None:
        require(self.num_levels >= 1, "ordering.num_levels", self.num_levels, "an integer of at least 1")
        require(self.base_level_s > 0, "ordering.base_level_s", self.base_level_s, "seconds, greater than 0")
        require(self.age_limit_s > 0, "ordering.age_limit_s", self.age_limit_s, "seconds, greater than 0")

    @property
    def max_wait_behind_younger_s(self) -> float:
        """The aging bound: waiting time after which only older requests go before this one, in seconds."""
        return self.num_levels * self.age_limit_s

    def level(self, request: RequestView) -> int:
        """Return the queue of a request before aging, 0 (highest) to ``num_levels - 1``."""
        ratio = request.predicted_remaining_s / self.base_level_s
        if math.isinf(ratio):
            return self.num_levels - 1
        by_time = 0 if ratio < 1 else math.frexp(ratio)[1]  # frexp: 2**(e-1) <= ratio < 2**e
        return min(self.num_levels - 1, max(by_time, request.num_demotions))

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``; a waiting one must be asked for again at its next promotion."""
        level = self.level(request)
        promotions = int(request.total_wait_s(now) // self.age_limit_s)
        if promotions > level:
            return Rank((0.0,), older_only_s=-math.inf, level=AGED)
        queue = level - promotions
        return Rank(
            (1.0, request.priority, queue, request.predicted_remaining_s),
            until_s=ages_at(request, (promotions + 1) * self.age_limit_s),
            until_tokens=self.rises_at(request),
            older_only_s=ages_at(request, (level + 1) * self.age_limit_s),
            level=queue,
        )

    def rises_at(self, request: RequestView) -> float:
        """Return the output length, in tokens, at which a request rises by a queue or outlives its estimate.

        What it has left is taken to fall evenly; it is asked again there, and then knows better.
        """
        left = request.predicted_output_tokens - request.num_output_tokens
        remaining_s = request.predicted_remaining_s
        level = min(self.level(request), self.num_levels - 1)
        if left <= 0 or level <= request.num_demotions or not 0 < remaining_s < math.inf:
            return outlived_at(request)
        share = 1 - self.base_level_s * 2.0 ** (level - 1) / remaining_s
        return min(outlived_at(request), request.num_output_tokens + max(1.0, left * share))
