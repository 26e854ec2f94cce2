"""Arrival processes: when each request of a workload reaches the server."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_CHUNK = 4096
Seed = int | np.random.SeedSequence
"""What numpy seeds a generator with."""


def poisson(*, rate_per_s: float, count: int, seed: int) -> NDArray[np.float64]:
    """Return the arrival times of a Poisson process, in seconds from the start.

    Args:
        rate_per_s: Mean arrivals per second.
        count: Number of arrivals.
        seed: Equal seeds give equal unit-rate gaps, so that two rates differ only by a factor on the time axis:
            systems and loads are compared on common random numbers.

    Returns:
        [count] increasing times; the first gap is random too.

    Raises:
        ValueError: the rate is not positive and finite, or the count is negative.
    """
    _check_positive("rate_per_s", rate_per_s)
    if count < 0:
        raise ValueError(f"count={count!r}: must be 0 or more")
    unit_gaps = np.random.default_rng(seed).exponential(size=count)
    times: NDArray[np.float64] = np.cumsum(unit_gaps) / rate_per_s
    return times


def stream(*, rate_per_s: float, seed: Seed, cv: float = 1.0) -> Iterator[float]:
    """Yield arrival times without end, in seconds from the start.

    Args:
        rate_per_s: Mean arrivals per second.
        seed: As for `poisson`: equal seeds and ``cv`` give equal unit-rate gaps at every rate.
        cv: Coefficient of variation of the gaps, which are gamma distributed; 1 is a Poisson process and gives the
            times of `poisson`, below 1 is more even, above 1 burstier.

    Raises:
        ValueError: the rate or ``cv`` is not positive and finite.
    """
    _check_positive("rate_per_s", rate_per_s)
    _check_positive("cv", cv)
    return _stream(rate_per_s, np.random.default_rng(seed), cv)


def _stream(rate_per_s: float, rng: np.random.Generator, cv: float) -> Iterator[float]:
    elapsed = 0.0
    while True:
        unit_gaps = rng.exponential(size=_CHUNK) if cv == 1.0 else rng.gamma(cv**-2, cv**2, size=_CHUNK)
        unit_gaps[0] += elapsed
        unit_times = np.cumsum(unit_gaps)
        elapsed = float(unit_times[-1])
        yield from (unit_times / rate_per_s).tolist()


def rescaled(times_s: NDArray[np.float64], *, rate_per_s: float) -> NDArray[np.float64]:
    """Stretch recorded arrival times to a mean rate, keeping their burstiness; the first arrival moves to 0.

    Args:
        times_s: [n >= 2] recorded times in seconds, not decreasing.
        rate_per_s: Mean rate wanted, counted over the n - 1 gaps.

    Raises:
        ValueError: fewer than two times, times that decrease or do not span any time, or a rate that is not positive.
    """
    _check_positive("rate_per_s", rate_per_s)
    times = np.asarray(times_s, dtype=np.float64)
    if len(times) < 2 or bool(np.any(np.diff(times) < 0)) or times[-1] == times[0]:
        raise ValueError("times_s: at least two recorded times are needed, not decreasing and not all equal")
    span_s = (len(times) - 1) / rate_per_s
    stretched: NDArray[np.float64] = (times - times[0]) * (span_s / (times[-1] - times[0]))
    return stretched


def _check_positive(name: str, value: float) -> None:
    if not (value > 0 and np.isfinite(value)):
        raise ValueError(f"{name}={value!r}: must be finite and greater than 0")
