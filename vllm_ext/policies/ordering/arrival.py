"""First come, first served: vLLM's own order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Ordering, Rank, RequestView

BY_ARRIVAL = Rank(())
"""The rank of every request; ties end in arrival."""


@dataclass(frozen=True, kw_only=True)
class Arrival(Ordering):
    """Order requests by arrival. Ties end in arrival anyway, so every key is the same."""

    uses_predictions: ClassVar[bool] = False

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return a rank that never expires and leaves the order to the arrival time."""
        return BY_ARRIVAL
