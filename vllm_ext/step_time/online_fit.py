"""The fit of step times while serving: to the last steps of each kind, robust, and never to negative time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vllm_ext.step_time.least_squares import Floats, Ridge, robust

RING = 128
"""Steps of each kind that are remembered."""
REFIT_EVERY = 8
"""Steps of a kind from one fit to the next; the first ones are fitted one by one."""
ORDER_OF_MAGNITUDE = 10.0
_NOISE = 0.1
"""Relative error of a step that the strength of what is known already is measured against."""
_SMALLEST_SHARE = 0.01
_HUBER = 1.345
"""Wider than 95 % efficiency asks for: a bend in the curve of step times is no outlier."""
_IGNORED_RATIO = 10.0
_CHANGED_RATIO = 1.5
_CHANGED_STEPS = 10
_CHANGED_LEAK = 0.25
"""What a step that is not off takes from the count of those that are: it grows where one step in five is off."""
_WARM_UP_STEPS = 20


class OnlineFit:
    """Non-negative coefficients of ``duration = features @ theta``, learnt from steps as they come.

    - *A ring per kind* of step: hours of decoding leave alone what is known of prefill.
    - *A ridge* around the coefficients of before: what the remembered steps say nothing about stays where it was.
    - *Huber's weights*: outliers count linearly, and a step ten times off is not remembered at all. To either side.
    - *Restart*: ten steps off to the same side by half or more, in a row or as one in four for long, are a change of
      the machine or of the load. All steps are forgotten; the coefficients stay as a start.
    """

    def __init__(self, theta: Floats, unit: Floats, num_kinds: int, known_within: float = ORDER_OF_MAGNITUDE) -> None:
        """Start from coefficients.

        Args:
            theta: [n], none below 0, in seconds per unit of the features.
            unit: [n], a typical size of each feature, above 0.
            num_kinds: How many kinds of step there are.
            known_within: Relative standard deviation of each coefficient, such as 0.2; 10 is an order of magnitude. It
                holds for the first 20 steps.
        """
        import scipy.optimize  # noqa: F401 - a second or so, which no step should take

        self.theta = theta.copy()
        self.restarts = 0
        """Changes of the machine or of the load that were noticed."""
        self._unit = unit
        self._features = np.zeros((num_kinds * RING, len(theta)))
        self._durations = np.ones(num_kinds * RING)
        self._kinds = np.repeat(np.arange(num_kinds), RING)
        self._begin(known_within)

    def observe(self, kind: int, features: Sequence[float], predicted_s: float, duration_s: float) -> bool:
        """Learn from one step; False if it was too far off to be believed.

        Args:
            kind: From 0 on.
            features: [n], finite, none below 0.
            predicted_s: ``features @ theta``.
            duration_s: Seconds, finite and greater than 0.
        """
        error = math.log(duration_s / max(predicted_s, 1e-9))
        if sum(self._counts) >= _WARM_UP_STEPS:
            if self._changed(error, kind):
                self.restarts += 1
                self._begin(ORDER_OF_MAGNITUDE)
            elif abs(error) > math.log(_IGNORED_RATIO):
                return False
        place = kind * RING + self._counts[kind] % RING
        self._features[place] = features
        self._durations[place] = duration_s
        self._counts[kind] += 1
        if self._counts[kind] < REFIT_EVERY or self._counts[kind] % REFIT_EVERY == 0:
            self._fit()
        return True

    def _begin(self, known_within: float) -> None:
        self._counts = [0] * (len(self._kinds) // RING)
        self._sigma = np.ones(len(self._counts))
        self._known_within = known_within
        self._run = 0.0

    def _fit(self) -> None:
        filled = np.concatenate([np.arange(min(count, RING)) + k * RING for k, count in enumerate(self._counts)])
        known = self._known_within if sum(self._counts) <= _WARM_UP_STEPS else ORDER_OF_MAGNITUDE
        least = (
            _SMALLEST_SHARE * max(float(self.theta @ self._unit), 1e-9) / self._unit
        )  # 0 is not known exactly either
        ridge = Ridge(self.theta, known * np.maximum(self.theta, least) / _NOISE)
        try:
            found = robust(
                self._features[filled], self._durations[filled], self._kinds[filled],
                huber_rounds=0, tukey_rounds=1, start=self.theta, ridge=ridge,
            )  # fmt: skip
        except RuntimeError:  # steps so extreme that the solver finds no end: others will come
            return
        self._sigma[: len(found.sigma)] = found.sigma
        if found.theta.any():
            self.theta = found.theta

    def _changed(self, error: float, kind: int) -> bool:
        """Whether errors to one side have become so many that they are no outliers; counts this one."""
        limit = min(_HUBER * float(self._sigma[kind]), math.log(_IGNORED_RATIO))
        if abs(error) <= max(limit, math.log(_CHANGED_RATIO)):
            self._run -= math.copysign(min(_CHANGED_LEAK, abs(self._run)), self._run)
        else:
            self._run += math.copysign(1.0, error)
        return abs(self._run) >= _CHANGED_STEPS
