"""A token budget in proportion to the tightest objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.slack import READING_TBT_S
from vllm_ext.scheduling.plan import BudgetPlan
from vllm_ext.scheduling.views import StepView


@dataclass(frozen=True, kw_only=True)
class SloPivotBudget:
    """Scale the step at which throughput saturates to the tightest objective of those who run.

        S_b = S_pf * SLO_min / T_pf        S_pf: tokens of the saturated step, T_pf: its duration
                                           SLO_min: tightest TBT objective, the reading speed where nobody has one

    Computed anew for every step; prompts are cut where exactly S_b is reached (vLLM cuts the last one). Contexts are
    not in the formula: a step of long contexts takes longer than it says.

    Source: AccelGen, section 4.2 and equation 6.
    """

    uses_predictions: ClassVar[bool] = False
    stall_free: ClassVar[bool] = True

    def plan(self, step: StepView) -> BudgetPlan:
        """Return S_b, and at least a token for everybody who decodes and one for a prompt."""
        return BudgetPlan(token_budget=max(pivot_tokens(step), step.decode_tokens + 1))


def pivot_tokens(step: StepView) -> int:
    """Return S_b, in tokens."""
    pivot, tightest = step.pivot, step.tightest_tbt_s
    return int(pivot.tokens * (READING_TBT_S if tightest is None else tightest) / pivot.step_s)
