"""Means over seeds with their intervals, of ratios or of differences in points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

MIN_SEEDS = 2
"""Fewer give no interval."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A measure against a baseline's in the same seeds."""

    value: float
    low: float
    high: float
    """95 % interval; with one seed both are the value."""


def interval(values: Sequence[float], *, points: bool) -> Compared:
    """Return the mean of seeds with its interval: of differences in points, or of logarithms of ratios."""
    from scipy import stats

    middle, half = mean(values), 0.0
    if len(values) >= MIN_SEEDS:
        half = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    low, value, high = (one if points else math.exp(min(one, 50.0)) for one in (middle - half, middle, middle + half))
    return Compared(value=value, low=low, high=high)
