"""Prompts and decodes in steps of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Budget, Split, Step


@dataclass(frozen=True, kw_only=True)
class SeparateBatches(Budget):
    """Let nobody decode in a step in which prompts are computed: prompts go first.

    Source: vLLM 0.2 (SOSP '23), where a batch held prompts or decodes.
    """

    uses_predictions: ClassVar[bool] = False

    def split(self, step: Step) -> Split:
        """Return that prompts and decodes do not share the step."""
        return Split(apart=True)
