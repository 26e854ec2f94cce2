"""Offline fit of the runtime model to profiled steps: robust, and honest about what the steps could tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ext.step_time.least_squares import FOLDS, Floats, Kinds, Robust, checked, robust
from vllm_ext.step_time.runtime import DEFAULT, KINDS, Coefficients, StepFeatures

_ROUNDS = 10
_RIDGE = 1e-12
_MIN_TERM_STEPS = 20
_MOST_UNCERTAINTY = 0.05


@dataclass(frozen=True, kw_only=True)
class TermSupport:
    """What the steps said about one coefficient."""

    name: str
    """As in `Coefficients`."""
    num_steps: int
    """Fitted steps that have this term at all."""
    uncertainty: float
    """Standard error of the coefficient times its feature, as a share of a step's time, in the median of those steps.

    Large where the feature hardly varies, or only together with others. Holds for independent errors.
    """

    @property
    def determined(self) -> bool:
        """Whether the steps had the data for it: 20 steps or more, and an uncertainty of at most 5 % of their time."""
        return self.num_steps >= _MIN_TERM_STEPS and self.uncertainty <= _MOST_UNCERTAINTY


@dataclass(frozen=True, kw_only=True)
class RegimeError:
    """Error over the held-out steps of one kind: ``decode`` only, ``prefill`` only, or ``mixed``."""

    name: str
    num_steps: int
    median_error: float
    """Median of |predicted - measured| / measured."""
    p90_error: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted runtime model and its error on steps that were held out."""

    coefficients: Coefficients
    num_steps: int
    """Steps given, those held out included."""
    median_error: float
    """Median of |predicted - measured| / measured."""
    p90_error: float
    regimes: tuple[RegimeError, ...]
    """Those that were held out, in the order decode, prefill, mixed."""
    terms: tuple[TermSupport, ...]
    """One per coefficient, in their order."""


def fit(steps: Sequence[tuple[StepFeatures, float]]) -> Fit:
    """Fit non-negative coefficients to relative errors; every fifth step is held out to measure them.

    Steps far off to either side (a pause, a compilation, a clock that jumped) are left out: see `robust`. A term that
    no step has keeps its default.

    Args:
        steps: Features and measured duration (s) of each step.

    Raises:
        ValueError: too few steps, or a duration that is not finite and positive.

    Source: ALISE, eqs. 3-5; non-negative because no term of a step can take less than no time.
    """
    durations = checked([duration for _, duration in steps])
    features = np.array([(1.0, *step) for step, _ in steps])  # [steps, 5]
    held = np.arange(len(steps)) % FOLDS == 0
    kinds = np.array([step.kind for step, _ in steps])
    found = robust(features[~held], durations[~held], kinds[~held], huber_rounds=_ROUNDS, tukey_rounds=_ROUNDS - 1)
    terms = _support(features[~held], found, kinds[~held])
    missing = np.array([term.num_steps == 0 for term in terms])
    theta = np.where(missing, np.array(DEFAULT), found.theta)
    errors = np.abs(features @ theta - durations) / durations
    return Fit(
        coefficients=Coefficients(*theta.tolist()),
        num_steps=len(steps),
        median_error=float(np.median(errors[held])),
        p90_error=float(np.quantile(errors[held], 0.9)),
        regimes=_regime_errors(kinds[held], errors[held]),
        terms=terms,
    )


def _support(features: Floats, found: Robust, kinds: Kinds) -> tuple[TermSupport, ...]:
    gram = features.T @ (features * (found.weights / found.sigma[kinds] ** 2)[:, None])
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    covariance = np.linalg.inv(gram / np.outer(scale, scale) + _RIDGE * np.eye(len(scale)))
    errors = np.sqrt(np.maximum(np.diag(covariance), 0.0)) / scale
    predicted = np.maximum(features @ found.theta, 1e-9)
    terms = []
    for name, feature, error in zip(Coefficients._fields, features.T, errors, strict=True):
        has = feature > 0
        share = float(np.median(feature[has] / predicted[has])) if has.any() else 0.0
        uncertainty = float(error) * share if has.any() else 1.0
        terms.append(TermSupport(name=name, num_steps=int(has.sum()), uncertainty=uncertainty))
    return tuple(terms)


def _regime_errors(kinds: Kinds, errors: Floats) -> tuple[RegimeError, ...]:
    found = []
    for kind, name in enumerate(KINDS):
        of_kind = errors[kinds == kind]
        if len(of_kind):
            median, p90 = float(np.median(of_kind)), float(np.quantile(of_kind, 0.9))
            found.append(RegimeError(name=name, num_steps=len(of_kind), median_error=median, p90_error=p90))
    return tuple(found)
