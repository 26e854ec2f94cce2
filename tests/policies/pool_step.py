"""A step view over plain numbers: a pool of KV blocks, requests that hold some, and a queue."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import RequestView


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
    prefilling: tuple[int, ...] = ()
    """Tokens left of prompts that are half done; these requests are the last of the running ones."""
    max_model_len: int = 512
    admission: AdmissionPlan = field(default_factory=AdmissionPlan)
    now: float = 0.0

    @property
    def num_running(self) -> int:
        return len(self.bounds)

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def num_prefilling(self) -> int:
        return len(self.prefilling)

    @property
    def num_free_tokens(self) -> int:
        return self.token_budget - self.num_running + sum(1 - tokens for tokens in self.prefilling)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-min(num_tokens, self.max_model_len) // 16)

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
