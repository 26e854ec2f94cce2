"""vLLM's order of service under our scheduler, and that with KV blocks in reserve."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vllm_ext.contract import Ordering, Rank, RequestView
from vllm_ext.systems.system import System
from vllm_ext.systems.upstream import Arrival

_STEPS_PER_OCTAVE = 4
"""Lengths within a quarter of an octave count alike: a rank then holds for many steps."""


@dataclass(frozen=True, kw_only=True)
class LeastComputedLeaves(Ordering):
    """An ordering in which running requests are ranked by what they have computed, least last."""

    def running_rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of a running request; it holds until its sequence is a quarter of an octave longer."""
        tokens = request.num_computed_tokens
        size = int(_STEPS_PER_OCTAVE * math.log2(max(tokens, 1)))
        until = 1.0
        if request.num_output_tokens:
            until = request.num_output_tokens + max(1.0, 2 ** ((size + 1) / _STEPS_PER_OCTAVE) - tokens)
        return Rank((-float(size),), until_tokens=until)


@dataclass(frozen=True, kw_only=True)
class ArrivalLeastComputedLeaves(LeastComputedLeaves, Arrival):
    """First come, first served; out of KV memory whoever has computed least leaves, and not the last to come."""


ROWS = (
    System(name="fcfs", summary="vLLM's own scheduling, with our metrics"),
    System(
        name="fcfs-tuned",
        ordering=ArrivalLeastComputedLeaves,
        parameters={"admission": {"kv_reserve": 0.05}},
        summary="order of arrival, KV blocks in reserve, and whoever computed least leaves when they run out",
    ),
)
