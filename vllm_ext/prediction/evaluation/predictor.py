"""What is compared: something that learns from requests that finished, and predicts those to come."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.evaluation.measures import Predicted
from vllm_ext.prediction.evaluation.rows import Examples, Ints, Prompts

LEVELS = (0.5, 0.9)
"""Quantiles that are predicted."""


class Predictor(Protocol):
    """A way to predict output lengths. `fit` comes first, and replaces what an earlier one learned."""

    name: str

    def fit(self, train: Examples) -> None:
        """Learn from finished requests.

        Raises:
            ValueError: they are too few, or cannot be learned from.
        """
        ...

    def predict(self, prompts: Prompts) -> Predicted:
        """Predict requests from what is known of them before they run."""
        ...


def whole(p50: npt.ArrayLike, p90: npt.ArrayLike, classes: Ints | None = None) -> Predicted:
    """Return whole tokens: P50 rounded, P90 rounded up, 1 <= P50 <= P90.

    Args:
        p50: [n], finite, in tokens.
        p90: The same.
        classes: As of `Predicted`.
    """
    tokens = np.maximum(np.rint(np.asarray(p50, dtype=np.float64)), 1).astype(np.int64)
    bound = np.ceil(np.asarray(p90, dtype=np.float64) * (1 - 1e-9)).astype(np.int64)
    return Predicted(tokens, np.maximum(bound, tokens), classes)


def constant(p50: float, p90: float, count: int) -> Predicted:
    """Return the same prediction for so many requests."""
    return whole(np.full(count, p50), np.full(count, p90))
