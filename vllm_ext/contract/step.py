"""One step as policies see it, and what they decide about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_ext.contract.request import RequestView, StepStats
from vllm_ext.contract.room import Candidate, Victim
from vllm_ext.step_time.runtime import RuntimeModel

Lengths = npt.NDArray[np.int64]
"""Of shape [requests], in tokens."""


class Batch(NamedTuple):
    """The requests that run or load KV as columns, each of shape [requests], in no particular order, in tokens."""

    tokens: Lengths
    """Sequence so far: prompt, computed or not, and generated tokens."""
    computed: Lengths
    """Tokens whose KV is held, or on its way."""
    generated: Lengths
    """Output tokens so far; one less of those who decode, whose last token is not computed yet."""
    max_tokens: Lengths
    """The client's bound on the output."""

    @property
    def bound(self) -> Lengths:
        """Longest each sequence may get by its client's bound."""
        return self.tokens - self.generated + self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The KV blocks of the device."""

    total: int
    """Blocks that requests can hold."""
    unused: int
    """Blocks that nobody holds."""
    free: int
    """Of these, what admissions may take: vLLM keeps its watermark while anything runs."""
    block_sizes: tuple[int, ...] = (16,)
    """Tokens of a block, by group of layers."""
    lookahead_tokens: int = 0
    """Slots that drafts take behind each sequence."""
    max_model_len: int = 1 << 62
    """Longest sequence."""

    @property
    def block_size(self) -> int:
        """Tokens of a block; of the smallest, where a model has several sizes."""
        return min(self.block_sizes)

    def blocks_for(self, num_tokens: int, *, drafts: bool = True) -> int:
        """Return the blocks of a sequence of so many tokens, nothing of it shared; cut at ``max_model_len``.

        Args:
            num_tokens: Its length.
            drafts: Whether slots for drafts are counted.
        """
        tokens = min(num_tokens + self.lookahead_tokens * drafts, self.max_model_len)
        return sum([-(-tokens // size) for size in self.block_sizes])

    def blocks_of(self, num_tokens: Lengths) -> int:
        """Return the blocks of several sequences, nothing of them shared."""
        tokens = np.minimum(num_tokens + self.lookahead_tokens, self.max_model_len)
        return sum([int((-(-tokens // size)).sum()) for size in self.block_sizes])


class Step(Protocol):
    """The scheduler's state before a step. What is iterated is made lazily: pay only for what is looked at."""

    @property
    def now(self) -> float:
        """Clock time, s."""
        ...

    @property
    def number(self) -> int:
        """Counts the engine's steps."""
        ...

    @property
    def token_budget(self) -> int:
        """Tokens of the step: vLLM's configured budget, or what the budget policy made of it, once it was asked."""
        ...

    @property
    def free_tokens(self) -> int:
        """Of these, what running requests, drafts included, and those that have loaded leave; may be negative."""
        ...

    @property
    def num_running(self) -> int:
        """Running requests."""
        ...

    @property
    def num_waiting(self) -> int:
        """Waiting requests, blocked ones included."""
        ...

    @property
    def num_prefilling(self) -> int:
        """Running requests with a part of their prompt still to compute."""
        ...

    @property
    def num_decoding(self) -> int:
        """Running requests whose prompt is computed."""
        ...

    @property
    def decode_tokens(self) -> int:
        """Tokens that the step takes for those who decode: one each, and the drafts to verify that there are."""
        ...

    @property
    def context_tokens(self) -> int:
        """Sum of the KV tokens held by running requests. Cost: one pass over them, in C."""
        ...

    @property
    def pool(self) -> Pool:
        """The KV blocks of the device."""
        ...

    @property
    def runtime(self) -> RuntimeModel:
        """How long steps take; its ``pivot`` is the step at which throughput saturates."""
        ...

    @property
    def step_stats(self) -> StepStats:
        """How fast the engine went lately."""
        ...

    @property
    def rng(self) -> np.random.Generator:
        """The scheduler's random generator, seeded by option ``seed``: the only randomness there is."""
        ...

    @property
    def memo(self) -> dict[str, Any]:
        """What policies note for later steps of this scheduler, under their own names; empty after a policy failed."""
        ...

    @property
    def changes(self) -> int:
        """Another number whenever a request began or ceased to run, or to wait."""
        ...

    def tbt_s(self, default_s: float) -> float:
        """Return the smallest TBT objective of the running requests, in seconds; nobody's loosens another's.

        One that the step's decodes break by themselves is lost, and counts as if it had not been named.

        Args:
            default_s: Objective of those that name none; inf if they have none. Cost: a pass over those who do.
        """
        ...

    def finished_lengths(self) -> Lengths:
        """Output lengths of the requests that finished last, ascending, shape [at most `GatePolicy.history`]."""
        ...

    def batch(self, without: Sequence[Victim] = ()) -> Batch:
        """Those who run or load KV, as columns; ``without`` those who would leave. Cost: one pass over them, in C."""
        ...

    def predicted_lengths(self, without: Sequence[Victim] = ()) -> Lengths:
        """Current estimates of their total output, in the order of `batch`, shape [requests]."""
        ...

    def prefilling(self) -> Sequence[RequestView]:
        """Running requests with a part of their prompt still to compute, best rank first."""
        ...

    def decoding(self) -> Iterator[RequestView]:
        """Running requests whose prompt is computed, in no particular order. Cost: a view of each that is looked at."""
        ...

    def waiting(self, but: Callable[[Candidate], bool] | None = None, *, past: int = 256) -> Iterator[Candidate]:
        """Waiting requests that could join now, best rank first; 32 at most.

        Args:
            but: Whom to leave out, so that they hide nobody behind them.
            past: So many are looked at for that at most, with those that are not left out. Cost: a call each.
        """
        ...

    def is_waiting(self, req_id: str) -> bool:
        """Say whether a request waits, for whatever reason."""
        ...

    def victims(self, behind: tuple[float, ...] = ()) -> Iterator[Victim]:
        """Running requests, worst rank first, asked for their ranks again; nobody while blocks come back.

        Args:
            behind: Key of a rank; the first one that does not come after it is the end.
        """
        ...

    def best_running(self) -> RequestView | None:
        """The running request of the best rank."""
        ...


def _check_ids(name: str, value: Any) -> None:
    """Raise TypeError unless a policy named requests by their ids: the step would fail while it applies the plan."""
    if not isinstance(value, tuple) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{name}={value!r}: must be a tuple of request ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How many tokens the step may take, and of what."""

    tokens: int | None = None
    """Tokens of the whole step; None leaves vLLM's setting, 0 makes an empty step."""
    prefill: bool = True
    """False: no prefill tokens in this step, as long as something decodes."""
    chunk: int | None = None
    """Most tokens that each running prompt gets, so that something is left for those who join; None: what there is."""
    apart: bool = False
    """True: whoever decodes sits this step out if anybody prefills or joins in it."""

    def __post_init__(self) -> None:
        # vLLM would carry a fraction on to its model runner.
        for name in ("tokens", "chunk"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r}: must be a whole number of tokens, or None")
        if self.chunk is not None and self.chunk < 0:
            raise ValueError(f"chunk={self.chunk!r}: must be at least 0")

    def budget(self, most: int) -> int:
        """Return the tokens of the step, where vLLM is configured for at most so many."""
        return most if self.tokens is None else max(0, min(self.tokens, most))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The whole decision for one step; made completely before anything is changed (invariant 2)."""

    split: Split = Split()
    admit: tuple[str, ...] | None = None
    """Waiting requests that may join, by id: exactly these, in this order. None leaves it to vLLM's own rule."""
    preempt: tuple[str, ...] = ()
    """Running requests to preempt, by id; a plan that preempts must name who is admitted."""
    ask: tuple[str, ...] = ()
    """Waiting requests, by id, of which a connector could not tell yet what KV it has: asked again, each before those
    admitted who rank behind it, and nobody's room is kept for them."""

    def __post_init__(self) -> None:
        if not isinstance(self.split, Split):
            raise TypeError(f"split={self.split!r}: a budget policy must return a Split")
        _check_ids("preempt", self.preempt)
        if self.admit is not None:
            _check_ids("admit", self.admit)
        elif self.preempt:
            raise ValueError(f"preempt={self.preempt!r}: a plan that preempts must name who is admitted")

    @property
    def restricts(self) -> bool:
        """Whether the plan keeps anything from being scheduled that vLLM might schedule."""
        return self.admit is not None or self.split != _UNRESTRICTED


_UNRESTRICTED = Split()
NO_PLAN = StepPlan()
