"""Laws of output lengths, made of two quantiles."""

from __future__ import annotations

import math

from scipy.stats import norm

from vllm_ext.contract.length_distribution import LEVELS


def nine(p50: int, p90: int | None = None) -> list[int]:
    """Return the quantiles at `LEVELS` of a log-normal length, in tokens; all of them ``p50`` where that is all."""
    spread = 0.0 if p90 is None else math.log(p90 / p50) / norm.ppf(0.9)
    return [max(1, round(p50 * math.exp(spread * norm.ppf(level)))) for level in LEVELS]
