"""A step view over plain numbers: a pool of KV blocks, requests that hold some, and a queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.runtime import Pivot, RuntimeModel
from vllm_ext.scheduling.plan import AGED, AdmissionPlan
from vllm_ext.scheduling.views import NO_PACE, Batch, Pace, RequestView

_PIVOT = Pivot(64, 0.1)


@dataclass(kw_only=True)
class PoolStep:
    """Blocks of 16 tokens; running requests hold what they have and were promised ``bounds`` tokens."""

    queue: tuple[RequestView, ...] = ()
    bounds: tuple[int, ...] = ()
    """Longest length of each running request, in tokens."""
    num_total_blocks: int = 100
    num_free_blocks: int = 100
    max_running: int = 8
    token_budget: int = 64
    num_drafts: int = 0
    """Tokens that each decode verifies besides its next one."""
    unfinished: tuple[int, ...] = ()
    """Tokens left of prompts that are half done; these requests are the last of the running ones."""
    max_model_len: int = 512
    admission: AdmissionPlan = field(default_factory=AdmissionPlan)
    now: float = 0.0
    block_size: int = 16
    running: tuple[RequestView, ...] = ()
    """Running requests, best rank first; needed by policies that look at them one by one."""
    finished: tuple[int, ...] = ()
    """Output lengths of finished requests."""
    shared_blocks: int = 0
    """Blocks of its prefix that a waiting request would share."""
    context_tokens: int = 0
    objectives_s: tuple[float, ...] = ()
    """TBT objectives of the running requests that name one."""
    number: int = 0
    runtime: RuntimeModel = field(default_factory=lambda: RuntimeModel((0.01, 0.0, 1e-4, 0.0, 0.0)))
    pivot: Pivot = _PIVOT
    pace: Pace = NO_PACE
    aged: frozenset[str] = frozenset()
    seed: int = 0
    membership: int = 0
    queue_changes: int = 0
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    @property
    def num_running(self) -> int:
        return max(len(self.bounds), len(self.running))

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_prefilling(self) -> int:
        return len(self.unfinished) or len(self.prefilling())

    @property
    def num_free_tokens(self) -> int:
        return self.token_budget - self.decode_tokens - sum(self.unfinished)

    def tbt_s(self, default_s: float) -> float:
        unnamed = (default_s,) if len(self.objectives_s) < self.num_running or not self.num_running else ()
        return min(*self.objectives_s, *unnamed, float("inf"))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.max_model_len) // self.block_size)

    @property
    def num_unused_blocks(self) -> int:
        return self.num_free_blocks

    @property
    def num_decoding(self) -> int:
        return self.num_running - self.num_prefilling

    @property
    def decode_tokens(self) -> int:
        return self.num_decoding * (1 + self.num_drafts)

    def finished_lengths(self) -> npt.NDArray[np.int64]:
        return np.array(sorted(self.finished), dtype=np.int64)

    def batch(self) -> Batch:
        rows = [(r.num_tokens, r.num_computed_tokens, r.num_output_tokens, r.max_tokens) for r in self.running]
        return Batch(*np.array(rows, dtype=np.int64).reshape(len(rows), 4).T)

    def predicted_lengths(self) -> npt.NDArray[np.int64]:
        return np.array([r.predicted_output_tokens for r in self.running], dtype=np.int64)

    def cached_blocks_in_use(self, request: RequestView) -> int:
        return self.shared_blocks

    def prefilling(self) -> list[RequestView]:
        return [r for r in self.running if r.num_computed_tokens < r.num_prompt_tokens]

    def level_of(self, request: RequestView) -> int:
        return AGED if request.req_id in self.aged else 0

    def running_worst_first(self) -> Iterator[RequestView]:
        return iter(self.running[::-1])

    def blocks_at_bound(self, min_tokens: int = 0) -> int:
        return sum(self.blocks_for(max(bound, min_tokens)) for bound in self.bounds)

    def decoding(self) -> tuple[str, ...]:
        return tuple(f"r{i}" for i in range(self.num_running - self.num_prefilling))

    def waiting(self) -> Iterator[RequestView]:
        return iter(self.queue)


def prompts(*lengths: tuple[int, int]) -> tuple[RequestView, ...]:
    """Waiting requests from (prompt, max_tokens)."""
    return tuple(
        RequestView(f"w{i}", float(i), prompt, max_tokens=bound, waiting_since=float(i))
        for i, (prompt, bound) in enumerate(lengths)
    )


def admits(plan: AdmissionPlan, step: PoolStep) -> int | None:
    """How many requests a plan lets join; None where it leaves that to vLLM."""
    assert plan == AdmissionPlan(max_running=plan.max_running), "neither holds nor preempts"
    return None if plan.max_running is None else plan.max_running - step.num_running
