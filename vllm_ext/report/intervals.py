"""Ratios and means over seeds, with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

MIN_SEEDS = 2
"""Fewer give no interval."""


@dataclass(frozen=True)
class Ratio:
    """How many times better, above 1 is better, with its 95 % interval."""

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

    def band(self, ours: float, *, higher: bool = False) -> tuple[float, float]:
        """Return what a measure would be at both ends of the interval; nan where that is open.

        Args:
            ours: The measure, of which this is the ratio to a baseline's.
            higher: Whether more of it is better.
        """
        if not (self.low > 0 and self.high < math.inf):
            return math.nan, math.nan
        if higher:
            return ours * self.low / self.value, ours * self.high / self.value
        return ours * self.value / self.high, ours * self.value / self.low


def times_better(ours: float, base: float, *, higher: bool = False) -> float:
    """Return ``base / ours`` of what should be small, and ``ours / base`` of what should be large, ``higher``."""
    over, under = (ours, base) if higher else (base, ours)
    if over == under:
        return 1.0
    return over / under if under > 0 else math.inf


def interval(logs: Sequence[float]) -> Ratio:
    """Return the geometric mean of ratios, given their logarithms by seed; the interval of one seed is its value."""
    from scipy import stats

    middle, half = mean(logs), 0.0
    if len(logs) >= MIN_SEEDS:
        half = float(stats.t.ppf(0.975, len(logs) - 1)) * stdev(logs) / math.sqrt(len(logs))
    value, low, high = (math.exp(min(one, 50.0)) for one in (middle, middle - half, middle + half))
    return Ratio(value, low, high)
