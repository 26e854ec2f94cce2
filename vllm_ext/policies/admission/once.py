"""Admit in order, past a few that do not fit, and preempt each request once at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.admission.passing import PassAFew
from vllm_ext.policies.admission.preemptive import Preempting
from vllm_ext.policies.contract import Room, Step, Victim


@dataclass(frozen=True, kw_only=True)
class PreemptOnce(PassAFew, Preempting):
    """Take waiting requests as `PassAFew` does; for those that do not fit others leave that rank behind them.

    Whoever was preempted once stays from then on, unless KV memory runs out: so every request ends, and its stream has
    one such gap at most. Ours; preemption is by rank, as in ALISE.
    """

    uses_predictions: ClassVar[bool] = True

    priced: bool = False

    def __post_init__(self) -> None:
        PassAFew.__post_init__(self)
        Preempting.__post_init__(self)

    def select(self, step: Step, room: Room) -> None:
        """Take those who fit, then the first ones for whom others leave."""
        super().select(step, room)
        if self.preempt and (room.why or not room.open):
            joined = set(room.admit)
            self.make_room(step, room, (c for c in step.waiting() if c.req_id not in joined))

    def _may_leave(self, victim: Victim) -> bool:
        return not victim.request.num_preemptions and super()._may_leave(victim)
