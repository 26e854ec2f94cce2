"""Admit every waiting request that fits, now and at the predicted peak of memory, in order, past those that do not."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from vllm_ext.policies.admission.best_set import BestSet
from vllm_ext.policies.admission.peak_memory import Forecast, PeakMemory
from vllm_ext.policies.admission.queue_scan import NO_CHANGE, nobody
from vllm_ext.policies.checks import require
from vllm_ext.scheduling.plan import AGED, AdmissionPlan
from vllm_ext.scheduling.views import StepView


@dataclass(frozen=True, kw_only=True)
class ForesightFit(PeakMemory):
    """Fill the step with the requests that rank first and fit; one that does not fit holds nobody up.

    A request fits if a seat, tokens of the step and its KV blocks are free now, and if the predicted peak of memory
    with it stays within the pool (`PeakMemory`). The first of the queue are looked at until ``max_passed`` did not fit.
    One that has waited so long that the ordering puts it before all others is not passed: nobody joins before it does.

    Where nothing fits, running requests may be preempted for the first ones if that pays (`BestSet`).

    Ours, from measurements of the single systems (docs/systems/auto.md): order without head-of-line blocking is what
    AccelGen's matching gains under overload, the forecast is Past-Future's, the price of a preemption that of `alise`.
    """

    max_passed: int = 12
    """Requests that may be passed over in one step because they do not fit."""
    preempt: bool = True
    """Whether running requests may be preempted where that lowers normalised latency."""
    gain_ratio: float = 1.0
    """The expected gain of a preemption must exceed its loss this many times."""
    min_progress_tokens: int = 16
    """Output tokens a request must have generated since its last preemption before it can be preempted again."""

    spare_outlived: bool = True
    """Whether requests that outlived their estimate are never preempted for others. Where lengths can't be told these
    are many, most end soon, and their KV is long."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_passed >= 1, "admission.max_passed", self.max_passed, "an integer of at least 1")
        _ = self._best_set  # checks what it shares with us

    @property
    def uses_predictions(self) -> bool:
        """Whether predicted lengths are looked at."""
        return True

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return who joins: a cap, and whom of the first in the queue to pass over."""
        if not step.num_waiting:
            return NO_CHANGE
        seats = min(step.max_running - step.num_running, self.max_admissions)
        tokens, blocks = step.num_free_tokens, step.num_free_blocks
        if seats < 1 or tokens < 1 or blocks < 1:
            # vLLM's own rule foresees nothing, and might find some within the step.
            return self._preempting(step) if step.num_running else NO_CHANGE
        if self.stands(step):
            return self._preempting(step)
        forecast = Forecast(self, step)
        chosen: list[str] = []
        passed: list[str] = []
        for request in step.waiting():
            if len(chosen) >= seats or tokens < 1:
                break
            if request.num_blocks <= blocks and forecast.admits(request):
                chosen.append(request.req_id)
                blocks -= request.num_blocks
                tokens -= request.num_tokens - request.num_computed_tokens
                continue
            passed.append(request.req_id)
            if len(passed) >= self.max_passed or step.level_of(request) == AGED:
                break
        if not chosen:
            if not step.num_running:  # alone it always fits: vLLM sees to that when it starts
                return AdmissionPlan(max_running=1)
            self.note(step)
            return self._preempting(step)
        return AdmissionPlan(max_running=step.num_running + len(chosen), hold=frozenset(passed))

    def _preempting(self, step: StepView) -> AdmissionPlan:
        """Return the plan in which nobody joins but for whom it pays to preempt."""
        plan = self._best_set.plan(step)
        return plan if plan.preempt else nobody(step)

    @functools.cached_property
    def _best_set(self) -> BestSet:
        return BestSet(
            preempt=self.preempt,
            gain_ratio=self.gain_ratio,
            min_progress_tokens=self.min_progress_tokens,
            spare_outlived=self.spare_outlived,
        )
