"""Admit waiting requests in the order of the queue until one does not fit."""

from __future__ import annotations

from collections.abc import Callable

from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import RequestView, StepView

NO_CHANGE = AdmissionPlan()


def admit(step: StepView, fits: Callable[[RequestView], bool], most: int) -> AdmissionPlan:
    """Return the cap that admits exactly the requests that fit.

    Args:
        step: What is known of the step; somebody waits and a seat is free.
        fits: Asked for one request after the other; counts those it said yes to.
        most: Requests admitted at most.
    """
    admitted, limit = 0, min(most, step.max_running - step.num_running)
    for request in step.waiting():
        if admitted >= limit or not fits(request):
            break
        admitted += 1
    # Whatever it needs, one request alone always fits: vLLM sees to that when it starts.
    return AdmissionPlan(max_running=max(1, step.num_running + admitted))
