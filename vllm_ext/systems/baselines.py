"""Systems that papers compare with: Orca, vLLM of 2023, FastGen and FastServe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vllm_ext.contract import (
    Budget,
    Candidate,
    Demand,
    GatePolicy,
    Ordering,
    Pool,
    Rank,
    RequestView,
    Split,
    Step,
    Victim,
)
from vllm_ext.contract.aging import AGED_RANK, ages_at
from vllm_ext.contract.checks import require
from vllm_ext.systems.alise import SWAPPED, EstimatedWait, Preemptive
from vllm_ext.systems.system import System


@dataclass(frozen=True, kw_only=True)
class FixedForward(Budget):
    """Dynamic SplitFuse: long prompts are split over several steps, short ones fused to fill a step of fixed size.

    Decodes come first. The size does not depend on any objective, nor on what a step's contexts cost.

    Source: DeepSpeed-FastGen (arXiv 2401.08671), section 3: forward passes of a consistent size, where throughput
    saturates.
    """

    uses_predictions: ClassVar[bool] = False
    stall_free: ClassVar[bool] = True

    tokens: int = 0
    """Forward size in tokens; 0: the size at which throughput saturates (`RuntimeModel.pivot`)."""

    def __post_init__(self) -> None:
        require(self.tokens >= 0, "budget.tokens", self.tokens, "an integer of at least 0")

    def split(self, step: Step) -> Split:
        """Return the fixed size, and at least a token for everybody who decodes and one for a prompt."""
        return Split(tokens=max(self.tokens or step.runtime.pivot.tokens, step.decode_tokens + 1))


@dataclass(frozen=True, kw_only=True)
class SeparateBatches(Budget):
    """Let nobody decode in a step in which prompts are computed: prompts go first.

    Source: vLLM 0.2 (SOSP '23), where a batch held prompts or decodes.
    """

    uses_predictions: ClassVar[bool] = False

    def split(self, step: Step) -> Split:
        """Return that prompts and decodes do not share the step."""
        return Split(apart=True)


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


@dataclass(frozen=True, kw_only=True)
class WholePrompts(GatePolicy):
    """Let prompts join uncut: what is missing of one must fit into what the step's token budget leaves.

    A prompt longer than a step can ever hold joins as the only new one of its step, in chunks of the whole budget: with
    vLLM's ``--max-num-batched-tokens`` of at least ``--max-model-len`` there is none.

    Source: Sarathi-Serve, section 5.2 and Table 4, ablation "hybrid-batching-only"; this is how Orca and vLLM 0.2
    batch, and AccelGen's ablation /Chunk.
    """

    uses_predictions: ClassVar[bool] = False

    def gate(self, step: Step) -> _WholePromptsGate:
        """Return the gate of a step."""
        return _WholePromptsGate(step.token_budget, step.free_tokens)


class _WholePromptsGate:
    name = "whole_prompts"
    closed = False

    def __init__(self, most_tokens: int, free_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._free_tokens = free_tokens
        self._first = True

    def fits(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> bool:
        return demand.tokens <= self._free_tokens or (demand.tokens > self._most_tokens and self._first)

    def take(self, candidate: Candidate, demand: Demand, leaving: Sequence[Victim]) -> None:
        self._free_tokens -= demand.tokens
        self._first = False


@dataclass(frozen=True, kw_only=True)
class SkipJoin(Ordering):
    """Priority queues of doubling quantum; who used up a queue's quantum goes down one.

    A new request skips the queues whose quantum its first step would exceed: the time of its prefill is known. From
    there it is served for each queue's quantum in turn. What it was served so far is its prefill and one mean step per
    token. A request that waited ``starve_limit_s`` goes before all others, oldest first.

    Source: FastServe (arXiv 2305.05920), section 4.2: skip-join MLFQ, with a starvation limit. Its quanta come from the
    model's shortest step; promotion to the first queue there starts a new quantum, here it is kept while it runs.
    """

    uses_predictions: ClassVar[bool] = False

    num_levels: int = 5
    """Number of queues. Source: AccelGen's setting of FastServe, section 6.1."""
    base_quantum_s: float = 0.1
    """Quantum of the first queue, in seconds of service; each further one has twice that of the one before."""
    starve_limit_s: float = 30.0
    """Waiting time after which a request goes first, in seconds."""

    def __post_init__(self) -> None:
        require(self.num_levels >= 1, "ordering.num_levels", self.num_levels, "an integer of at least 1")
        for field in ("base_quantum_s", "starve_limit_s"):
            require(getattr(self, field) > 0, f"ordering.{field}", getattr(self, field), "seconds, greater than 0")

    def level(self, request: RequestView) -> int:
        """Return the queue of a request that did not starve, 0 (highest) to ``num_levels - 1``."""
        return self._level(request)[0]

    def _level(self, request: RequestView) -> tuple[int, float]:
        """Return the queue of a request, and what is left of its quantum in seconds."""
        level, quantum = 0, self.base_quantum_s
        while level < self.num_levels - 1 and quantum < request.prompt_s:
            level, quantum = level + 1, 2 * quantum
        served_s = request.prompt_s + request.num_output_tokens * request.step_stats.step_s
        while level < self.num_levels - 1 and served_s >= quantum:
            served_s -= quantum
            level, quantum = level + 1, 2 * quantum
        return level, quantum - served_s if level < self.num_levels - 1 else math.inf

    def rank(self, request: RequestView, now: float) -> Rank:
        """Return the place of ``request``: its queue, in order of arrival there."""
        if request.total_wait_s(now) >= self.starve_limit_s:
            return AGED_RANK
        level, left_s = self._level(request)
        ages_s = ages_at(request, self.starve_limit_s)
        used_up = request.num_output_tokens + max(1.0, left_s / request.step_stats.step_s)
        return Rank((float(level),), until_s=ages_s, until_tokens=used_up, older_only_s=ages_s, level=level)


ROWS = (
    System(
        name="orca",
        gates=(ReserveMaximum, WholePrompts),
        paper="Orca (OSDI '22)",
        summary="baseline: arrival order, the maximum length of each request reserved, whole prompts",
    ),
    System(
        name="vllm-2023",
        gates=(Watermark, WholePrompts),
        budget=SeparateBatches,
        parameters={"admission": {"watermark": 0.99}},
        paper="vLLM 0.2 (SOSP '23)",
        summary="baseline: arrival order, steps of prompts before steps of decodes",
    ),
    System(
        name="fastgen",
        budget=FixedForward,
        paper="DeepSpeed-FastGen (arXiv 2401.08671)",
        summary="baseline: forward passes of fixed size, prompts split and fused to fill them",
    ),
    System(
        name="fastserve",
        ordering=SkipJoin,
        admission=Preemptive,
        residency=EstimatedWait,
        parameters={"admission": {"priced": False}, "residency": {"choose": SWAPPED, "tier_bits": 16}},
        paper="FastServe (arXiv 2305.05920)",
        summary="baseline: skip-join multi-level feedback queues, preemptive",
    ),
)
