"""Admit while a request fits: vLLM's own rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import StepView

_NO_CHANGE = AdmissionPlan()


@dataclass(frozen=True, kw_only=True)
class FitsNow:
    """Leave admission to vLLM: the first waiting request joins when a seat and its prompt's KV blocks are free."""

    uses_predictions: ClassVar[bool] = False

    def plan(self, step: StepView) -> AdmissionPlan:
        """Return no change."""
        return _NO_CHANGE
