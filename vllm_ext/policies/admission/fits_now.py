"""Admit while a request fits: vLLM's own rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.admission.queue_scan import NO_CHANGE
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import StepView


@dataclass(frozen=True, kw_only=True)
class FitsNow:
    """Leave admission to vLLM: the first waiting request joins when a seat and its prompt's KV blocks are free."""

    uses_predictions: ClassVar[bool] = False

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return no change."""
        return NO_CHANGE
