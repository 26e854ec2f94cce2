"""Arrival processes: when each request of a workload reaches the server, in seconds from the start of the run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from vllm_ext.simulation.workloads.randomness import draws


def stream(rng: np.random.Generator, *, rate_per_s: float, cv: float = 1.0) -> Iterator[float]:
    """Return arrival times without end.

    Args:
        rng: Equal generators and ``cv`` give equal unit-rate gaps at every rate, so that two rates differ only by a
            factor on the time axis: systems and loads are compared on common random numbers.
        rate_per_s: Mean arrivals per second.
        cv: Coefficient of variation of the gaps, which are gamma distributed; 1 is a Poisson process, below 1 is more
            even, above 1 burstier.

    Raises:
        ValueError: the rate or ``cv`` is not positive and finite.
    """
    for name, value in (("rate_per_s", rate_per_s), ("cv", cv)):
        if not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r}: must be finite and greater than 0")
    unit_gaps = draws(rng, np.random.Generator.exponential)
    if cv != 1.0:
        unit_gaps = draws(rng, lambda rng, size: rng.gamma(cv**-2, cv**2, size=size))
    return (unit_time / rate_per_s for unit_time in itertools.accumulate(unit_gaps))


def poisson(*, rate_per_s: float, count: int, seed: int) -> NDArray[np.float64]:
    """Return the first ``count`` arrival times of a Poisson process; the first gap is random too."""
    return np.fromiter(itertools.islice(stream(np.random.default_rng(seed), rate_per_s=rate_per_s), count), np.float64)
