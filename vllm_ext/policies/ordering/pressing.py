"""Shortest remaining time first, until an objective presses."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.checks import require
from vllm_ext.policies.contract import Ordering, Rank, RequestView
from vllm_ext.policies.ordering.aging import AGED_RANK, ages_at, outlived_at
from vllm_ext.policies.ordering.remaining_time import RemainingTimeLevels
from vllm_ext.policies.slack import slack
from vllm_ext.slo import NO_SLO

PRESSING, WILLING, RELEGATED = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class PressingFirst(Ordering):
    """Let those go first whose objective presses, by the time left; all others by predicted remaining time.

    A request presses from ``horizon_s`` before it must run to keep its objectives (`slack`). Until then it is served
    like one without objectives: in `alise`'s queues of predicted remaining time, which end most requests soonest and so
    leave room before objectives press. A request whose objective is lost goes last, by remaining time too: served in
    order of deadlines, those just missed would make everybody miss. One that has waited ``age_limit_s`` goes before
    everybody that has not, oldest first. vLLM's ``priority`` (lower first) is honoured within each of the three.

    Ours, from measurements of the single systems: see docs/systems/auto.md.
    """

    uses_predictions: ClassVar[bool] = True
    horizon_s: float = 2.0
    """How long before it must run a request begins to press, in seconds."""
    num_levels: int = 6
    """Number of queues by remaining time, at least 1."""
    base_level_s: float = 0.5
    """Remaining time below which a request belongs to the highest queue, in seconds."""
    age_limit_s: float = 300.0
    """Waiting time after which only older requests go before this one, in seconds."""

    def __post_init__(self) -> None:
        require(self.horizon_s >= 0, "ordering.horizon_s", self.horizon_s, "seconds, at least 0")
        require(self.age_limit_s > 0, "ordering.age_limit_s", self.age_limit_s, "seconds, greater than 0")
        _ = self._levels  # checks what it shares with us

    @property
    def max_wait_behind_younger_s(self) -> float:
        """The aging bound: waiting time after which only older requests go before this one, in seconds."""
        return self.age_limit_s

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``; a waiting one must be asked for again when it presses, is lost, or aged."""
        if request.total_wait_s(now) >= self.age_limit_s:
            return AGED_RANK
        ages_s = until = ages_at(request, self.age_limit_s)
        until_tokens = self._levels.rises_at(request)
        group, place = WILLING, (float(self._levels.level(request)), request.predicted_remaining_s)
        if request.slo != NO_SLO:
            left = slack(request, now)
            if left.lost_at <= now:
                group = RELEGATED
            elif request.waiting_since is None:
                group = PRESSING  # it has tokens to deliver: nobody who waits goes before it, and most time left leaves
                place = (-math.inf, left.start_by - now)
                until, until_tokens = math.nextafter(left.lost_at, math.inf), outlived_at(request)
            elif left.start_by - self.horizon_s <= now:
                group, place = PRESSING, (left.start_by, 0.0)
                until = min(until, math.nextafter(left.lost_at, math.inf))
            else:
                until = min(until, left.start_by - self.horizon_s, math.nextafter(left.lost_at, math.inf))
        key = (float(group), request.priority, *place)
        return Rank(key, until_s=until, until_tokens=until_tokens, older_only_s=ages_s, level=group)

    @functools.cached_property
    def _levels(self) -> RemainingTimeLevels:
        return RemainingTimeLevels(num_levels=self.num_levels, base_level_s=self.base_level_s)
