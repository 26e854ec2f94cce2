"""Ratios, differences and means over seeds, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import ClassVar

MIN_SEEDS = 2
"""Fewer give no interval."""


@dataclass(frozen=True)
class Ratio:
    """How many times better, above 1 is better, with its 95 % interval."""

    EQUAL: ClassVar[float] = 1.0

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}..{self.high:.2f})"

    @property
    def inverse(self) -> Ratio:
        """How many times worse."""
        low, value, high = (1 / one if one > 0 else math.inf for one in (self.high, self.value, self.low))
        return Ratio(value, low, high)

    @property
    def half_width(self) -> float:
        """Of the interval, relative to the value."""
        return (self.high - self.low) / 2 / self.value if self.value > 0 else math.inf

    def band(self, ours: float) -> tuple[float, float]:
        """Return what a measure would be at both ends of the interval; nan where that is open.

        Args:
            ours: The measure, of which this is the ratio to a baseline's. Less of it is better.
        """
        if not (self.low > 0 and self.high < math.inf):
            return math.nan, math.nan
        return ours * self.value / self.high, ours * self.value / self.low


@dataclass(frozen=True)
class Points:
    """How many percentage points a share is larger, above 0 is better, with the 95 % interval."""

    EQUAL: ClassVar[float] = 0.0

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.1f} points ({self.low:+.1f}..{self.high:+.1f})"

    def band(self, ours: float) -> tuple[float, float]:
        """Return what our share would be at both ends of the interval."""
        low, high = (ours + (end - self.value) / 100 for end in (self.low, self.high))
        return max(0.0, low), min(1.0, high)


def times_better(ours: float, base: float, *, higher: bool = False) -> float:
    """Return ``base / ours`` of what should be small, and ``ours / base`` of what should be large, ``higher``."""
    over, under = (ours, base) if higher else (base, ours)
    if over == under:
        return 1.0
    return over / under if under > 0 else math.inf


def interval(logs: Sequence[float]) -> Ratio:
    """Return the geometric mean of ratios, given their logarithms by seed; the interval of one seed is its value."""
    middle, half = mean(logs), half_width(logs)
    value, low, high = (math.exp(min(one, 50.0)) for one in (middle, middle - half, middle + half))
    return Ratio(value, low, high)


def half_width(values: Sequence[float]) -> float:
    """Return half of the width of Student's 95 % interval of the mean; 0 of one value."""
    from scipy import stats

    if len(values) < MIN_SEEDS:
        return 0.0
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
