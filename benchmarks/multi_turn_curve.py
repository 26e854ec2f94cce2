"""Throughput at equal latency: the rate at which a row's latency crosses a target, from a few measured rates.

A part of multi_turn.py: it is run from there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Bound(Enum):
    """How much is known of a number."""

    EXACT = "="
    AT_LEAST = ">="
    """The target was not reached at the highest rate measured."""
    AT_MOST = "<="
    """The target was passed at the lowest rate measured already."""


@dataclass(frozen=True, kw_only=True)
class Known:
    """A number that a measurement gives or limits."""

    value: float
    bound: Bound = Bound.EXACT

    def __str__(self) -> str:
        """Write it for a table."""
        return f"{'' if self.bound is Bound.EXACT else self.bound.value + ' '}{self.value:.3g}"


class Climb:
    """Which rates to measure in turn to find where latency passes a target: from the middle up, or else down.

    Latency is taken to grow with the rate, so that no other rate would say more.

    Args:
        rates: That may be measured, at least one.
        target: Latency, in the unit that `note` is told.
    """

    def __init__(self, rates: Sequence[float], target: float) -> None:
        self._rates = sorted(rates)
        self._target = target
        self._at = len(self._rates) // 2
        self._direction = 0

    @property
    def next_rate(self) -> float | None:
        """The rate to measure now; None when enough is known, or all is."""
        return self._rates[self._at] if 0 <= self._at < len(self._rates) else None

    def note(self, latency: float) -> None:
        """Take note of what was measured at `next_rate`."""
        direction = -1 if latency > self._target else 1
        turned = self._direction not in (0, direction)
        self._direction = direction
        self._at = -1 if turned else self._at + direction


def crossing(points: Sequence[tuple[float, float]], target: float) -> Known:
    """Return the rate at which latency first grows beyond a target, interpolated linearly between two rates.

    Args:
        points: (rate, latency) in any order, at least one.
        target: In the unit of the latencies.

    Raises:
        ValueError: there is no point, or two of one rate.
    """
    ordered = sorted(points)
    if not ordered or len({rate for rate, _ in ordered}) < len(ordered):
        raise ValueError(f"points={points!r}: must be at least one, each of another rate")
    if ordered[0][1] > target:
        return Known(value=ordered[0][0], bound=Bound.AT_MOST)
    for (rate, latency), (next_rate, next_latency) in itertools.pairwise(ordered):
        if next_latency > target:
            share = (target - latency) / (next_latency - latency)
            return Known(value=rate + share * (next_rate - rate))
    return Known(value=ordered[-1][0], bound=Bound.AT_LEAST)


def ratio(above: Known, below: Known) -> Known | None:
    """Return ``above / below`` as far as it is known; None if the two bounds leave it open."""
    flipped = {Bound.AT_LEAST: Bound.AT_MOST, Bound.AT_MOST: Bound.AT_LEAST}
    bounds = {above.bound, flipped.get(below.bound, Bound.EXACT)} - {Bound.EXACT}
    if len(bounds) > 1:
        return None
    return Known(value=above.value / below.value, bound=bounds.pop() if bounds else Bound.EXACT)


def middle(found: Sequence[Known]) -> Known:
    """Return the median (of an even number, the lower of the two in the middle), with its own bound.

    Raises:
        ValueError: there is none.
    """
    if not found:
        raise ValueError("found: must hold at least one number")
    return sorted(found, key=lambda known: known.value)[(len(found) - 1) // 2]
