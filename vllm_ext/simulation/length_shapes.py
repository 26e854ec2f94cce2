"""Distributions of prompt and output lengths and of the number of turns, by the statistics that papers publish."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

_P90_IN_SIGMAS = 1.2815515655446004
"""90th percentile of the standard normal distribution."""


class Lengths(Protocol):
    """A distribution of lengths in tokens."""

    def draw(self, rng: np.random.Generator, count: int, max_tokens: int) -> list[int]:
        """Draw whole lengths between 1 and max_tokens."""
        ...


@dataclass(frozen=True, kw_only=True)
class LengthShape:
    """A log-normal length distribution by its median and 90th percentile, in tokens."""

    median: float
    """Half of the lengths are below this."""

    p90: float
    """Nine in ten lengths are below this."""

    def draw(self, rng: np.random.Generator, count: int, max_tokens: int) -> list[int]:
        """Draw whole lengths between 1 and max_tokens."""
        sigma = np.log(self.p90 / self.median) / _P90_IN_SIGMAS
        lengths = np.exp(rng.normal(np.log(self.median), sigma, size=count))
        return [int(n) for n in np.clip(np.rint(lengths), 1, max_tokens)]


def with_mean(mean: float, *, spread: float, max_tokens: int) -> LengthShape:
    """Return the log-normal shape that has this mean once lengths above ``max_tokens`` are cut to it.

    Args:
        mean: Mean length wanted, in tokens.
        spread: 90th percentile over median.
        max_tokens: The cut, in tokens.

    Raises:
        ValueError: a mean that is not between 0 and the cut, or a spread not above 1.
    """
    if not 0 < mean < max_tokens:
        raise ValueError(f"mean={mean!r}: must be between 0 and max_tokens={max_tokens}")
    if not spread > 1:
        raise ValueError(f"spread={spread!r}: must be greater than 1")
    sigma = math.log(spread) / _P90_IN_SIGMAS
    low, high = 0.0, float(max_tokens) * spread
    for _ in range(100):  # the mean after the cut grows with the median
        median = (low + high) / 2
        if _cut_mean(median, sigma, max_tokens) < mean:
            low = median
        else:
            high = median
    return LengthShape(median=low, p90=low * spread)


def _cut_mean(median: float, sigma: float, cut: float) -> float:
    """E[min(X, cut)] of a log-normal X."""
    z = math.log(cut / median) / sigma
    return median * math.exp(sigma**2 / 2) * _normal_cdf(z - sigma) + cut * (1 - _normal_cdf(z))


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


@dataclass(frozen=True, kw_only=True)
class UniformLengths:
    """Lengths equally likely from ``low`` to ``high``, both included, in tokens."""

    low: int
    """Shortest."""

    high: int
    """Longest."""

    def draw(self, rng: np.random.Generator, count: int, max_tokens: int) -> list[int]:
        """Draw whole lengths, cut at max_tokens."""
        lengths = rng.integers(self.low, self.high + 1, size=count)
        return [int(n) for n in np.minimum(lengths, max_tokens)]


@dataclass(frozen=True, kw_only=True)
class FixedLength:
    """Always the same length."""

    tokens: int
    """The length, in tokens."""

    def draw(self, rng: np.random.Generator, count: int, max_tokens: int) -> list[int]:  # noqa: ARG002 - as any shape's
        """Return equal lengths; the generator is not touched."""
        return [min(self.tokens, max_tokens)] * count


@dataclass(frozen=True, kw_only=True)
class AtMost:
    """Lengths of another distribution, cut earlier than the preset says."""

    lengths: Lengths
    """What is cut."""

    tokens: int
    """The cut, in tokens."""

    def draw(self, rng: np.random.Generator, count: int, max_tokens: int) -> list[int]:
        """Draw whole lengths between 1 and the smaller of both cuts."""
        return self.lengths.draw(rng, count, min(self.tokens, max_tokens))


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
        extra = rng.negative_binomial(self.shape, self.shape / (self.shape + further), size=count)
        return [1 + int(n) for n in extra]

    def mean_of_at_least(self, least: int, most: int | None = None) -> float:
        """Return the mean number of turns of the conversations that have at least ``least``, cut after ``most``."""
        first, ratio = self.shape / (self.shape + self.mean - 1), (self.mean - 1) / (self.shape + self.mean - 1)
        probability, below, below_total = first**self.shape, 0.0, 0.0
        for further in range(least - 1):
            below += probability
            below_total += probability * (1 + further)
            probability *= ratio * (self.shape + further) / (1 + further)
        if most is None:
            return (self.mean - below_total) / (1 - below)
        short, total = below, 0.0
        for further in range(least - 1, most - 1):
            short += probability
            total += probability * (1 + further)
            probability *= ratio * (self.shape + further) / (1 + further)
        return (total + (1 - short) * most) / (1 - below)
