"""A fixed token budget: vLLM's own rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Budget, Split, Step

_NO_CHANGE = Split()


@dataclass(frozen=True, kw_only=True)
class StaticBudget(Budget):
    """Leave the budget at vLLM's ``max_num_batched_tokens``."""

    uses_predictions: ClassVar[bool] = False

    @property
    def is_vllms(self) -> bool:
        """Not that of a class derived from it."""
        return type(self) is StaticBudget

    def split(self, step: Step) -> Split:
        """Return no change."""
        return _NO_CHANGE
