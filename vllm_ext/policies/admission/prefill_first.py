"""Admit whole prompts while they fit now, before anything else runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.admission.queue_scan import NO_CHANGE, admit
from vllm_ext.policies.checks import require
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import RequestView, StepView


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
        if not step.num_waiting or step.num_running >= step.max_running:
            return NO_CHANGE
        free_blocks = step.num_free_blocks - int(self.watermark * step.num_total_blocks)
        free_tokens = step.token_budget
        first = True

        def fits(request: RequestView) -> bool:
            nonlocal free_blocks, free_tokens, first
            free_blocks -= step.blocks_for(request.num_tokens)
            tokens = request.num_tokens - request.num_computed_tokens
            fitting = free_blocks >= 0 and (tokens <= free_tokens or first) and not step.num_prefilling
            free_tokens -= tokens  # below 0 after a prompt that takes several steps: it is alone
            first = False
            return fitting

        return admit(step, fits, most=step.max_running)
