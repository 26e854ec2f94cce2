"""A fixed token budget: vLLM's own rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.scheduling.plan import BudgetPlan
from vllm_ext.scheduling.views import StepView

_NO_CHANGE = BudgetPlan()


@dataclass(frozen=True, kw_only=True)
class StaticBudget:
    """Leave the budget at vLLM's ``max_num_batched_tokens``."""

    uses_predictions: ClassVar[bool] = False

    def plan(self, step: StepView) -> BudgetPlan:
        """Return no change."""
        return _NO_CHANGE
