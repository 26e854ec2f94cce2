"""Snapshots handed to policies.

A view holds what a client may know and what was predicted. It never holds the true output length, nor any reference
to an object from which it could be read (invariant 1): every field is a plain value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vllm_ext.hints import NO_HINTS, RequestHints
from vllm_ext.prediction.runtime import Pivot, RuntimeModel
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.slo import NO_SLO, Slo


class Pace(NamedTuple):
    """How fast the engine went lately: what estimates of a request's progress among others rest on."""

    step_s: float = 0.02
    """Mean duration of a step, in seconds."""
    longest_step_s: float = 0.02
    """Duration that 19 of 20 recent steps stayed below, in seconds: AccelGen's T_max, without its outliers."""
    chunk_tokens: float = 512.0
    """Mean number of prompt tokens computed by steps that computed any: AccelGen's mean chunk."""
    preemption_s: float = 0.0
    """Seconds lost to preemptions per generated token: their frequency times the longest recent wait for the seat."""


NO_PACE = Pace()


class Batch(NamedTuple):
    """The running requests as columns, each of shape [running], in no particular order. Lengths are tokens."""

    tokens: npt.NDArray[np.int64]
    """Sequence so far: prompt, computed or not, and generated tokens."""
    computed: npt.NDArray[np.int64]
    """Tokens whose KV is held."""
    generated: npt.NDArray[np.int64]
    """Output tokens so far; one less of those who decode, whose last token is not computed yet."""
    max_tokens: npt.NDArray[np.int64]
    """The client's bound on the output."""


class RequestView(NamedTuple):
    """One request at one moment. Times are seconds of the scheduler's clock, lengths are tokens."""

    req_id: str
    arrival_time: float
    """When the scheduler received the request."""
    num_prompt_tokens: int
    num_output_tokens: int = 0
    """Tokens generated so far."""
    num_computed_tokens: int = 0
    """Tokens whose KV is held; 0 after a preemption."""
    max_tokens: int = 1
    """The client's bound on the output. A bound, not a prediction."""
    priority: int = 0
    """vLLM's ``priority``: lower goes first."""
    hints: RequestHints = NO_HINTS
    predicted_output_tokens: int = 1
    """Current estimate of the total output, after doublings."""
    num_demotions: int = 0
    """How often the request outlived its estimate."""
    predicted_remaining_s: float = 0.0
    """Estimated time to the last token, were the request to run from now on (ALISE eqs. 3-5)."""
    recompute_s: float = 0.0
    """Estimated time to rebuild the KV that a preemption would drop."""
    waiting_since: float | None = None
    """Start of the current wait; None while running."""
    waited_s: float = 0.0
    """Total of the waits that ended before."""
    num_preemptions: int = 0
    progress_tokens: int = 0
    """Output tokens since the request was last admitted."""
    num_blocks: int = 0
    """Running: KV blocks a preemption would free. Waiting: KV blocks needed to admit it."""
    slo: Slo = NO_SLO
    """Objectives: the client's, else its class's, else the configured defaults."""
    missed: bool = False
    """Whether an objective was missed already: the first token came late, or a wait in between took too long."""
    prefill_s: float = 0.0
    """Estimated time to compute what is missing of the sequence, alone on the engine; part of the remaining time."""
    prompt_s: float = 0.0
    """The same for the whole prompt, computed or not."""
    pace: Pace = NO_PACE
    restore_s: float = 0.0
    """Estimated time until a preempted request has its KV back: computed again, or with a KV tier copied out and in,
    which is looked at in `StepView.running_worst_first` only."""
    stall_s: float = 0.0
    """The part of it in which nobody else is served; all of it where KV is computed again."""

    @property
    def num_tokens(self) -> int:
        """Length of the sequence so far: prompt and generated tokens."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def bound_tokens(self) -> int:
        """Longest the sequence may get by the client's bound."""
        return self.num_prompt_tokens + self.max_tokens

    def total_wait_s(self, now: float) -> float:
        """Seconds this request has spent waiting, the current wait included."""
        return self.waited_s + (now - self.waiting_since if self.waiting_since is not None else 0.0)


class StepView(Protocol):
    """The scheduler's state before a step. Sequences are produced lazily: pay only for what is looked at."""

    @property
    def now(self) -> float:
        """Clock time, s."""
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
    def max_running(self) -> int:
        """Sequence cap (``max_num_seqs`` or the active cap if lower)."""
        ...

    @property
    def token_budget(self) -> int:
        """vLLM's configured budget of tokens for one step."""
        ...

    @property
    def num_free_tokens(self) -> int:
        """Tokens of the budget that running requests, drafts included, leave for admissions; may be negative."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """KV blocks free for admissions, the watermark already taken off."""
        ...

    @property
    def num_total_blocks(self) -> int:
        """KV blocks of the whole pool, those in use included."""
        ...

    @property
    def num_prefilling(self) -> int:
        """Running requests with a part of their prompt still to compute."""
        ...

    @property
    def number(self) -> int:
        """Counts the engine's steps."""
        ...

    @property
    def num_decoding(self) -> int:
        """Running requests whose prompt is computed."""
        ...

    @property
    def decode_tokens(self) -> int:
        """Tokens that the step takes for those who decode: one each, and drafts to verify if anything speculates."""
        ...

    @property
    def context_tokens(self) -> int:
        """Sum of the KV tokens held by running requests. Cost: one pass over them, in C."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; of the smallest, where a model has several sizes."""
        ...

    @property
    def num_unused_blocks(self) -> int:
        """KV blocks that nobody holds, the watermark not taken off."""
        ...

    @property
    def runtime(self) -> RuntimeModel:
        """How long steps take."""
        ...

    @property
    def pace(self) -> Pace:
        """How fast the engine went lately."""
        ...

    @property
    def pivot(self) -> Pivot:
        """The step at which throughput saturates: measured by ``vllm-ext profile``, else made of the runtime model."""
        ...

    def tbt_s(self, default_s: float) -> float:
        """Return the smallest TBT objective of the running requests, in seconds; nobody's loosens another's.

        Args:
            default_s: Objective of those that name none; inf if they have none. Cost: a pass over those who do.
        """
        ...

    @property
    def rng(self) -> np.random.Generator:
        """The scheduler's random generator, seeded by option ``seed``."""
        ...

    @property
    def membership(self) -> int:
        """Another number whenever a request began or ceased to run."""
        ...

    @property
    def queue_changes(self) -> int:
        """Another number whenever a request began or ceased to wait."""
        ...

    @property
    def notes(self) -> dict[str, Any]:
        """What policies note for later steps of this scheduler, under their own names; empty after a policy failed."""
        ...

    def finished_lengths(self) -> npt.NDArray[np.int64]:
        """Output lengths of the requests that finished last, ascending, shape [at most the policy's window]."""
        ...

    def batch(self) -> Batch:
        """The running requests as columns. Cost: one pass over them, in C."""
        ...

    def predicted_lengths(self) -> npt.NDArray[np.int64]:
        """Current estimates of the running requests' total output, in the order of `batch`, shape [running]."""
        ...

    def cached_blocks_in_use(self, request: RequestView) -> int:
        """KV blocks of a waiting request that others hold already: it would share them. Cost: one look-up a block."""
        ...

    def prefilling(self) -> Sequence[RequestView]:
        """Running requests with a part of their prompt still to compute, best rank first."""
        ...

    @property
    def admission(self) -> AdmissionPlan:
        """What the admission policy decided for this step; the budget policy is asked second."""
        ...

    def blocks_for(self, num_tokens: int) -> int:
        """KV blocks that a sequence of so many tokens takes, nothing of it shared; cut at ``max_model_len``."""
        ...

    def blocks_at_bound(self, min_tokens: int = 0) -> int:
        """KV blocks that all who hold KV take once each is as long as its bound, and at least ``min_tokens``.

        That much must stay reserved so that none is ever preempted. Cost: one pass over them.
        """
        ...

    def decoding(self) -> tuple[str, ...]:
        """Ids of the running requests whose prompt is computed. Cost: one pass over the running requests."""
        ...

    def waiting(self) -> Iterator[RequestView]:
        """Waiting requests that could be admitted now, best rank first."""
        ...

    def running_worst_first(self) -> Iterator[RequestView]:
        """Running requests, worst rank first."""
        ...

    def running_best(self) -> RequestView | None:
        """The running request of the best rank."""
        ...

    def level_of(self, request: RequestView) -> int:
        """The level of a waiting request's rank; `AGED` if it waited so long that only older ones go before it."""
        ...

    def goes_before(self, first: RequestView, second: RequestView) -> bool:
        """Whether the ordering puts ``first`` before ``second``."""
        ...
