"""Run-time model: how long a step takes, and from that how long a request will.

ALISE (eqs. 3-5) estimates a request of prompt s and output n as T_pre(s) + T_dec(s, n) with T_pre = s * T0 and
T_dec = n * (alpha * s + beta). Requests share steps, so what can be observed is the time of a step:

    t_step = c0 + c1 * requests + c2 * prefill tokens + c3 * context tokens + c4 * prefill tokens * their context

T0 is then c2 (with c4 for long prompts), alpha is c3, and beta is the step of a typical batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FEATURE_SCALE = np.array([1.0, 1e2, 1e3, 1e5, 1e6])
"""Typical size of each feature; regressing on scaled features keeps the covariance well conditioned."""
_DEFAULT = np.array([5e-3, 2e-5, 5e-5, 5e-8, 0.0])
"""Coefficients before anything was observed, in seconds per unit: of the order of an 8B model on one GPU."""
_FORGETTING = 0.999
_PRIOR_VARIANCE = 100.0
_MAX_VARIANCE = 1e4
_OUTLIER_RATIO = 10.0
_OUTLIERS_BELIEVED = 10
_BATCH_WEIGHT = 0.01


class StepFeatures(NamedTuple):
    """What a step consisted of."""

    num_requests: int
    num_prefill_tokens: int
    """Tokens beyond one per decoding request."""
    num_context_tokens: int
    """KV tokens that the step's requests attend to."""
    prefill_context: float = 0.0
    """Sum over prefill chunks of chunk length times context length, in tokens squared."""

    def vector(self) -> npt.NDArray[np.float64]:
        """Return the scaled features, shape [5]."""
        features: npt.NDArray[np.float64] = np.array((1.0, *self), dtype=np.float64) / FEATURE_SCALE
        return features


class RuntimeModel:
    """Step-time model fitted online by recursive least squares with forgetting.

    Deterministic and free of any clock: durations are handed in. Outliers (a compilation, a paused process) more than
    ten times the estimate are ignored until ten come in a row, which is a change of regime.

    Source: ALISE, eqs. 3-5, "linear regression coefficients that can be determined by profiling"; batch terms ours.
    """

    def __init__(self, coefficients: Sequence[float] | None = None) -> None:
        """Start from ``coefficients`` (5 values, s per unit, as of `coefficients`) or from defaults.

        Raises:
            ValueError: not five finite values.
        """
        start = _DEFAULT if coefficients is None else np.asarray(coefficients, dtype=np.float64)
        if start.shape != (5,) or not np.isfinite(start).all():
            raise ValueError(f"coefficients={coefficients!r}: five finite numbers are needed")
        self._theta = start * FEATURE_SCALE
        self._covariance = np.eye(5) * (_PRIOR_VARIANCE if coefficients is None else 1.0)
        self._outliers = 0
        self.num_observations = 0
        self.mean_abs_relative_error = 0.0
        """Moving average of |predicted - observed| / observed over steps."""
        self._batch_requests = 1.0
        self._batch_context = 0.0
        self._refresh()

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The five coefficients in seconds per unit, none below zero."""
        return tuple(float(c) for c in np.maximum(self._theta, 0.0) / FEATURE_SCALE)

    def step_time_s(self, features: StepFeatures) -> float:
        """Return the predicted duration of a step in seconds."""
        return max(0.0, float(features.vector() @ np.maximum(self._theta, 0.0)))

    def observe(self, features: StepFeatures, duration_s: float) -> None:
        """Learn from a step that took ``duration_s``; non-positive or non-finite durations are ignored."""
        if not (math.isfinite(duration_s) and duration_s > 0):
            return
        x = features.vector()
        predicted = self.step_time_s(features)
        if self.num_observations >= 20 and duration_s > _OUTLIER_RATIO * max(predicted, 1e-6):
            self._outliers += 1
            if self._outliers < _OUTLIERS_BELIEVED:
                return
            self._covariance = np.eye(5) * _PRIOR_VARIANCE  # a new regime: what was learnt before counts no longer
        self._outliers = 0
        # Weighted by 1 / duration: relative errors count alike, and a compilation of seconds weighs next to nothing.
        x = x / duration_s
        gain = self._covariance @ x
        gain /= _FORGETTING + float(x @ gain)
        self._theta = self._theta + gain * (1.0 - float(x @ self._theta))
        updated = (self._covariance - np.outer(gain, x @ self._covariance)) / _FORGETTING
        # A direction the steps say nothing about would grow without bound; it is held, the others stay free to forget.
        shrink = np.sqrt(np.minimum(1.0, _MAX_VARIANCE / np.maximum(np.diag(updated), 1e-300)))
        self._covariance = (updated + updated.T) / 2 * np.outer(shrink, shrink)
        error = abs(predicted - duration_s) / duration_s
        self.num_observations += 1
        weight = max(_BATCH_WEIGHT, 1 / self.num_observations)
        self.mean_abs_relative_error += weight * (error - self.mean_abs_relative_error)
        self._batch_requests += weight * (features.num_requests - self._batch_requests)
        self._batch_context += weight * (features.num_context_tokens - self._batch_context)
        self._refresh()

    def _refresh(self) -> None:
        base, per_request, per_prefill, per_context, per_pair = self.coefficients
        self._beta_s = max(base + per_request * self._batch_requests + per_context * self._batch_context, 1e-6)
        self._alpha_s = per_context
        self._prefill_token_s = max(per_prefill, 1e-9)
        self._pair_s = per_pair

    def prefill_s(self, num_tokens: int, num_computed_tokens: int = 0) -> float:
        """Return the time to compute ``num_tokens`` more tokens of a sequence, in seconds (eq. 4)."""
        context = num_computed_tokens + num_tokens / 2
        return num_tokens * (self._prefill_token_s + self._pair_s * context)

    def decode_s(self, num_tokens: int, context_tokens: int) -> float:
        """Return the time to generate ``num_tokens`` after ``context_tokens`` in a typical batch, in s (eq. 5)."""
        return num_tokens * (self._beta_s + self._alpha_s * (context_tokens + num_tokens / 2))
