"""Fit of a step's time to recorded steps: non-negative, relative errors, robust, checked on steps held out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_ext.simulation.cost.fitted import FitQuality, Fitted, StepCurve
from vllm_ext.simulation.step_shape import StepShape

_FOLDS = 5
_MIN_STEPS = 50
_MIN_STEPS_PER_KNOT = 10
_ROUNDS = 8
_HUBER = 1.345
"""Residuals beyond this many standard deviations count linearly: 95 % efficient on normal errors (Huber 1981)."""
_SMALLEST_SIGMA = 1e-3
_GAIN = 0.98
"""A curve must lower the validation error to this share of the straight line's to be taken."""

_Vector = NDArray[np.float64]


def fit_steps(shapes: Sequence[StepShape], seconds: Sequence[float], source: str = "") -> Fitted:
    """Fit a cost model to recorded steps.

    Every fifth step is held out for the errors that are reported, every fifth of another phase for the choice between a
    straight line and a curve over the tokens of a step (knots at powers of two); the choice is then fitted to all but
    the first. Steps far off, such as a paused process, weigh less and less.

    Args:
        shapes: The steps.
        seconds: What each took, in seconds.
        source: Model, device and run, for reports.

    Raises:
        ValueError: too few steps, lengths that differ, or a duration that is not finite and positive.

    Source: ALISE, eqs. 3-5; non-negative least squares because no term of a step can take less than no time.
    """
    if len(shapes) != len(seconds):
        raise ValueError(f"{len(shapes)} shapes but {len(seconds)} durations: each step needs both")
    if len(shapes) < _MIN_STEPS:
        raise ValueError(f"{len(shapes)} steps were recorded, at least {_MIN_STEPS} are needed")
    durations = np.asarray(seconds, dtype=np.float64)
    bad = np.flatnonzero(~(np.isfinite(durations) & (durations > 0)))
    if len(bad):
        raise ValueError(f"seconds[{bad[0]}]={seconds[bad[0]]!r}: must be finite and greater than 0")
    work = np.asarray(shapes, dtype=np.float64)  # [steps, 7]
    fold = np.arange(len(work)) % _FOLDS
    knots = _choose_knots(work[fold > 0], durations[fold > 0], fold[fold > 0] == 1)
    curve = _fit_curve(work[fold > 0], durations[fold > 0], knots)
    measured, predicted = durations[fold == 0], _predict(curve, work[fold == 0])
    errors = np.abs(predicted - measured) / measured
    quality = FitQuality(
        num_steps=len(work),
        median_error=float(np.median(errors)),
        p90_error=float(np.quantile(errors, 0.9)),
        total_ratio=float(measured.sum() / max(predicted.sum(), 1e-12)),
        source=source,
    )
    return Fitted(curve, quality)


def _choose_knots(work: _Vector, durations: _Vector, validation: NDArray[np.bool_]) -> tuple[float, ...]:
    """Return the knots of the curve, or of a straight line if the curve does not predict the validation steps better.

    Compared by mean error with the worst tenth cut off: a median alone would not see what a tail of large steps gains.
    """
    train, check = ~validation, validation
    straight, bent = (0.0,), _knots(work[train, 1])

    def error(knots: tuple[float, ...]) -> float:
        predicted = _predict(_fit_curve(work[train], durations[train], knots), work[check])
        errors = np.sort(np.abs(predicted - durations[check]) / durations[check])
        return float(errors[: max(1, int(0.9 * len(errors)))].mean())

    if len(bent) == 1:
        return straight
    return bent if error(bent) < _GAIN * error(straight) else straight


def _knots(tokens: _Vector) -> tuple[float, ...]:
    """Return 0 and the powers of two that split the steps so that enough of them lie in every segment."""
    knots = [0.0]
    power = 1.0
    while power < tokens.max():
        inside = np.count_nonzero((tokens > knots[-1]) & (tokens <= power))
        if inside >= _MIN_STEPS_PER_KNOT and np.count_nonzero(tokens > power) >= _MIN_STEPS_PER_KNOT:
            knots.append(power)
        power *= 2
    return tuple(knots)


def _fit_curve(work: _Vector, durations: _Vector, knots: tuple[float, ...]) -> StepCurve:
    from scipy.optimize import nnls  # an extra that serving does without

    features = _features(work, knots)
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    features = features / scale
    weights = 1 / durations
    for _ in range(_ROUNDS):
        solution, _residual = nnls(features * weights[:, None], durations * weights)
        predicted = np.maximum(features @ solution, 1e-9)
        residuals = (durations - predicted) / predicted
        sigma = max(1.4826 * float(np.median(np.abs(residuals))), _SMALLEST_SIGMA)
        robust = np.minimum(1.0, _HUBER * sigma / np.maximum(np.abs(residuals), 1e-12))
        weights = np.sqrt(robust) / predicted
    coefficients = [float(c) for c in solution / scale]
    base, slopes, rest = coefficients[0], coefficients[1 : 1 + len(knots)], coefficients[1 + len(knots) :]
    return StepCurve(
        base_s=base,
        knots=knots,
        slopes=tuple(slopes),
        per_request=rest[0],
        per_prefill_token=rest[1],
        per_sampled=rest[2],
        per_decode_context=rest[3],
        per_prefill_context=rest[4],
        per_pair=rest[5],
    )


def _features(work: _Vector, knots: tuple[float, ...]) -> _Vector:
    """Return the terms of `StepCurve`, shape [steps, 7 + knots]: each segment's column is the tokens within it."""
    requests, tokens, _, sampled, decode_context, prefill_context, pairs = work.T
    ends = (*knots[1:], np.inf)
    segments = [np.clip(tokens, low, high) - low for low, high in zip(knots, ends, strict=True)]
    rest = [requests, tokens - requests, sampled, decode_context, prefill_context, pairs]
    return np.stack([np.ones_like(tokens), *segments, *rest], axis=1)


def _predict(curve: StepCurve, work: _Vector) -> _Vector:
    """Return the predicted durations of steps in seconds, shape [steps]: `Fitted.device_s` for many at once."""
    coefficients = np.array(
        [curve.base_s, *curve.slopes, curve.per_request, curve.per_prefill_token, curve.per_sampled,
         curve.per_decode_context, curve.per_prefill_context, curve.per_pair]
    )  # fmt: skip
    predicted: _Vector = _features(work, curve.knots) @ coefficients
    return predicted
