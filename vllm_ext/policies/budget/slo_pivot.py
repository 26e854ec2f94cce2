"""A token budget in proportion to the tightest objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.policies.budget.tbt import TbtBudget, fitting_prompt_tokens
from vllm_ext.policies.contract import Budget, Split, Step
from vllm_ext.policies.slack import READING_TBT_S

_RULE = TbtBudget()


@dataclass(frozen=True, kw_only=True)
class SloPivotBudget(Budget):
    """Scale the step at which throughput saturates to the tightest objective of those who run.

        S_b = S_pf * SLO_min / T_pf        S_pf: tokens of the saturated step, T_pf: its duration
                                           SLO_min: tightest TBT objective, the reading speed where nobody has one

    Computed anew for every step; prompts are cut where exactly S_b is reached (vLLM cuts the last one). Contexts are
    not in the formula: a step of long contexts takes longer than it says. So with ``fitted`` no more is granted than
    keeps the step within 0.9 of the objective by the step-time model.

    Source: AccelGen, section 4.2 and equation 6; ``fitted`` is ours, by the rule of `TbtBudget`.
    """

    uses_predictions: ClassVar[bool] = False
    stall_free: ClassVar[bool] = True

    fitted: bool = True
    """Whether contexts are looked at as well."""

    def split(self, step: Step) -> Split:
        """Return S_b, and at least a token for everybody who decodes and one for a prompt."""
        tokens = pivot_tokens(step)
        if self.fitted and step.num_decoding:
            fitting = fitting_prompt_tokens(step, _RULE.safety * _objective_s(step))
            tokens = min(tokens, step.decode_tokens + max(fitting, _RULE.min_prefill_tokens))
        return Split(tokens=max(tokens, step.decode_tokens + 1))


def pivot_tokens(step: Step) -> int:
    """Return S_b, in tokens."""
    pivot = step.runtime.pivot
    return int(pivot.tokens * _objective_s(step) / pivot.step_s)


def _objective_s(step: Step) -> float:
    return step.tbt_s(READING_TBT_S)
