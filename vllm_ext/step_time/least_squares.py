"""Robust least squares without negative coefficients: the one fit of step times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Kinds = npt.NDArray[np.int64]

FOLDS = 5
"""Every fifth step is held out of a fit, to measure its error."""
_MIN_STEPS = 50
_SIGMA_PER_MEDIAN = 1.4826
_HUBER, _TUKEY = 1.345, 4.685
"""Both are 95 % efficient on normal errors (Huber 1981; Beaton and Tukey 1974)."""
_SMALLEST_SIGMA = 1e-3
_SHORTEST_S = 1e-9


class Ridge(NamedTuple):
    """What is known of the coefficients before any step."""

    center: Floats
    """[n], none below 0."""
    deviation: Floats
    """Standard deviation of each over that of a step's relative error, [n], above 0."""


class Robust(NamedTuple):
    """What `robust` found."""

    theta: Floats
    """Coefficients in seconds per unit of each feature, [n], none below 0."""
    weights: Floats
    """Of each step's squared error in seconds, [steps]."""
    sigma: Floats
    """Standard deviation of the relative errors of each kind of step, [kinds]."""


def checked(seconds: Sequence[float]) -> Floats:
    """Return measured durations as an array, [steps].

    Raises:
        ValueError: too few for a fit, or one that is not finite and positive.
    """
    if len(seconds) < _MIN_STEPS:
        raise ValueError(f"{len(seconds)} steps were measured, at least {_MIN_STEPS} are needed")
    durations = np.asarray(seconds, dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(durations) & (durations > 0)))
    if len(bad):
        raise ValueError(f"seconds[{bad[0]}]={seconds[bad[0]]!r}: must be finite and greater than 0")
    return durations


def robust(
    features: Floats,
    durations: Floats,
    kinds: Kinds,
    *,
    huber_rounds: int,
    tukey_rounds: int = 0,
    start: Floats | None = None,
    ridge: Ridge | None = None,
) -> Robust:
    """Fit ``durations = features @ theta`` to relative errors, with less and less weight on steps that are far off.

    Least squares repeated: after Huber, which finds its way from any start, then after Tukey, which leaves outliers
    out. Each kind of step has its own sigma: where few prefills fit less well than many decodes, measured against the
    decodes they would all be outliers.

    Args:
        features: [steps, n], finite, none below 0.
        durations: Seconds, [steps], above 0.
        kinds: Small integers, [steps].
        huber_rounds: Repetitions after Huber.
        tukey_rounds: Repetitions after Tukey that follow, with the sigma of before.
        start: Coefficients that the first round weighs by; None: all steps weigh alike first, in a round more.
        ridge: What draws coefficients that the steps tell little about.

    Raises:
        RuntimeError: the solver found no end.
    """
    from scipy.optimize import nnls  # slow to import, so whoever only predicts does without

    scale = np.maximum(features.max(axis=0), 1e-12)
    unit = features / scale
    known = np.zeros((0, len(scale))) if ridge is None else np.diag(1 / (ridge.deviation * scale))
    targets = np.zeros(0) if ridge is None else ridge.center / ridge.deviation
    sigma = np.ones(int(kinds.max()) + 1)
    theta = None if start is None else start * scale
    weights = 1 / durations
    for number in range(int(start is None) + huber_rounds + tukey_rounds):
        if theta is not None:
            predicted = np.maximum(unit @ theta, _SHORTEST_S)
            errors = np.maximum(np.abs(np.log(durations / predicted)), 1e-12)
            if number <= int(start is None) + huber_rounds:
                _follow(sigma, errors, kinds)
            if number < int(start is None) + huber_rounds:
                trust = np.sqrt(np.minimum(1.0, _HUBER * sigma[kinds] / errors))
            else:
                trust = np.maximum(0.0, 1 - (errors / (_TUKEY * sigma[kinds])) ** 2)
            # (measured - predicted) / the larger of both counts alike to either side. Divided by the measured duration
            # alone, errors would favour short steps, the more so the noisier they are.
            weights = trust / np.sqrt(np.maximum(durations, predicted) * predicted)
        rows, wanted = unit * weights[:, None], durations * weights
        theta = nnls(np.concatenate((rows, known)), np.concatenate((wanted, targets)))[0]
    assert theta is not None, "at least one round"
    return Robust(theta / scale, weights**2, sigma)


def _follow(sigma: Floats, errors: Floats, kinds: Kinds) -> None:
    for kind in range(len(sigma)):
        of_kind = errors[kinds == kind]
        if len(of_kind):
            sigma[kind] = max(_SIGMA_PER_MEDIAN * float(np.median(of_kind)), _SMALLEST_SIGMA)
