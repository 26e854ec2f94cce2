"""One request as policies see it, and its place in the order.

A view holds what a client may know and what was predicted. It never holds the true output length, nor any reference
to an object from which it could be read (invariant 1): every field is a plain value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from vllm_ext.contract.length_distribution import LengthDistribution
from vllm_ext.contract.objective import NO_SLO, Slo
from vllm_ext.hints import NO_HINTS, RequestHints

AGED = -1
"""Level of requests that waited so long that only older ones go before them."""

NO_DISTRIBUTION = LengthDistribution.point(1)
_NUMBERS = (float, int)


class Rank(NamedTuple):
    """Place of a request in the order: the lowest ``key`` goes first; ties end in arrival, then id.

    A rank holds until something about the request changes, the clock reaches ``until_s``, or the request has generated
    ``until_tokens``: nothing is computed again for requests that merely wait, nor for those that run meanwhile.
    """

    key: tuple[float, ...]
    until_s: float = math.inf
    """Clock time from which the rank must be asked for again, in seconds."""
    until_tokens: float = math.inf
    """Output length from which it must be asked for again: the next queue is reached, an estimate outlived."""
    older_only_s: float = math.inf
    """Clock time from which only older requests go before a waiting one, in seconds: then it is not passed."""
    level: int = 0
    """Queue the request counts into, for metrics."""
    cost: float = 0.0
    """Above 0, where the ordering ages (`Ordering.ageing`): requests of equal key compete by cost over a power of their
    waiting, and a rank with a cost and one without must differ in their keys. 0: none."""
    presses: bool = False
    """Of a waiting request: whether it must run soon to keep an objective that can still be kept."""


def check_rank(rank: Rank) -> None:
    """Raise TypeError or ValueError unless a policy's rank holds numbers only: anything else breaks the queue later."""
    for name in ("until_s", "until_tokens", "older_only_s"):
        value = getattr(rank, name)
        if value != value:
            raise ValueError(f"{rank}: {name} must not be NaN")
    if not 0 <= rank.cost < math.inf:
        raise ValueError(f"{rank}: cost must be finite and not below 0")
    for part in rank.key:
        if not isinstance(part, _NUMBERS):
            raise TypeError(f"{rank}: the key must consist of numbers")
        if part != part:
            raise ValueError(f"{rank}: the key must not hold NaN")


class Origin(NamedTuple):
    """What may tell whose request it is; empty where nothing was said."""

    tag: str = ""
    """The client's name of its application or tenant."""
    salt: str = ""
    """vLLM's ``cache_salt``."""
    adapter: str = ""
    """Name of the LoRA adapter."""
    key: str = ""
    """Hash of the API key, from the front end."""


class Ageing(NamedTuple):
    """How waiting counts against cost: score = cost / (now - arrival + ``grace_s``) ** ``power``, the least goes first.

    Two scores may change places as both wait, but of two requests of one cost the older always stays ahead. One of cost
    c yields to newcomers of cost d only until it has waited about ``grace_s`` * (c / d) ** (1 / ``power``).
    """

    power: float
    """Above 0: the greater, the nearer to the order of arrival."""
    grace_s: float = 1.0
    """Waiting that everybody is taken to have behind it, in seconds, above 0."""

    def score(self, cost: float, waited_s: float) -> float:
        """Return what decides between requests that have waited differently long, in seconds."""
        return float(cost / (max(waited_s, 0.0) + self.grace_s) ** self.power)


class AgeLimit(NamedTuple):
    """Until when others may go before a request by their rank: the bound on what the worst ranked waits for.

    Where ``share`` of a client's admissions go to the oldest of its requests that have waited ``limit_s``, each of
    these waits at most as long as it takes to admit, for every older one and for itself, 1 / ``share`` requests.
    """

    limit_s: float
    """In seconds since arrival, at least 0."""
    share: float
    """Above 0, at most 1: then they go before all others."""


class StepStats(NamedTuple):
    """How fast the engine went lately: what estimates of a request's progress among others rest on."""

    step_s: float = 0.02
    """Mean duration of a step, in seconds."""
    longest_step_s: float = 0.02
    """Duration that 19 of 20 recent steps stayed below, in seconds: AccelGen's T_max, without its outliers."""
    chunk_tokens: float = 512.0
    """Mean number of prompt tokens computed by steps that computed any: AccelGen's mean chunk."""
    preemption_s: float = 0.0
    """Seconds lost to preemptions per generated token: their frequency times the longest recent wait for the seat."""


NO_STEP_STATS = StepStats()


class Server(NamedTuple):
    """What a request's share of the engine is measured against."""

    max_num_seqs: int = 256
    """Seats."""
    kv_tokens: int = 1 << 18
    """Tokens whose KV the device holds."""
    prefill_steps: float = 0.01
    """Decode steps of a full batch that the computation of one prompt token takes as long as."""


NO_SERVER = Server()


class RequestView(NamedTuple):
    """One request at one moment. Times are seconds of the scheduler's clock, lengths are tokens."""

    req_id: str
    arrival_time: float
    """When the scheduler received the request."""
    num_prompt_tokens: int
    num_output_tokens: int = 0
    """Tokens generated so far."""
    num_computed_tokens: int = 0
    """Tokens whose KV it holds; 0 after a preemption."""
    max_tokens: int = 1
    """The client's bound on the output. A bound, not a prediction."""
    priority: int = 0
    """vLLM's ``priority``: lower goes first, before any rank; 0 without ``--scheduling-policy priority``."""
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
    slo: Slo = NO_SLO
    """Objectives: the client's, else its class's, else the configured defaults."""
    missed: bool = False
    """Whether an objective was missed already: the first token came late, or a wait in between took too long."""
    prefill_s: float = 0.0
    """Estimated time to compute what is missing of the sequence, alone on the engine; part of the remaining time."""
    prompt_s: float = 0.0
    """The same for the whole prompt, computed or not."""
    step_stats: StepStats = NO_STEP_STATS
    distribution: LengthDistribution = NO_DISTRIBUTION
    """Law of the total output length, as it was predicted: nothing generated is taken off."""
    server: Server = NO_SERVER
    cached_tokens: int = 0
    """Of a waiting request: tokens at its front that the prefix cache or the host tier has, which need no computing."""

    @property
    def num_tokens(self) -> int:
        """Length of the sequence so far: prompt and generated tokens."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def missing_tokens(self) -> int:
        """Tokens of the sequence that are still to compute; what is cached is not."""
        return self.num_tokens - max(self.num_computed_tokens, self.cached_tokens)

    @property
    def bound_tokens(self) -> int:
        """Longest the sequence may get by the client's bound."""
        return self.num_prompt_tokens + self.max_tokens

    def total_wait_s(self, now: float) -> float:
        """Seconds this request has spent waiting, the current wait included."""
        return self.waited_s + (now - self.waiting_since if self.waiting_since is not None else 0.0)
