"""Prompts and decodes in steps of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.scheduling.plan import BudgetPlan
from vllm_ext.scheduling.views import StepView

_NO_CHANGE = BudgetPlan()


@dataclass(frozen=True, kw_only=True)
class SeparateBatches:
    """Let nobody decode in a step in which prompts are computed.

    A step is one of prompts when a prompt is half done, or when the admission policy lets somebody join: its cap
    exceeds what runs. An admission policy that sets no cap leaves open whether somebody will, and the step alone.

    Source: vLLM 0.2 (SOSP '23), where a batch held prompts or decodes and prompts went first.
    """

    uses_predictions: ClassVar[bool] = False

    def plan(self, step: StepView) -> BudgetPlan:
        """Return which requests to skip: those that decode, if this is a step of prompts."""
        cap = step.admission.max_running
        joins = step.num_waiting > 0 and cap is not None and cap > step.num_running
        if not step.num_running or not (joins or step.num_prefilling):
            return _NO_CHANGE
        skip = step.decoding()
        return BudgetPlan(skip=skip) if skip else _NO_CHANGE
