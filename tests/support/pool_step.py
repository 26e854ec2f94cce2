"""A step over plain numbers: a pool of KV blocks, requests that hold some, a queue, and the room that they leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import filterfalse, islice
from typing import Any

import numpy as np

from vllm_ext.contract import (
    Admission,
    Batch,
    Candidate,
    Demand,
    GatePolicy,
    Pool,
    RequestView,
    Room,
    StepStats,
    Victim,
)
from vllm_ext.contract.step import Lengths
from vllm_ext.step_time.runtime import Pivot, RuntimeModel


@dataclass(kw_only=True)
class PoolStep:
    """A `Step`; changed by `dataclasses.replace`. Running requests hold what they have computed."""

    queue: tuple[RequestView, ...] = ()
    """Who waits, best rank first."""
    running: tuple[RequestView, ...] = ()
    """Who runs, best rank first."""
    total: int = 100
    free: int = 100
    blocks: Mapping[str, int] = field(default_factory=dict)
    """By id: what a waiting request needs, a running one frees. Where nothing is said, the blocks of its sequence."""
    common_blocks: int = 0
    """Blocks at the front of every waiting request that are the same for all."""
    common_held: bool = False
    """Whether running requests hold them; if not, the first to join does."""
    keys: Mapping[str, float] = field(default_factory=dict)
    """Ranks by id; where nothing is said, the predicted remaining time."""
    aged: frozenset[str] = frozenset()
    pressing: frozenset[str] = frozenset()
    max_running: int = 8
    token_budget: int = 64
    apart: bool = False
    """Whether decodes sit out a step of prompts."""
    num_drafts: int = 0
    """Tokens that each decode verifies besides its next one."""
    block_size: int = 16
    max_model_len: int = 512
    finished: tuple[int, ...] = ()
    """Output lengths of finished requests."""
    objectives_s: tuple[float, ...] = ()
    """TBT objectives of the running requests that name one."""
    runtime: RuntimeModel = field(default_factory=lambda: RuntimeModel((0.01, 0.0, 1e-4, 0.0, 0.0), Pivot(64, 0.1)))
    step_stats: StepStats = field(default_factory=StepStats)
    now: float = 0.0
    number: int = 0
    changes: int = 0
    memo: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    num_victims_shown: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.num_running, self.num_waiting = len(self.running), len(self.queue)
        self.num_prefilling = len(self.prefilling())
        self.num_decoding = self.num_running - self.num_prefilling
        self.decode_tokens = self.num_decoding * (1 + self.num_drafts)
        chunks = sum(request.missing_tokens for request in self.prefilling())
        self.free_tokens = self.token_budget - chunks - (0 if self.apart else self.decode_tokens)
        self.context_tokens = sum(request.num_computed_tokens for request in self.running)
        self.pool = Pool(
            total=self.total,
            unused=self.free,
            free=self.free,
            block_sizes=(self.block_size,),
            max_model_len=self.max_model_len,
        )

    def tbt_s(self, default_s: float) -> float:
        unnamed = (default_s,) if len(self.objectives_s) < self.num_running or not self.num_running else ()
        return min(*self.objectives_s, *unnamed, float("inf"))

    def finished_lengths(self) -> Lengths:
        return np.array(sorted(self.finished), dtype=np.int64)

    def batch(self, without: Sequence[Victim] = ()) -> Batch:
        left = self._without(without)
        rows = [(r.num_tokens, r.num_computed_tokens, r.num_output_tokens, r.max_tokens) for r in left]
        return Batch(*np.array(rows, dtype=np.int64).reshape(len(rows), 4).T)

    def predicted_lengths(self, without: Sequence[Victim] = ()) -> Lengths:
        return np.array([r.predicted_output_tokens for r in self._without(without)], dtype=np.int64)

    def _without(self, leaving: Sequence[Victim]) -> list[RequestView]:
        gone = {victim.request.req_id for victim in leaving}
        return [request for request in self.running if request.req_id not in gone]

    def prefilling(self) -> list[RequestView]:
        return [r for r in self.running if r.num_computed_tokens < r.num_prompt_tokens]

    def decoding(self) -> Iterator[RequestView]:
        return (r for r in self.running if r.num_computed_tokens >= r.num_prompt_tokens)

    def waiting(self, but: Callable[[Candidate], bool] | None = None, *, past: int = 256) -> Iterator[Candidate]:
        found = map(self._candidate, self.queue)
        return found if but is None else filterfalse(but, islice(found, past))

    def _candidate(self, request: RequestView) -> Candidate:
        name = request.req_id
        return Candidate(name, self._key(request), lambda: request, name in self.aged, name in self.pressing)

    def is_waiting(self, req_id: str) -> bool:
        return any(request.req_id == req_id for request in self.queue)

    def victims(self, behind: tuple[float, ...] = ()) -> Iterator[Victim]:
        for request in self.running[::-1]:
            if self._key(request) <= behind:
                return
            self.num_victims_shown += 1
            yield self.victim(request)

    def victim(self, request: RequestView) -> Victim:
        freed = self.blocks.get(request.req_id, self.pool.blocks_for(request.num_computed_tokens))
        return Victim(request, self._key(request), freed, request.recompute_s, request.recompute_s)

    def best_running(self) -> RequestView | None:
        return self.running[0] if self.running else None

    def _key(self, request: RequestView) -> tuple[float, ...]:
        return (self.keys.get(request.req_id, request.predicted_remaining_s),)


def room_of(step: PoolStep, *gates: GatePolicy) -> Room:
    """What a step has left."""
    joined: list[Candidate] = []

    def price(candidate: Candidate, free_tokens: int) -> Demand:
        request = candidate.request
        shared = step.common_blocks if step.common_held or joined else 0
        blocks = step.blocks.get(request.req_id, step.pool.blocks_for(request.num_tokens))
        cached = shared * step.block_size
        return Demand(max(1, request.missing_tokens - cached), max(0, blocks - shared), request.num_tokens - cached)

    return Room(
        seats=step.max_running - step.num_running,
        tokens=step.free_tokens,
        blocks=step.pool.free,
        idle=not step.running,
        price=price,
        taken=lambda candidate, tokens: joined.append(candidate),
        gates=tuple(policy.gate(step) for policy in gates),
    )


def select(policy: Admission, step: PoolStep, *gates: GatePolicy) -> Room:
    """Let a selector choose; what no selector may do is checked whatever the test is about."""
    room = room_of(step, *gates)
    policy.select(step, room)
    for chosen, known in ((room.admit, step.queue), (room.preempt, step.running)):
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= {request.req_id for request in known}
    assert room.admit or not room.preempt, "somebody leaves for nobody"
    assert not set(room.why) & set(room.admit)
    if step.running and room.admit:
        assert min(room.seats, room.tokens, room.blocks) >= 0
    return room


def prompts(*lengths: tuple[int, int]) -> tuple[RequestView, ...]:
    """Waiting requests from (prompt, max_tokens)."""
    return tuple(
        RequestView(f"w{i}", float(i), prompt, max_tokens=bound, waiting_since=float(i))
        for i, (prompt, bound) in enumerate(lengths)
    )


def bounded(*bounds: int) -> tuple[RequestView, ...]:
    """Running requests that decode, from the longest that each may get."""
    return tuple(
        RequestView(f"r{i}", float(i), 1, num_computed_tokens=1, max_tokens=bound - 1, predicted_remaining_s=1.0)
        for i, bound in enumerate(bounds)
    )


def half_done(prompt: int, computed: int, **fields: Any) -> RequestView:
    """A running request with a part of its prompt still to compute."""
    return RequestView("p", 50.0, prompt, 0, computed, **{"max_tokens": 100, **fields})
