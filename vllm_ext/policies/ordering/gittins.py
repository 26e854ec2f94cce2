"""The one most likely to end soon first, running or not: for the time to the first token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_ext.contract import Rank, RequestView
from vllm_ext.contract.checks import require
from vllm_ext.policies.ordering.cost_over_wait import FRESH, RETURNING, CostOverWait, cost_class

_RATHER_OFTEN = 8
"""A running request is ranked anew when it has generated, or aged by, an eighth more."""


@dataclass(frozen=True, kw_only=True)
class GittinsOverWait(CostOverWait):
    """Order those who wait and those who run by what it costs to bring the next one to its end, over waiting.

    cost = (share / G + ``prefill_steps`` * missing) * E[N | N > g] ** ``theta``, where G is the Gittins index of a
    request that has generated g tokens, and ``share`` what a decode step of it takes of the server (`cost`). It rises
    with what has been generated for nothing, so that a newcomer, likely to be short, goes before one that turned out
    long. Running requests count ``hysteresis`` times as good: leaving and coming back has a price.

    Whoever was preempted goes before all others ``back_after_s`` after it left. Meant for servers with a KV tier, and
    with an `Admission` that preempts each request once: otherwise long ones come to no end.

    Source: Gittins (1979); Aalto, Ayesta and Righter (2009) for queues. KV as a part of the cost, the waiting and the
    bound on how long one stays out are ours.
    """

    gamma: float = 0.25
    hysteresis: float = 3.0
    """How many times better a waiting request must rank than a running one to go before it, at least 1."""
    back_after_s: float = 15.0
    """Seconds after which one that was preempted goes before all others."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.hysteresis >= 1, "ordering.hysteresis", self.hysteresis, "at least 1")
        require(self.back_after_s >= 0, "ordering.back_after_s", self.back_after_s, "seconds, at least 0")

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of a waiting ``request``; asked again when one that was preempted is to come back."""
        until = math.inf
        if request.num_preemptions and request.waiting_since is not None:
            until = request.waiting_since + self.back_after_s
            if now >= until:
                return Rank((request.priority, RETURNING), level=0)
        steps = gittins_cost(request, self.theta)
        return Rank((request.priority, FRESH), until_s=until, cost=steps, level=cost_class(steps))

    def running_rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of a running request, comparable with those of waiting ones."""
        waited, generated = now - request.arrival_time, request.num_output_tokens
        score = self.ageing.score(gittins_cost(request, self.theta), waited) / self.hysteresis
        return Rank(
            (request.priority, FRESH, score),
            until_s=now + (waited + self.grace_s) / _RATHER_OFTEN,
            until_tokens=generated + max(1, generated // _RATHER_OFTEN),
        )


def gittins_cost(request: RequestView, theta: float) -> float:
    """Return the decode steps of a full server that it takes to end such a request, over what its end is worth."""
    distribution, server, generated = request.distribution, request.server, request.num_output_tokens
    share = 1 / server.max_num_seqs + request.num_tokens / server.kv_tokens
    steps = share / distribution.gittins(generated) + server.prefill_steps * request.missing_tokens
    return float(steps * (generated + distribution.remaining(generated)) ** theta)
