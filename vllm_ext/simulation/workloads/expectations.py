"""Classes of service: who belongs to which, what they expect, and when they give up."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence

from vllm_ext.simulation.requests import Slo
from vllm_ext.simulation.workloads.randomness import Purpose, draws, generator
from vllm_ext.simulation.workloads.spec import SloTarget, TierSpec

Factors = tuple[float, float, float]
"""Of TTFT, TBT and E2E: a number in [0, 1) that chooses between the bounds."""


def choices(weights: Sequence[float], uniforms: Iterator[float]) -> Iterator[int]:
    """Yield indices without end, each as often as its weight says."""
    bounds = list(itertools.accumulate(weights))
    last = max(index for index, weight in enumerate(weights) if weight > 0)
    for uniform in uniforms:
        yield min(last, bisect.bisect_right(bounds, uniform * bounds[-1]))


def target_s(target: SloTarget, prompt_tokens: int, uniform: float) -> float:
    """Return an objective in seconds; ``uniform`` in [0, 1) chooses the factor."""
    buckets = -(-prompt_tokens // target.bucket_tokens)
    value = target.base_s + target.per_prompt_token_s * buckets * target.bucket_tokens
    if table := target.bucket_s:
        value += table[min(buckets, len(table)) - 1] * max(1.0, buckets / len(table))
    return value * (target.low + (target.high - target.low) * uniform)


class Expectations:
    """Draws tiers and what their requests expect; each kind of objective has a random stream of its own."""

    def __init__(self, tiers: Sequence[TierSpec], seed: int) -> None:
        self._tiers = tiers
        self._index = {tier.name: index for index, tier in enumerate(tiers)}
        self._choices = choices([tier.share for tier in tiers], _uniforms(seed, Purpose.TIER)) if tiers else None
        self._factors = [_uniforms(seed, p) for p in (Purpose.SLO_TTFT, Purpose.SLO_TBT, Purpose.SLO_E2E)]

    def tier(self, name: str | None) -> TierSpec | None:
        """Return the tier of that name, or draw one; None if there are no tiers."""
        if self._choices is None:
            return None
        drawn = next(self._choices)
        return self._tiers[drawn if name is None else self._index[name]]

    def factors(self) -> Factors:
        """Draw what chooses the objectives of one request."""
        ttft, tbt, e2e = self._factors
        return next(ttft), next(tbt), next(e2e)


def slo(tier: TierSpec, prompt_tokens: int, factors: Factors) -> Slo:
    """Return the objectives of a request."""
    ttft, tbt, e2e = factors
    return Slo(
        ttft_s=None if tier.ttft is None else target_s(tier.ttft, prompt_tokens, ttft),
        tbt_s=None if tier.tbt is None else target_s(tier.tbt, prompt_tokens, tbt),
        e2e_s=None if tier.e2e is None else target_s(tier.e2e, prompt_tokens, e2e),
    )


class Aborts:
    """Draws who disconnects, and when."""

    def __init__(self, share: float, mean_s: float | None, seed: int) -> None:
        self._share = share
        self._mean_s = mean_s or math.inf
        self._uniforms = _uniforms(seed, Purpose.ABORT)
        self._times = draws(generator(seed, Purpose.ABORT_TIME), lambda rng, count: rng.exponential(size=count))

    def after_s(self) -> float | None:
        """Return how long after its arrival a request is given up, or None."""
        if self._share == 0:
            return None
        unit_time = next(self._times)
        return unit_time * self._mean_s if next(self._uniforms) < self._share else None


def _uniforms(seed: int, purpose: Purpose) -> Iterator[float]:
    return draws(generator(seed, purpose), lambda rng, count: rng.random(count))
