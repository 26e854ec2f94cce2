"""Up to which rate a limit holds, with few runs: on a grid around a guess. A part of the benchmarks of clusters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from vllm_ext.experiments.runner import RunFailed
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.points import Plan

STEP = 1 / 0.9
"""Between two rates of the grid: the one below the guess is 0.9 of it."""
FIXED = -1
"""Place on the grid of the load at which all rows are compared, which every search tries first."""
_LOWEST, _HIGHEST = -14, 8
_STEEP = 0.5
"""Logarithm by which a latency is taken to grow in a step, to guess where it crosses the limit."""


@dataclass(frozen=True)
class Found:
    """What a search found."""

    rate_per_s: float
    """Where the latency crosses the limit, between two rates of the grid: its logarithm is taken to be linear."""
    bounded: bool
    """False: the limit holds at no rate tried, and this is the lowest of them; or at all of them, and it is the
    highest."""
    fixed: Mapping[str, float]
    """Metrics at the fixed load."""
    runs: int


def search(at: Callable[[float], SimulationSpec], metric: str, limit: float, guess_per_s: float) -> Plan[Found]:
    """Return a plan that searches.

    Args:
        at: Rate -> run.
        metric: Latency that is bounded.
        limit: The greatest that is allowed.
        guess_per_s: A rate near the one wanted.

    Raises:
        RunFailed: a run did.
    """
    over: dict[int, float] = {}  # place on the grid -> logarithm of latency over limit
    place: int | None = FIXED
    fixed: Mapping[str, float] = {}
    while place is not None:
        spec = at(guess_per_s * STEP**place)
        outcome = yield spec
        if outcome.metrics is None:
            raise RunFailed(f"{outcome.error}; the same command goes on with what failed")
        over[place] = math.log(outcome.metrics.get(metric, math.inf) / limit)
        fixed = fixed or outcome.metrics
        place = following(over)
    where, bounded = crossing(over)
    return Found(guess_per_s * STEP**where, bounded, fixed, len(over))


def following(over: Mapping[int, float]) -> int | None:
    """Return which place of the grid is tried next; None: two neighbours are known between which the limit lies."""
    low, high = _bracket(over)
    if low is None:
        nearest = min(over)
        down = min(3, max(1, math.ceil(over[nearest] / _STEEP)))
        return None if nearest <= _LOWEST else max(_LOWEST, nearest - down)
    if high is None:
        nearest = max(over)
        up = min(3, max(1, math.ceil(-over[nearest] / _STEEP)))
        return None if nearest >= _HIGHEST else min(_HIGHEST, nearest + up)
    if high - low == 1:
        return None
    share = over[low] / (over[low] - over[high])
    return min(high - 1, max(low + 1, round(low + share * (high - low))))


def crossing(over: Mapping[int, float]) -> tuple[float, bool]:
    """Return where on the grid the limit is crossed, and whether it is."""
    low, high = _bracket(over)
    if low is None or high is None:
        return float(min(over) if low is None else max(over)), False
    return low + (high - low) * over[low] / (over[low] - over[high]), True


def _bracket(over: Mapping[int, float]) -> tuple[int | None, int | None]:
    """Return the highest place at which the limit holds below the lowest at which it does not, and that."""
    high = min((place for place, one in over.items() if one > 0), default=None)
    low = max((place for place, one in over.items() if one <= 0 and (high is None or place < high)), default=None)
    return low, high
