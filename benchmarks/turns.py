"""Subjects that take turns, so that noise of the machine meets all alike. A part of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)
Seconds = np.ndarray[Any, np.dtype[np.float64]]


def measure(
    subjects: Mapping[Key, Callable[[], object]], repeats: int, timer: Callable[[], float]
) -> dict[Key, Seconds]:
    """Return seconds of each subject, by turns."""
    found: dict[Key, list[float]] = {name: [] for name in subjects}
    for _ in range(repeats):
        for name, subject in subjects.items():
            started = timer()
            subject()
            found[name].append(timer() - started)
    return {name: np.array(times) for name, times in found.items()}


def ratio(times: Mapping[Key, Seconds], one: Key, other: Key) -> tuple[float, float, float]:
    """Return the median of one subject's time over that of the other in the same turn, and its quartiles."""
    middle, low, high = np.percentile(times[one] / times[other], [50, 25, 75])
    return float(middle), float(low), float(high)
