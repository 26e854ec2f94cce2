"""Offline fit of the runtime model to profiled steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ext.prediction.runtime import FEATURE_SCALE, RuntimeModel, StepFeatures

_HOLD_OUT_EVERY = 5
_MIN_STEPS = 50


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted runtime model and its error on steps that were held out."""

    coefficients: tuple[float, ...]
    num_steps: int
    median_error: float
    """Median of |predicted - measured| / measured."""
    p90_error: float


def fit(steps: Sequence[tuple[StepFeatures, float]]) -> Fit:
    """Fit non-negative coefficients to relative errors; every fifth step is held out to measure them.

    Args:
        steps: Features and measured duration (s) of each step.

    Raises:
        ValueError: too few steps.

    Source: ALISE, eqs. 3-5; non-negative least squares because no term of a step can take less than no time.
    """
    from scipy.optimize import nnls  # an extra that serving does without

    if len(steps) < _MIN_STEPS:
        raise ValueError(f"{len(steps)} steps were measured, at least {_MIN_STEPS} are needed")
    features = np.array([s.vector() for s, _ in steps])  # [steps, 5]
    durations = np.array([d for _, d in steps])
    held = np.arange(len(steps)) % _HOLD_OUT_EVERY == 0
    weights = 1 / durations[~held]
    scaled, _ = nnls(features[~held] * weights[:, None], np.ones(len(weights)))
    coefficients = tuple(float(c) for c in scaled / FEATURE_SCALE)
    model = RuntimeModel(coefficients)
    errors = [abs(model.step_time_s(s) - d) / d for (s, d), out in zip(steps, held, strict=True) if out]
    return Fit(
        coefficients=coefficients,
        num_steps=len(steps),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
    )
