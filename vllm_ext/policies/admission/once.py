"""Admit in order, past a few that do not fit, and preempt each request once at most."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ext.contract import Victim
from vllm_ext.policies.admission.preemptive import PassThenPreempt


@dataclass(frozen=True, kw_only=True)
class PreemptOnce(PassThenPreempt):
    """Take waiting requests as `PassAFew` does; for those that do not fit others leave that rank behind them.

    Whoever was preempted once stays from then on, unless KV memory runs out: so every request ends, and its stream has
    one such gap at most. Ours; preemption is by rank, as in ALISE.
    """

    priced: bool = False

    def _may_leave(self, victim: Victim) -> bool:
        return not victim.request.num_preemptions and super()._may_leave(victim)
