"""A workload, as data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_ext.config.model import Flag
from vllm_ext.contract.objective import Slo

_CONFIG = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
Arrivals = Literal["poisson", "gamma", "recorded", "closed-loop", "at-once"]


class SourceSpec(BaseModel):
    """Where lengths (and texts, shared prefixes, recorded arrivals) come from, and how they are changed."""

    model_config = _CONFIG

    source: Annotated[str, Flag("--dataset --source")] = "sharegpt-like"
    """A preset of lengths, or a file."""
    format: Annotated[str, Flag()] = "auto"
    """Of a file: one of `vllm_ext.datasets.FORMATS`."""
    where: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Of a file: keep rows whose field is, or is a list containing, one of the values."""
    sample: Literal["file-order", "without-replacement", "with-replacement"] = "file-order"
    """Of a file: take rows in order, or draw them at random. Only with replacement do they never run out."""
    pool: tuple[int, int] | None = None
    """Of a file: take only rows from the first number to before the second, counted after the filters; None: all."""
    conversations: bool = False
    """Of a ``sharegpt`` file: serve all turns of a conversation, not only the first."""
    min_turns: int = Field(default=1, ge=1)
    """Of conversations: leave out those with fewer turns."""
    max_turns: int | None = Field(default=None, ge=1)
    """Of conversations: end them after so many turns."""
    prompts_from: str | None = None
    """Of a file without prompts (``lmsys``): a preset or file whose prompt lengths are drawn at random instead."""
    tokenizer: Annotated[str | None, Flag()] = None
    """Folder of a Hugging Face tokenizer that counts the tokens of texts; None: they are estimated, 4 ASCII characters
    or 1 other to a token."""
    skip_bad_rows: Annotated[bool, Flag()] = False
    """Of a file: leave out rows that cannot be read, and say how many; otherwise they are an error."""
    keep_text: bool = False
    """Hand on the prompt's text (of a turn: what the user adds), for predictors that read it."""
    scale_prompt: float = Field(default=1.0, gt=0)
    """Factor on prompt lengths; results are rounded, at least 1. Blocks of shared prefixes are scaled too."""
    scale_output: float = Field(default=1.0, gt=0)
    """Factor on output lengths."""
    min_prompt_tokens: int = Field(default=1, ge=1)
    """Leave out requests (of conversations: all of one, by its first turn) with a shorter prompt, after scaling."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Leave out those with a longer prompt."""
    min_output_tokens: int = Field(default=1, ge=1)
    max_output_tokens: int | None = Field(default=None, ge=1)
    cap_prompt_tokens: int | None = Field(default=None, ge=1)
    """Cut longer prompts to this, before they are filtered."""
    cap_output_tokens: int | None = Field(default=None, ge=1)
    """Cut longer outputs to this, before they are filtered."""

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> SourceSpec:
        for kind in ("prompt", "output"):
            low, high = getattr(self, f"min_{kind}_tokens"), getattr(self, f"max_{kind}_tokens")
            if high is not None and low > high:
                raise ValueError(f"min_{kind}_tokens={low}: must be at most max_{kind}_tokens={high}")
        if self.pool is not None and not 0 <= self.pool[0] < self.pool[1]:
            raise ValueError(f"pool={self.pool}: must be two ascending numbers of at least 0")
        if self.max_turns is not None and self.max_turns < self.min_turns:
            raise ValueError(f"max_turns={self.max_turns}: must be at least min_turns={self.min_turns}")
        return self


class MixPart(SourceSpec):
    """One of several sources."""

    weight: float = Field(default=1.0, gt=0)
    """Share of the requests (conversations) that come from here, relative to the other parts' weights."""
    tier: str | None = None
    """Name of the tier all of them belong to; None: drawn by the tiers' shares."""


class SloTarget(BaseModel):
    """An objective: ``(base_s + per_prompt_token_s * prompt, or bucket_s) * U[low, high]``, in seconds."""

    model_config = _CONFIG

    base_s: float = Field(default=0.0, ge=0)
    per_prompt_token_s: float = Field(default=0.0, ge=0)
    bucket_tokens: int = Field(default=1, ge=1)
    """Prompt lengths are rounded up to a multiple of this; AccelGen: 512."""
    bucket_s: tuple[float, ...] = ()
    """Objective of prompts in the first bucket, in the second, ...; longer prompts get the last one in proportion to
    their buckets. Added to the other terms."""
    low: float = Field(default=1.0, gt=0)
    high: float = Field(default=1.0, gt=0)
    """Every request draws its own factor between ``low`` and ``high``."""

    @model_validator(mode="after")
    def _is_positive(self) -> SloTarget:
        if self.low > self.high:
            raise ValueError(f"low={self.low}: must be at most high={self.high}")
        if not (self.base_s > 0 or self.per_prompt_token_s > 0 or self.bucket_s) or any(s <= 0 for s in self.bucket_s):
            raise ValueError("base_s, per_prompt_token_s, bucket_s: one of them must be greater than 0")
        return self

    def seconds(self, prompt_tokens: int, uniform: float) -> float:
        """Return the objective of a request; ``uniform`` in [0, 1) chooses the factor."""
        buckets = -(-prompt_tokens // self.bucket_tokens)
        value = self.base_s + self.per_prompt_token_s * buckets * self.bucket_tokens
        if table := self.bucket_s:
            value += table[min(buckets, len(table)) - 1] * max(1.0, buckets / len(table))
        return value * (self.low + (self.high - self.low) * uniform)


class TierSpec(BaseModel):
    """A class of service: who belongs to it, and what they expect."""

    model_config = _CONFIG

    name: str = Field(min_length=1)
    share: float = Field(default=1.0, ge=0)
    """Of the requests (conversations), relative to the other tiers' shares."""
    priority: int = 0
    """vLLM's priority: lower goes first."""
    ttft: SloTarget | None = None
    """Arrival to first token."""
    tbt: SloTarget | None = None
    """Every gap between tokens."""
    e2e: SloTarget | None = None
    """Arrival to last token."""

    def slo(self, prompt_tokens: int, uniforms: tuple[float, float, float]) -> Slo:
        """Return the objectives of a request; a number in [0, 1) chooses the factor of each."""
        targets = zip((self.ttft, self.tbt, self.e2e), uniforms, strict=True)
        seconds = [None if target is None else target.seconds(prompt_tokens, uniform) for target, uniform in targets]
        return Slo(**dict(zip(("ttft_s", "tbt_s", "e2e_s"), seconds, strict=True)))


class WorkloadSpec(SourceSpec):
    """Lengths, arrivals, clients and what they expect."""

    mix: tuple[MixPart, ...] = ()
    """Several sources instead of the one that the fields of `SourceSpec` describe."""

    arrivals: Annotated[Arrivals, Flag()] = "poisson"
    """When requests come."""
    rate_per_s: Annotated[float | None, Flag("--rate")] = Field(default=1.0, gt=0)
    """Mean arrivals per second. ``recorded``: None (default) keeps the recorded times; a rate is that of the part which
    ``num_requests`` and ``duration_s`` take. Others than these, ``poisson`` and ``gamma`` have no rate."""
    rate_counts: Literal["sessions", "requests"] = "sessions"
    """Conversations: whether ``rate_per_s`` is of their first turns, or of all turns expected (Pensieve's)."""
    cv: float = Field(default=1.0, ge=1e-3, le=1e3)
    """``gamma``: coefficient of variation of the gaps between arrivals."""
    clients: Annotated[int, Flag()] = Field(default=1, ge=1)
    """``closed-loop``: how many send their next request when the last has ended and they have thought."""
    think_s: float | None = Field(default=None, ge=0)
    """``closed-loop`` and conversations: mean time from an end to the client's next request. None: the preset's, or 0
    for a closed loop of single requests."""
    think: Literal["constant", "exponential"] = "exponential"
    duration_s: Annotated[float | None, Flag("--duration")] = Field(default=None, gt=0)
    """Nobody starts a request or a conversation at this time, in seconds, or later; ``recorded``: as it was recorded,
    whatever the rate."""
    num_requests: Annotated[int | None, Flag()] = Field(default=None, ge=0)
    """How many requests start; of conversations, how many conversations. None: ``duration_s`` or the file ends it."""
    skip_requests: int = Field(default=0, ge=0)
    """So many at the beginning of the source are left out; those after them are served as if the source began there."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Context of the model; None: `build` is told, or it is left to the run."""
    over_context: Literal["drop", "cut"] = "drop"
    """Prompt and output longer than the context: ``drop`` leaves the request out, and a conversation ends there;
    ``cut`` shortens the prompt, of a conversation by its oldest turns."""
    max_tokens: int | Literal["cap", "exact"] = "cap"
    """The client's bound on the output: a number, the context less the prompt, or the true length (which gives it away
    to every policy that reads ``max_tokens``)."""
    system_prompt_tokens: int = Field(default=0, ge=0)
    """Tokens that every prompt begins with, the same for all, in addition to its own length."""
    announce: Literal["none", "hint", "hidden", "predicted"] = "none"
    """``hint``: clients say as ``osl`` how long they expect the output to be, with ``announce_error``. ``hidden``: the
    true length lies where only systems marked ``oracle`` read it. ``predicted``: what a predictor said beforehand, in
    the file's ``output_quantiles``, reaches the scheduler as its own predictor's answer would, without delay."""
    announce_error: float = Field(default=0.0, ge=0)
    """Mean of ``|osl / true length - 1|``; errors are log-normal with median 1."""
    announce_slo: Annotated[bool, Flag()] = False
    """Clients say their own objectives as ``ttft_slo_ms``, ``tbt_slo_ms`` and ``jct_slo_ms``, beside what ``announce``
    adds; False: they only judge the run."""
    tiers: tuple[TierSpec, ...] = ()
    """Classes of service; none: one without a name and without objectives."""
    abort_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the requests whose client disconnects if it still waits ..."""
    abort_mean_s: float | None = Field(default=None, gt=0)
    """... after an exponential time with this mean."""
    patience_s: float | None = Field(default=None, gt=0)
    """Clients disconnect if their request has no token this long after its arrival: a server's time limit on waiting,
    or impatience. None: they wait."""
    seed: Annotated[int, Flag()] = Field(default=0, ge=0)
    """Of lengths and arrivals."""

    @model_validator(mode="before")
    @classmethod
    def _no_rate_unless_given(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("arrivals", "poisson") not in ("poisson", "gamma"):
            return {"rate_per_s": None, **data}
        return data

    @model_validator(mode="after")
    def _fits_together(self) -> WorkloadSpec:
        if problem := next(itertools.chain(self._arrival_problems(), self._problems(), self._tier_problems()), None):
            raise ValueError(problem)
        return self

    def served(self, output_tokens: int) -> int:
        """Return how much of an output a constant bound of the client lets through."""
        return min(output_tokens, self.max_tokens) if isinstance(self.max_tokens, int) else output_tokens

    def _arrival_problems(self) -> Iterator[str]:
        kind, rate = self.arrivals, self.rate_per_s
        if kind in ("poisson", "gamma") and rate is None:
            yield f"rate_per_s=None: must be a number greater than 0 for arrivals={kind!r}"
        if kind in ("closed-loop", "at-once") and rate is not None:
            yield f"rate_per_s={rate}: must be left out for arrivals={kind!r}, which has no rate"
        if kind == "recorded" and self.mix:
            yield "arrivals='recorded': must not be used with mix; no common clock is known"
        if kind == "recorded" and (self.sample != "file-order" or self.conversations):
            yield "arrivals='recorded': needs sample='file-order' and conversations=false"
        for name, value, needs in (("cv", self.cv, "gamma"), ("clients", self.clients, "closed-loop")):
            if value != 1 and kind != needs:
                yield f"{name}={value}: needs arrivals={needs!r}, found {kind!r}"

    def _problems(self) -> Iterator[str]:
        for name in SourceSpec.model_fields if self.mix else ():
            if (value := getattr(self, name)) != getattr(SourceSpec(), name):
                yield f"{name}={value!r}: must be set in each part of mix, not beside it"
        if isinstance(self.max_tokens, int) and self.max_tokens < 1:
            yield f"max_tokens={self.max_tokens}: must be at least 1, 'cap' or 'exact'"
        if (context := self.max_model_len) is not None and context - self.system_prompt_tokens < 2:
            system = self.system_prompt_tokens
            yield f"system_prompt_tokens={system}: must leave at least 2 tokens of max_model_len={context}"
        if self.announce_error and self.announce != "hint":
            yield f"announce_error={self.announce_error}: needs announce='hint', found {self.announce!r}"
        if (self.abort_share > 0) != (self.abort_mean_s is not None):
            yield f"abort_share={self.abort_share}, abort_mean_s={self.abort_mean_s}: must be given together"

    def _tier_problems(self) -> Iterator[str]:
        names = [tier.name for tier in self.tiers]
        if len(set(names)) < len(names):
            yield f"tiers: names must differ, found {names}"
        if self.tiers and not any(tier.share for tier in self.tiers):
            yield "tiers: share must be greater than 0 for at least one of them"
        if self.announce_slo and not any(tier.ttft or tier.tbt or tier.e2e for tier in self.tiers):
            yield "announce_slo=True: needs tiers, one of them with an objective (ttft, tbt or e2e)"
        for part in self.mix:
            if part.tier is not None and part.tier not in names:
                yield f"tier={part.tier!r} of a part of mix: must be one of {names}"
