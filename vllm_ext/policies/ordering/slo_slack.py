"""Order by the time that is left until an objective is missed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Ordering, Rank, RequestView
from vllm_ext.contract.checks import require
from vllm_ext.contract.slack import given_up_at, slack
from vllm_ext.policies.ordering.aging import AGED_RANK, ages_at

IN_TIME, RELEGATED = 0, 1
_WAITS, _RUNS = 0.0, 1.0


@dataclass(frozen=True, kw_only=True)
class SloSlack(Ordering):
    """Let the request go first that has the least time left to meet its objectives.

    The remaining time of those who wait shrinks for all alike, so it is turned into the clock time by which a request
    must start, which stands still. Of the running ones those with most time left are last, and so leave first.

    With ``relegate``, requests whose objective is lost go after all others: under overload the
    earliest deadlines are those just missed, and serving them first makes everybody miss. Among them the shortest goes
    first. A request that has waited
    ``age_limit_s`` goes before everybody that has not, oldest first, so that nobody starves.

    Source: AccelGen, section 4.3; relegation and aging are ours (relegation as in Niyama, arXiv 2503.22562).
    """

    relegate: bool = True
    """Whether requests that can't meet their objective any more go last."""
    lost_steps: float = 1.0
    """Mean steps before it is certain that an objective can't be met, from which on it counts as lost."""
    age_limit_s: float = 120.0
    """Waiting time after which only older requests go before this one, in seconds."""

    uses_predictions: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.lost_steps >= 0, "ordering.lost_steps", self.lost_steps, "a number of at least 0")
        require(self.age_limit_s > 0, "ordering.age_limit_s", self.age_limit_s, "seconds, greater than 0")

    @property
    def max_wait_behind_younger_s(self) -> float:
        """The aging bound: waiting time after which only older requests go before this one, in seconds."""
        return self.age_limit_s

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``; a waiting one must be asked for again when it is lost or aged."""
        if request.total_wait_s(now) >= self.age_limit_s:
            return AGED_RANK
        left = slack(request, now)
        lost_at = given_up_at(request, left, self.lost_steps)
        lost = self.relegate and lost_at <= now
        level = RELEGATED if lost else IN_TIME
        loses = math.nextafter(lost_at, math.inf) if self.relegate and not lost else math.inf
        if request.waiting_since is None:  # the time it has left hardly moves once it has begun to answer
            begins = math.inf if request.num_output_tokens else 1.0
            return Rank((float(level), _RUNS, left.start_by - now), until_s=loses, until_tokens=begins, level=level)
        ages_s = ages_at(request, self.age_limit_s)
        # Of those that are lost whatever happens, the shortest leaves most room for the others.
        place = float(request.num_tokens) if lost else left.start_by
        return Rank((float(level), _WAITS, place), until_s=min(ages_s, loses), older_only_s=ages_s, level=level)
