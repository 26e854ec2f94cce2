"""Admit waiting requests in the order of the queue until one does not fit."""

from __future__ import annotations

from collections.abc import Callable

from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import RequestView, StepView

NO_CHANGE = AdmissionPlan()


class PromptRoom:
    """Says which prompts fit whole into what the step has left, in the order they are asked for.

    A prompt longer than a step can ever hold fits as the first one, if the step has any tokens left.
    """

    def __init__(self, step: StepView) -> None:
        self._most_tokens = step.token_budget
        self._free_tokens = step.num_free_tokens
        self._first = True

    def fits(self, request: RequestView) -> bool:
        """Say whether the next prompt fits; its tokens are taken off either way."""
        tokens = request.num_tokens - request.num_computed_tokens
        alone = tokens > self._most_tokens and self._first and self._free_tokens > 0
        whole = tokens <= self._free_tokens or alone
        self._free_tokens -= tokens
        self._first = False
        return whole


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


def nobody(step: StepView) -> AdmissionPlan:
    """Return the plan in which nobody joins those who run."""
    return AdmissionPlan(max_running=step.num_running)
