"""Least cost first, divided by a power of waiting: cost is what a request takes of the server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Ageing, Rank, RequestView
from vllm_ext.contract.checks import require
from vllm_ext.policies.ordering.least_computed import LeastComputedLeaves

RETURNING, FRESH = 0.0, 1.0
_CLASSES, _PER_CLASS = 12, 4.0
"""For metrics: classes of cost, the times by which one costs more than the one below."""


def cost(request: RequestView, theta: float) -> float:
    """Return what a request takes of the server, over what its end is worth.

    A decode step in which it holds p + g tokens takes the share ``1 / max_num_seqs + (p + g) / kv_tokens`` of the
    server, so that an output of N tokens after a prompt of p takes

        E[N] * (1 / max_num_seqs + p / kv_tokens) + E[N ** 2] / (2 * kv_tokens) + prefill_steps * uncached

    steps of it, where ``uncached`` counts the prompt tokens still to compute. Its end is worth E[N ** -theta].
    """
    distribution, server = request.distribution, request.server
    share = 1 / server.max_num_seqs + request.num_prompt_tokens / server.kv_tokens
    steps = distribution.moment(1) * share + distribution.moment(2) / (2 * server.kv_tokens)
    return (steps + server.prefill_steps * request.missing_tokens) / distribution.moment(-theta)


@dataclass(frozen=True, kw_only=True)
class CostOverWait(LeastComputedLeaves):
    """Order those who wait by cost over a power of their waiting; nobody is preempted for being passed.

    score = cost / (now - arrival + ``grace_s``) ** ``gamma``, the least goes first. A request of cost c yields to
    newcomers of cost d only until it has waited about ``grace_s`` * (c / d) ** (1 / ``gamma``). Who was preempted comes
    back before all others, by arrival. vLLM's ``priority`` (lower first) is honoured before both.

    Ours: the order of weighted shortest expected processing time (Smith, 1956), with KV memory as part of the time and
    a wait that counts; ALISE's is by remaining time, preemptive. See docs/systems/alise.md.
    """

    uses_predictions: ClassVar[bool] = True

    gamma: float = 0.5
    """Power of waiting, above 0: 0.25 for normalised latency, 0.5 for the mean, 1 for the tail."""
    theta: float = 0.5
    """Power of the output length by which ends are worth less, from 0 (mean latency) to 1 (normalised latency)."""
    grace_s: float = 1.0
    """Waiting that everybody is taken to have behind it, in seconds."""

    def __post_init__(self) -> None:
        require(0 < self.gamma <= 4, "ordering.gamma", self.gamma, "greater than 0 and at most 4")
        require(0 <= self.theta <= 1, "ordering.theta", self.theta, "from 0 to 1")
        require(self.grace_s > 0, "ordering.grace_s", self.grace_s, "seconds, greater than 0")

    @property
    def ageing(self) -> Ageing:
        """How waiting counts against cost."""
        return Ageing(self.gamma, self.grace_s)

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``; it holds while the request waits."""
        if request.num_preemptions:
            return Rank((request.priority, RETURNING), level=0)
        steps = cost(request, self.theta)
        return Rank((request.priority, FRESH), cost=steps, level=cost_class(steps))


def cost_class(steps: float) -> int:
    """Return 1 for a cost of less than 4 steps, 2 for less than 16, and so on to 12."""
    return 1 + min(max(0, math.floor(math.log(steps, _PER_CLASS))), _CLASSES - 1)
