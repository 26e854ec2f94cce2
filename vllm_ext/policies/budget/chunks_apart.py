"""Prompts in chunks, but in steps of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.checks import require
from vllm_ext.scheduling.plan import BudgetPlan
from vllm_ext.scheduling.views import StepView

_NO_CHANGE = BudgetPlan()


@dataclass(frozen=True, kw_only=True)
class ChunksApart:
    """Compute prompts in chunks, but never together with decodes: a step of chunks, then a step of decodes.

    Ablation "chunked-prefills-only". The paper does not say how chunks and decodes take turns; here every other step
    is one of decodes, as long as anything decodes.

    Source: Sarathi-Serve, section 5.2 and Table 4.
    """

    uses_predictions: ClassVar[bool] = False

    tokens: int = 0
    """Tokens of a step of chunks; 0 leaves vLLM's budget."""

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "budget.tokens", self.tokens, "an integer of at least 0")

    def plan(self, step: StepView) -> BudgetPlan:
        """Return which half of the work this step leaves out."""
        tokens = self.tokens or None
        could_join = step.num_waiting > 0 and step.num_running < step.max_running
        if not step.num_prefilling and not could_join:
            return _NO_CHANGE
        if not step.num_decoding:
            return BudgetPlan(token_budget=tokens)
        if step.number % 2:
            return BudgetPlan(token_budget=step.decode_tokens, decode_only=True)
        return BudgetPlan(token_budget=tokens, skip=step.decoding())
