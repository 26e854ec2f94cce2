"""Admit in order, past a few that do not fit, and preempt for those whose objective presses."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.admission.passing import PassAFew
from vllm_ext.policies.admission.preemptive import Preempting
from vllm_ext.policies.contract import Room, Step


@dataclass(frozen=True, kw_only=True)
class PassOrPreempt(PassAFew, Preempting):
    """Take waiting requests as `PassAFew` does; for those that press and do not fit others leave, if that pays.

    Ours: `PassAFew` with the preemption of `Preemptive`, for which an objective must be at stake.
    """

    uses_predictions: ClassVar[bool] = True

    spare_outlived: bool = True
    """Whether requests that outlived their estimate are never preempted for others. Where lengths can't be told these
    are many, most end soon, and their KV is long."""

    def __post_init__(self) -> None:
        PassAFew.__post_init__(self)
        Preempting.__post_init__(self)

    def select(self, step: Step, room: Room) -> None:
        """Take those who fit, then those at the front who press and fit if others leave."""
        super().select(step, room)
        if self.preempt and (room.why or not room.open):
            joined = set(room.admit)
            front = itertools.takewhile(lambda c: c.presses or c.aged, step.waiting())
            self.make_room(step, room, (c for c in front if c.presses and c.req_id not in joined))
