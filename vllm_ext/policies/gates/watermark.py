"""Admit while sequences fit below a watermark, whatever outputs will need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from vllm_ext.contract import Candidate, Demand, GatePolicy, Step, Victim
from vllm_ext.contract.checks import require


@dataclass(frozen=True, kw_only=True)
class Watermark(GatePolicy):
    """Let requests join while what is held and their sequences so far stay below a share of the pool.

    What the running ones will generate is not looked at; when the pool is full, the last ones are preempted.

    Source: the "aggressive" scheduler of Past-Future (arXiv 2507.10150), section 2.4 and Table 1, as in TGI and vLLM;
    with a share of 0.99, ``BlockSpaceManager.can_allocate`` of vLLM 0.2. vLLM's own ``--watermark 0.05`` is this with a
    share of 0.95.
    """

    uses_predictions: ClassVar[bool] = False

    watermark: float = 0.95
    """Share of the pool that admissions may fill, greater than 0 and at most 1."""

    def __post_init__(self) -> None:
        require(0 < self.watermark <= 1, "admission.watermark", self.watermark, "greater than 0 and at most 1")

    def gate(self, step: Step) -> _WatermarkGate:
        """Return the gate of a step."""
        pool = step.pool
        free = int(self.watermark * pool.total) - (pool.total - pool.unused)
        promised = {
            request.req_id: pool.blocks_for(request.num_tokens) - pool.blocks_for(request.num_computed_tokens)
            for request in step.prefilling()
        }
        return _WatermarkGate(free - sum(promised.values()), promised)


class _WatermarkGate:
    name = "watermark"

    def __init__(self, free_blocks: int, promised: Mapping[str, int]) -> None:
        self._free_blocks = free_blocks
        self._promised = promised
        """Blocks that are not taken yet of prompts that were let in."""

    @property
    def closed(self) -> bool:
        return self._free_blocks < 1

    def fits(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> bool:
        return demand.blocks <= self._free_blocks + self._freed(leaving)

    def take(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> None:
        self._free_blocks += self._freed(leaving) - demand.blocks

    def _freed(self, leaving: Sequence[Victim]) -> int:
        return sum(victim.blocks + self._promised.get(victim.request.req_id, 0) for victim in leaving)
