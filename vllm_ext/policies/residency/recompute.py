"""Drop the KV of a preempted request and recompute it: vLLM's own rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm_ext.scheduling.views import RequestView


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Preempted KV is dropped; what the prefix cache still holds is found there, the rest is recomputed."""

    uses_predictions: ClassVar[bool] = False

    def on_preempt(self, request: RequestView) -> Literal["recompute"]:
        """Return ``"recompute"`` for every request."""
        return "recompute"
