"""Admit a request only if the KV of its longest possible output can be reserved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm_ext.contract import Candidate, Demand, GatePolicy, Pool, RequestView, Step, Victim
from vllm_ext.contract.checks import require


@dataclass(frozen=True, kw_only=True)
class ReserveMaximum(GatePolicy):
    """Reserve the maximum length of every running request, so that none is ever preempted for memory.

    A request may join if the blocks of prompt and ``max_tokens`` (cut at ``max_model_len``), summed over the requests
    that hold KV and itself, fit into the whole pool. What they share is not looked at: by definition a maximum is
    reserved for each.

    With ``overcommit`` the pool is taken to be larger than it is.

    Source: Orca (OSDI '22), section 4.2 and Algorithm 1: a request is selected only if its ``max_tokens`` KV slots can
    be reserved; as "Orca (Max)" (reserve the model's longest sequence) the baseline of the vLLM and ALISE papers;
    as "conservative", with overcommit, the baseline of Past-Future (arXiv 2507.10150), section 2.4 and Table 1.
    """

    uses_predictions: ClassVar[bool] = False

    reserve_tokens: int = 0
    """Sequence length reserved for each request at least, in tokens; 0 reserves the client's own bound."""
    overcommit: float = 1.0
    """Times the pool that may be reserved, at least 1."""

    def __post_init__(self) -> None:
        require(self.reserve_tokens >= 0, "admission.reserve_tokens", self.reserve_tokens, "0 or a number of tokens")
        require(self.overcommit >= 1, "admission.overcommit", self.overcommit, "at least 1")

    def gate(self, step: Step) -> _MaximumGate:
        """Return the gate of a step."""
        pool = step.pool
        held = pool.blocks_of(np.maximum(step.batch().bound, self.reserve_tokens))
        return _MaximumGate(pool, int(self.overcommit * pool.total) - held, self.reserve_tokens)


class _MaximumGate:
    name = "reserve_maximum"

    def __init__(self, pool: Pool, free_blocks: int, least_tokens: int) -> None:
        self._pool = pool
        self._free_blocks = free_blocks
        self._least_tokens = least_tokens

    @property
    def closed(self) -> bool:
        return self._free_blocks < 1

    def fits(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> bool:
        return self._blocks(candidate.request) <= self._free_blocks + self._freed(leaving)

    def take(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> None:
        self._free_blocks += self._freed(leaving) - self._blocks(candidate.request)

    def _blocks(self, request: RequestView) -> int:
        return self._pool.blocks_for(max(request.bound_tokens, self._least_tokens))

    def _freed(self, leaving: Sequence[Victim]) -> int:
        return sum(self._blocks(victim.request) for victim in leaving)
