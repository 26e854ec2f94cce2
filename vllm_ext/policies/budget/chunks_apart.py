"""Prompts in chunks, but in steps of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Budget, Split, Step
from vllm_ext.contract.checks import require


@dataclass(frozen=True, kw_only=True)
class ChunksApart(Budget):
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

    def split(self, step: Step) -> Split:
        """Return which half of the work this step leaves out."""
        if step.num_decoding and step.number % 2 and (step.num_prefilling or step.num_waiting):
            return Split(tokens=step.decode_tokens, prefill=False)
        tokens = max(self.tokens, step.decode_tokens) if self.tokens else None
        return Split(tokens=tokens, apart=True)
