"""Arrival processes: when each request of a workload reaches the server."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


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
    if not (rate_per_s > 0 and np.isfinite(rate_per_s)):
        raise ValueError(f"rate_per_s={rate_per_s!r}: must be finite and greater than 0")
    if count < 0:
        raise ValueError(f"count={count!r}: must be 0 or more")
    unit_gaps = np.random.default_rng(seed).exponential(size=count)
    times: NDArray[np.float64] = np.cumsum(unit_gaps) / rate_per_s
    return times


def rescaled(times_s: NDArray[np.float64], *, rate_per_s: float) -> NDArray[np.float64]:
    """Stretch recorded arrival times to a mean rate, keeping their burstiness; the first arrival moves to 0.

    Args:
        times_s: [n >= 2] recorded times in seconds, not decreasing.
        rate_per_s: Mean rate wanted, counted over the n - 1 gaps.

    Raises:
        ValueError: fewer than two times, times that decrease or do not span any time, or a rate that is not positive.
    """
    if not (rate_per_s > 0 and np.isfinite(rate_per_s)):
        raise ValueError(f"rate_per_s={rate_per_s!r}: must be finite and greater than 0")
    times = np.asarray(times_s, dtype=np.float64)
    if len(times) < 2 or bool(np.any(np.diff(times) < 0)) or times[-1] == times[0]:
        raise ValueError("times_s: at least two recorded times are needed, not decreasing and not all equal")
    span_s = (len(times) - 1) / rate_per_s
    stretched: NDArray[np.float64] = (times - times[0]) * (span_s / (times[-1] - times[0]))
    return stretched
