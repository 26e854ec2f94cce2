"""A fixed forward size: prompts are split and fused so that every step has it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Budget, Split, Step
from vllm_ext.contract.checks import require


@dataclass(frozen=True, kw_only=True)
class FixedForward(Budget):
    """Dynamic SplitFuse: long prompts are split over several steps, short ones fused to fill a step of fixed size.

    Decodes come first. The size does not depend on any objective, nor on what a step's contexts cost.

    Source: DeepSpeed-FastGen (arXiv 2401.08671), section 3: forward passes of a consistent size, where throughput
    saturates.
    """

    uses_predictions: ClassVar[bool] = False
    stall_free: ClassVar[bool] = True

    tokens: int = 0
    """Forward size in tokens; 0: the size at which throughput saturates (`RuntimeModel.pivot`)."""

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "budget.tokens", self.tokens, "an integer of at least 0")

    def split(self, step: Step) -> Split:
        """Return the fixed size, and at least a token for everybody who decodes and one for a prompt."""
        return Split(tokens=max(self.tokens or step.runtime.pivot.tokens, step.decode_tokens + 1))
