"""Online regression of durations: forgets the old, shrugs off the odd, and never asks for negative time."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from vllm_ext.step_time.nonnegative import Repeated

_Vector = npt.NDArray[np.float64]

_FORGETTING = 0.995
"""Of what is known about a direction, the share that is left after a step in that direction: memory of 200 steps."""
_NOISE = 0.1
"""Relative error of one step that the strength of a start is measured against."""
_ORDER_OF_MAGNITUDE = 10.0
_SMALLEST_SHARE = 0.01
_CLIP = 2.5
"""Errors beyond this many standard deviations count as that many (Huber 1981, winsorised residuals)."""
_SIGMA_PER_MEDIAN = 1.4826
_SCALE_RATE = 0.05
_SCALE_RANGE = (0.05, 1.0)
"""Of the median error. The least lets a quiet machine's model follow in full what is up to 18 % off."""
_IGNORED_RATIO = 10.0
_CHANGED_RATIO = 1.5
_CHANGED_STEPS = 10
_CHANGED_LEAK = 0.25
"""What a step that is not off takes from the count of those that are: it grows where one step in five is off."""
_WARM_UP_STEPS = 20
_SHORTEST_S = 1e-9


class OnlineFit:
    """Non-negative coefficients of ``duration = features @ theta``, learnt one step at a time.

    Relative errors are minimised. Three things keep the estimate sane:

    - *Directional forgetting*: a step makes older knowledge fade only where the step itself says something. Hours of
      decoding leave alone what is known of prefill, and a thousand steps of one shape move only what that shape can
      tell; plain exponential forgetting lets the other coefficients wander off on noise.
    - *Clipped errors*: an error beyond 2.5 robust standard deviations counts as one of that size, and a step ten times
      off counts not at all. Both directions: a step that was too short has the larger relative weight.
    - *Restart*: ten steps off to the same side by half or more, in a row or as one in four for long, are a change of
      the machine or of the load. What was learnt stays as the start, known to an order of magnitude only.

    Source: directional forgetting after Cao and Schwartz (Automatica 36, 2000); clipping after Huber.
    """

    def __init__(self, theta: _Vector, known_within: float = _ORDER_OF_MAGNITUDE) -> None:
        """Start from coefficients.

        Args:
            theta: [n], none below 0, in seconds per unit of the features.
            known_within: Relative standard deviation of each, such as 0.2; 10 stands for an order of magnitude.
        """
        self.theta = theta.copy()
        self._solver = Repeated(len(theta))
        self.restarts = 0
        """Changes of the machine or of the load that were noticed."""
        self._restart(known_within)

    def observe(self, features: _Vector, duration_s: float) -> bool:
        """Learn from one step; False if it was too far off to be believed.

        Args:
            features: [n], finite, none below 0.
            duration_s: Seconds, finite and greater than 0.
        """
        predicted = max(float(features @ self.theta), _SHORTEST_S)
        error = math.log(duration_s / predicted)
        if self._steps >= _WARM_UP_STEPS:
            if self._changed(error):
                self.restarts += 1
                self._restart(_ORDER_OF_MAGNITUDE)
            elif abs(error) > math.log(_IGNORED_RATIO):
                return False
        warming = self._steps < _WARM_UP_STEPS
        self._steps += 1
        self._follow_scale(abs(error))
        if not warming:  # before that, the prediction is no measure of what is far off
            limit = self._limit()
            duration_s = predicted * math.exp(max(-limit, min(limit, error)))
        # Divided by the larger of both, an error counts alike to either side, and at most 1. Dividing by the measured
        # duration would favour short steps, the more so the noisier they are.
        unit = max(predicted, duration_s)
        self._learn(features / unit, duration_s / unit)
        return True

    def _learn(self, x: _Vector, y: float) -> None:
        projected = self._information @ x
        known = float(x @ projected)
        if known > 0:  # the solution of information @ theta = moment is the same before and after this
            faded = (1 - _FORGETTING) / known
            self._moment -= faded * float(x @ self._moment) * projected
            self._information -= faded * np.outer(projected, projected)
        self._information += np.outer(x, x)
        self._moment += y * x
        theta = self._solver.minimum(self._information, self._moment)
        if not theta.any():  # steps so extreme that the sums lost what they held
            self._restart(_ORDER_OF_MAGNITUDE)
            return
        self.theta = theta

    def _restart(self, known_within: float) -> None:
        typical = max(float(self.theta.sum()), _SHORTEST_S)
        size = np.maximum(self.theta, _SMALLEST_SHARE * typical)  # a coefficient of 0 is not known exactly either
        self._information: _Vector = np.diag((_NOISE / (known_within * size)) ** 2)
        self._moment: _Vector = self._information @ self.theta
        self._scale = _SCALE_RANGE[1]
        self._steps = 0
        self._run = 0.0

    def _limit(self) -> float:
        return _CLIP * _SIGMA_PER_MEDIAN * self._scale

    def _changed(self, error: float) -> bool:
        """Whether errors to one side have become so many that they are no outliers; counts this one."""
        if abs(error) <= max(self._limit(), math.log(_CHANGED_RATIO)):
            self._run -= math.copysign(min(_CHANGED_LEAK, abs(self._run)), self._run)
        else:
            self._run += math.copysign(1.0, error)
        return abs(self._run) >= _CHANGED_STEPS

    def _follow_scale(self, size: float) -> None:
        """Move the median of the errors' sizes: up after a larger one, down after a smaller one, by equal steps."""
        step = _SCALE_RATE * (0.5 if size > self._scale else -0.5)
        lowest, highest = _SCALE_RANGE
        self._scale = max(lowest, min(highest, self._scale * math.exp(step)))
