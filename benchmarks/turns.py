"""Subjects that take turns, so that noise of the machine meets all alike, and agree. A part of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

Key = TypeVar("Key", bound=Hashable)
Seconds = np.ndarray[Any, np.dtype[np.float64]]
_ALLOWED_ERROR = 0.02
"""Of attention, relative to the norm of its output; bfloat16 has steps of 0.4 % in each probability."""


def check_output(name: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise RuntimeError if what attention gives is not what it must be."""
    error = float((found.to(expected.dtype) - expected).norm() / expected.norm())
    if not error <= _ALLOWED_ERROR:
        raise RuntimeError(f"{name}: the output is off by {error:.3g} of its norm, allowed are {_ALLOWED_ERROR}")


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
