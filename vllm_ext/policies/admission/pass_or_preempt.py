"""Admit in order, past a few that do not fit, and preempt for those whose objective presses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from vllm_ext.contract import Candidate, Step
from vllm_ext.policies.admission.preemptive import PassThenPreempt


@dataclass(frozen=True, kw_only=True)
class PassOrPreempt(PassThenPreempt):
    """Take waiting requests as `PassAFew` does; for those that press and do not fit others leave, if that pays.

    Ours: `PassAFew` with the preemption of `Preemptive`, for which an objective must be at stake.
    """

    spare_outlived: bool = True
    """Whether requests that outlived their estimate are never preempted for others. Where lengths can't be told these
    are many, most end soon, and their KV is long."""

    def _left_over(self, step: Step) -> Iterator[Candidate]:
        """Yield those at the front that press."""
        front = itertools.takewhile(lambda c: c.presses or c.aged, step.waiting())
        return (c for c in front if c.presses)
