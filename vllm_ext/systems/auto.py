"""Our own: `alise` until an objective presses, with decodes that never stall."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Candidate, Need, Rank, RequestView, Step
from vllm_ext.contract.aging import outlived_at
from vllm_ext.contract.checks import require
from vllm_ext.contract.slack import at_stake
from vllm_ext.systems.alise import BypassThenPreempt, CostOverWait, EstimatedWait
from vllm_ext.systems.sarathi import TbtBudget
from vllm_ext.systems.system import System

PRESSING, GIVES_WAY, OTHERS = 0.0, 1.0, 2.0
"""First parts of keys: of who presses or runs with an objective, of who runs without one, of the others who wait. So
whoever runs goes before all who wait but those who press."""


@dataclass(frozen=True, kw_only=True)
class UrgentFirst(CostOverWait):
    """Let those go first whose objective presses, by the time left; the others as `CostOverWait` does.

    A request presses from ``horizon_s`` before it must run to keep the objectives that are at stake (`at_stake`), until
    one is lost. Before and after that, and without objectives, cost over a power of waiting decides.

    Of those who run, the ones without an objective that can still be kept are preempted first, least computed first;
    then the others, most time left first. Objectives of others hold nobody up for ever: of those that have waited
    longer than ``age_limit_s`` the oldest have their share of admissions before those that press.

    Ours, from measurements of the single systems: see docs/systems/auto.md.
    """

    age_limit_s: float = 120.0
    """As `CostOverWait.age_limit_s`, but later: under overload each turn is one objective less that is met."""
    horizon_s: float = 5.0
    """How long before it must run a request begins to press, in seconds."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.OBJECTIVES})

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.horizon_s >= 0, "ordering.horizon_s", self.horizon_s, "seconds, at least 0")

    def prices(self, decode_s: float, prefill_s: float) -> tuple[float, ...]:
        """Return both: when one must run depends on how long it takes."""
        return (decode_s, prefill_s)

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``; it must be asked for again when it presses or is lost."""
        until = math.inf
        left = at_stake(request, now)
        if left is not None:
            until = math.nextafter(left.lost_at, math.inf)
            presses_at = left.start_by - self.horizon_s
            if presses_at <= now:
                return Rank((PRESSING, left.start_by), until_s=until, presses=True)
            until = min(until, presses_at)
        rank = super().rank(request, now)
        return rank._replace(key=(OTHERS, *rank.key), until_s=until, level=1 + rank.level)

    def running_rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of a running request; it holds for some tokens, or until its objective is lost."""
        rank = super().running_rank(request, now)
        left = at_stake(request, now)
        if left is None:
            return rank._replace(key=(GIVES_WAY, *rank.key))
        # It has tokens to deliver: nobody who waits goes before it.
        key = (PRESSING, -math.inf, left.start_by - now)
        return Rank(key, until_s=math.nextafter(left.lost_at, math.inf), until_tokens=outlived_at(request))


@dataclass(frozen=True, kw_only=True)
class BypassOrPreempt(BypassThenPreempt):
    """Take waiting requests as `BoundedBypass` does; for those that press and do not fit others leave, if that pays.

    Ours: `BoundedBypass` with the preemption of `Preemptive`, for which an objective must be at stake.
    """

    spare_outlived: bool = True
    """Whether requests that outlived their estimate are never preempted for others. Where lengths can't be told these
    are many, most end soon, and their KV is long."""

    def _left_over(self, step: Step) -> Iterator[Candidate]:
        """Yield those at the front that press."""
        front = itertools.takewhile(lambda c: c.presses or c.aged, step.waiting())
        return (c for c in front if c.presses)


ROWS = (
    System(
        name="auto",
        ordering=UrgentFirst,
        admission=BypassOrPreempt,
        budget=TbtBudget,
        residency=EstimatedWait,
        parameters={
            "budget": {"default_tbt_ms": 0.0},
            "residency": {"tier_bits": 16},
        },
        summary="our best: alise until an objective presses, TBT objectives kept",
    ),
)
