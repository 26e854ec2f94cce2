"""Admit while prompts fit below a watermark, whatever outputs will need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.admission.queue_scan import NO_CHANGE, admit
from vllm_ext.policies.checks import require
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import RequestView, StepView


@dataclass(frozen=True, kw_only=True)
class Watermark:
    """Let requests join while what is held and their sequences so far stay below a share of the pool.

    What the running ones will generate is not looked at; when the pool is full, the last ones are preempted.

    Source: the "aggressive" scheduler of Past-Future (arXiv 2507.10150), section 2.4 and Table 1, as in TGI and vLLM.
    vLLM's own ``--watermark 0.05`` is this with a share of 0.95.
    """

    uses_predictions: ClassVar[bool] = False

    watermark: float = 0.95
    """Share of the pool that admissions may fill, greater than 0 and at most 1."""
    max_admissions: int = 32
    """Requests admitted per step at most."""

    def __post_init__(self) -> None:
        require(0 < self.watermark <= 1, "admission.watermark", self.watermark, "greater than 0 and at most 1")
        require(self.max_admissions >= 1, "admission.max_admissions", self.max_admissions, "an integer of at least 1")

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return the cap that admits exactly the requests that stay below the watermark."""
        if not step.num_waiting or step.num_running >= step.max_running:
            return NO_CHANGE
        free = int(self.watermark * step.num_total_blocks) - (step.num_total_blocks - step.num_unused_blocks)
        for request in step.prefilling():  # what is not computed yet of prompts that were let in
            free -= step.blocks_for(request.num_tokens) - step.blocks_for(request.num_computed_tokens)

        def fits(request: RequestView) -> bool:
            nonlocal free
            free -= step.blocks_for(request.num_tokens)
            return free >= 0

        return admit(step, fits, self.max_admissions)
