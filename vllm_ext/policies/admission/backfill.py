"""Admit every waiting request that fits, in order, past those that do not."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from vllm_ext.policies.admission.preemptive import Preempting
from vllm_ext.policies.checks import require
from vllm_ext.policies.contract import Candidate, Room, Step


@dataclass(frozen=True, kw_only=True)
class Backfill(Preempting):
    """Fill the step with the requests that rank first and fit; one that does not fit holds nobody up.

    The first of the queue are looked at until ``max_passed`` did not fit. One that has waited so long that the ordering
    puts it before all others is not passed: nobody joins before it does. Where nobody joins, running requests may be
    preempted for the first ones, if that pays.

    Ours, from measurements of the single systems (docs/systems/auto.md): order without head-of-line blocking is what
    AccelGen's matching gains under overload, the price of a preemption is that of `alise`.
    """

    max_passed: int = 12
    """Requests that may be passed over in one step because they do not fit."""
    spare_outlived: bool = True
    """Whether requests that outlived their estimate are never preempted for others. Where lengths can't be told these
    are many, most end soon, and their KV is long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_passed >= 1, "admission.max_passed", self.max_passed, "an integer of at least 1")

    def select(self, step: Step, room: Room) -> None:
        """Take those who fit."""
        candidates, passed = step.waiting(), list[Candidate]()
        for candidate in candidates if room.open else ():
            if room.fits(candidate):
                room.take(candidate)
                if not room.open:
                    break
            else:
                passed.append(candidate)
                if candidate.aged or len(passed) >= self.max_passed:
                    break
        if not room.admit and self.preempt:
            self.make_room(step, room, itertools.chain(passed, candidates))
