"""Workloads of our own making, for runs that have no data file: lengths distributed like those of public data sets.

The rows have lengths only, no text. Prompt and output lengths are independent of each other, which those of real
traffic are not quite. What each preset was fitted to stands in its ``source``; where that is a mean, the median is the
one whose lengths have it once they are cut.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ext.datasets import Dataset, WorkloadRow

_CHUNK = 1024
"""Conversations drawn at once: a part of what a seed means."""
_K = 1024
_P90_IN_SIGMAS = 1.2815515655446004
"""90th percentile of the standard normal distribution."""
_FIXED = re.compile(r"fixed:([1-9]\d{0,8}):([1-9]\d{0,8})")


class Lengths(ABC):
    """A distribution of lengths in tokens."""

    @abstractmethod
    def _unrounded(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]: ...

    def draw(self, rng: np.random.Generator, count: int, max_tokens: int) -> list[int]:
        """Draw whole lengths between 1 and ``max_tokens``."""
        lengths: list[int] = np.clip(np.rint(self._unrounded(rng, count)), 1, max_tokens).astype(np.int64).tolist()
        return lengths


@dataclass(frozen=True, kw_only=True)
class LengthShape(Lengths):
    """Log-normal lengths by their median and 90th percentile, in tokens."""

    median: float
    p90: float

    def _unrounded(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        sigma = np.log(self.p90 / self.median) / _P90_IN_SIGMAS
        return np.exp(rng.normal(np.log(self.median), sigma, size=count))


@dataclass(frozen=True, kw_only=True)
class UniformLengths(Lengths):
    """Lengths equally likely from ``low`` to ``high``, both included, in tokens."""

    low: int
    high: int

    def _unrounded(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return rng.integers(self.low, self.high + 1, size=count).astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class FixedLength(Lengths):
    """Always the same length, in tokens; the generator is not touched."""

    tokens: int

    def _unrounded(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:  # noqa: ARG002 - as any shape's
        return np.full(count, self.tokens, dtype=np.float64)


@dataclass(frozen=True, kw_only=True)
class AtMost(Lengths):
    """Lengths of another distribution, cut to ``tokens`` where the preset cuts later."""

    lengths: Lengths
    tokens: int

    def _unrounded(self, rng: np.random.Generator, count: int) -> NDArray[np.float64]:
        return np.minimum(self.lengths._unrounded(rng, count), self.tokens)


@dataclass(frozen=True, kw_only=True)
class Turns:
    """Number of turns of a conversation: 1 + a negative binomial number, geometric where ``shape`` is 1."""

    mean: float
    """Mean number of turns, greater than 1."""
    shape: float = 1.0
    """Below 1: more conversations of one turn and more very long ones than a geometric distribution has."""

    def draw(self, rng: np.random.Generator, count: int) -> list[int]:
        """Draw numbers of turns, at least 1."""
        further = self.mean - 1
        turns: list[int] = (1 + rng.negative_binomial(self.shape, self.shape / (self.shape + further), count)).tolist()
        return turns

    def mean_of_at_least(self, least: int, most: int | None = None) -> float:
        """Return the mean number of turns of the conversations that have at least ``least``, cut after ``most``."""
        probabilities = self._probabilities()
        below, below_total = 0.0, 0.0
        for turns, probability in itertools.islice(probabilities, least - 1):
            below += probability
            below_total += probability * turns
        if most is None:
            return (self.mean - below_total) / (1 - below)
        short, total = below, 0.0
        for turns, probability in itertools.islice(probabilities, most - least):
            short += probability
            total += probability * turns
        return (total + (1 - short) * most) / (1 - below)

    def _probabilities(self) -> Iterator[tuple[int, float]]:
        first, ratio = self.shape / (self.shape + self.mean - 1), (self.mean - 1) / (self.shape + self.mean - 1)
        probability = first**self.shape
        for further in itertools.count():
            yield 1 + further, probability
            probability *= ratio * (self.shape + further) / (1 + further)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Prompt and output lengths of a kind of traffic."""

    prompt: Lengths
    """Prompt lengths; of a conversation, what the user adds in a turn."""

    output: Lengths
    """Output lengths."""

    max_tokens: int
    """Cut for both, in tokens."""

    max_total_tokens: int | None = None
    """Prompts are cut so that prompt and output together stay within this."""

    turns: Turns | None = None
    """How many turns a conversation has; None: every request stands alone."""

    think_s: float | None = None
    """Conversations: mean time from the end of an answer to the next turn, in seconds."""

    source: str = ""
    """What the numbers were fitted to."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[list[int], list[int]]:
        """Draw prompt and output lengths of ``count`` requests or turns."""
        prompts = self.prompt.draw(rng, count, self.max_tokens)
        outputs = self.output.draw(rng, count, self.max_tokens)
        if (total := self.max_total_tokens) is not None:
            prompts = [max(1, min(p, total - o)) for p, o in zip(prompts, outputs, strict=True)]
        return prompts, outputs

    def sessions(
        self, lengths_rng: np.random.Generator, turns_rng: np.random.Generator
    ) -> Iterator[list[tuple[int, int]]]:
        """Yield prompt and output lengths of a session's turns, without end."""
        while True:
            turns = [1] * _CHUNK if self.turns is None else self.turns.draw(turns_rng, _CHUNK)
            pairs = zip(*self.draw(lengths_rng, sum(turns)), strict=True)
            for count in turns:
                yield list(itertools.islice(pairs, count))


def _log_normal(
    prompt: tuple[float, float], output: tuple[float, float], max_tokens: int, source: str, **more: Any
) -> Preset:
    """Return a preset by median and 90th percentile of prompt and output lengths."""
    shapes = [LengthShape(median=median, p90=p90) for median, p90 in (prompt, output)]
    return Preset(prompt=shapes[0], output=shapes[1], max_tokens=max_tokens, source=source, **more)


def _uniform(prompt: tuple[int, int], output: tuple[int, int], source: str) -> Preset:
    """Return a preset by the ranges of prompt and output lengths."""
    shapes = [UniformLengths(low=low, high=high) for low, high in (prompt, output)]
    return Preset(prompt=shapes[0], output=shapes[1], max_tokens=max(prompt[1], output[1]), source=source)


_SPREAD_OF = "means of vLLM (SOSP'23), figure 11, which gives no dispersion: P90 over median as in"
_TABLE_2 = "median and P90 of Sarathi-Serve, table 2; total capped at {} as there, by cutting the prompt"

PRESETS = {
    "alpaca-like": _log_normal(
        (15, 28), (48, 149), 1024, "median and P90 of public Alpaca texts, in words times 4/3"
    ),
    "sharegpt-like": _log_normal(
        (17, 155), (232, 485), 2048,
        "median and P90 of first exchanges of public ShareGPT conversations, in words times 4/3",
    ),
    "alpaca-vllm": _log_normal(
        (17.150441057887136, 32.01415664138932), (39.57069687918219, 122.83403822912803), 1024,
        f"{_SPREAD_OF} alpaca-like",
    ),
    "sharegpt-vllm": _log_normal(
        (43.98746677034766, 401.0621970237581), (286.51691095644003, 598.9685423011786), 2048,
        f"{_SPREAD_OF} sharegpt-like",
    ),
    "openchat-sharegpt4": _log_normal(
        (1730, 5696), (415, 834), 8191, _TABLE_2.format(8192), max_total_tokens=8192
    ),
    "arxiv-summarization": _log_normal(
        (7059, 12985), (208, 371), 16383, _TABLE_2.format(16384), max_total_tokens=16384
    ),
    "distribution-1": _uniform(
        (32, 4 * _K), (2 * _K, 4 * _K), "Past-Future, table 1: uniform 32-4k in, 2k-4k out; k read as 1024"
    ),
    "distribution-2": _uniform(
        (3 * _K, 5 * _K), (3 * _K, 5 * _K), "Past-Future, table 1: uniform 3k-5k in, 3k-5k out; k read as 1024"
    ),
    "distribution-3": _uniform(
        (2 * _K, 4 * _K), (32, 4 * _K), "Past-Future, table 1: uniform 2k-4k in, 32-4k out; k read as 1024"
    ),
    "sharegpt-o1-like": _log_normal(
        (209, 839), (1954, 3872), 11_000,
        "median and P90 of the 1981 token counts in Past-Future's artifact (ShareGPT-o1.json; answers of o1-preview "
        "with its reasoning); cut above its longest, 10935",
    ),
    "bookcorpus-like": Preset(
        prompt=LengthShape(median=3248, p90=10_501),
        output=AtMost(lengths=LengthShape(median=488, p90=5490), tokens=2048),
        max_tokens=100_000,
        source="AccelGen, section 3.1 and figure 8a: 40 % of the prompts above 4096 (14 % of all its requests, "
        "35 % of which are books), the longest of 11,000 at 100K; outputs 51 % up to 512, 13 % above 4096, cut at 2048",
    ),
}  # fmt: skip
"""Requests that stand alone."""

CONVERSATIONS = {
    "pensieve-sharegpt": _log_normal(
        (8.652202214898091, 78.887726077012), (173.36748451241368, 362.4277154677614), 4096,
        "Pensieve, table 3.2: means per turn and of turns, 36 % of the conversations with 5 turns or more, "
        "reaction time exponential with mean 60 s; P90 over median of the lengths as in sharegpt-like",
        turns=Turns(mean=5.56, shape=0.434), think_s=60.0,
    ),
}  # fmt: skip
"""Conversations: each turn's prompt is the whole history and what the user adds."""


def preset(name: str) -> Preset | None:
    """Return a preset of either kind, or the one that ``fixed:PROMPT:OUTPUT`` describes; None if there is none."""
    if (found := _FIXED.fullmatch(name)) is None:
        return PRESETS.get(name) or CONVERSATIONS.get(name)
    prompt, output = (FixedLength(tokens=int(tokens)) for tokens in found.groups())
    cut = max(prompt.tokens, output.tokens)
    return Preset(prompt=prompt, output=output, max_tokens=cut, source="every request alike")


def known() -> str:
    """Return what `preset` understands, for error messages."""
    return ", ".join([*PRESETS, *CONVERSATIONS, "fixed:PROMPT:OUTPUT (in tokens)"])


def generate(preset: str, *, rows: int, seed: int) -> Dataset:
    """Make a workload of `PRESETS`; equal arguments give equal rows and an equal checksum.

    Raises:
        ValueError: unknown preset or fewer than one row.
    """
    if preset not in PRESETS:
        raise ValueError(f"synthetic={preset!r}: must be one of {', '.join(PRESETS)}")
    if rows < 1:
        raise ValueError(f"rows={rows!r}: must be at least 1")
    pairs = list(zip(*PRESETS[preset].draw(np.random.default_rng(seed), rows), strict=True))
    return Dataset(
        name=f"synthetic {preset}, seed {seed}",
        format="synthetic",
        rows=tuple(
            WorkloadRow(source_id=f"{preset}-{i}", prompt_tokens=p, output_tokens=o) for i, (p, o) in enumerate(pairs)
        ),
        sha256=hashlib.sha256(json.dumps(pairs).encode()).hexdigest(),
    )
