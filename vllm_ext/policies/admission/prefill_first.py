"""Admit whole prompts while they fit now, before anything else runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.checks import require
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import StepView

_NO_CHANGE = AdmissionPlan()


@dataclass(frozen=True, kw_only=True)
class PrefillFirst:
    """Fill a step with as many waiting prompts as fit, in the order of the queue.

    A request fits if a seat is free, if the blocks of its sequence so far leave the watermark free, and if the whole
    sequence fits into the rest of the step's token budget; the first one that does not ends the scan. A prompt longer
    than the budget is admitted as the only one of its step, and nobody joins before its last chunk was scheduled. The
    budget policy that belongs to it (`SeparateBatches`) keeps decodes out of such a step, so all tokens are there for
    prompts.

    Source: vLLM 0.2 (SOSP '23), ``Scheduler._schedule`` and ``BlockSpaceManager.can_allocate``.
    """

    uses_predictions: ClassVar[bool] = False

    watermark: float = 0.01
    """Share of the KV pool that an admission must leave free, at least 0 and less than 1."""

    def __post_init__(self) -> None:
        require(0 <= self.watermark < 1, "admission.watermark", self.watermark, "at least 0 and less than 1")

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return the cap that admits exactly the prompts that fit."""
        free_seats = step.max_running - step.num_running
        if not step.num_waiting or free_seats < 1:
            return _NO_CHANGE
        # Whatever the watermark says, one request alone always fits: vLLM sees to that when it starts.
        return AdmissionPlan(max_running=max(1, step.num_running + self._fitting(step, free_seats)))

    def _fitting(self, step: StepView, free_seats: int) -> int:
        if step.num_prefilling:
            return 0
        free_blocks = step.num_free_blocks - int(self.watermark * step.num_total_blocks)
        free_tokens = step.token_budget
        fitting = 0
        for head in step.waiting():
            free_blocks -= step.blocks_for(head.num_tokens)
            tokens = head.num_tokens - head.num_computed_tokens
            if free_blocks < 0 or (tokens > free_tokens and fitting):
                break
            free_tokens -= tokens  # below 0 after a prompt that takes several steps: it is alone
            fitting += 1
            if fitting >= free_seats:
                break
        return fitting
