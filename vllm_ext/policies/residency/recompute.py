"""Leave the KV of a preempted request to vLLM: what of it is gone is computed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import KvDisposition, PreemptionCost, RequestView, Residency


@dataclass(frozen=True, kw_only=True)
class Recompute(Residency):
    """No say in where KV lives: blocks of a preempted request are vLLM's to reuse.

    What its prefix cache still holds is found there. With a KV tier (``--kv-tier-gib``) whole chunks are copied to host
    memory when the tier's option ``store`` says so, for every request alike.
    """

    uses_predictions: ClassVar[bool] = False

    def on_preempt(self, request: RequestView, cost: PreemptionCost) -> KvDisposition:
        """Return the tier's own way for every request."""
        return KvDisposition.SWAP
