"""Baselines that do not read the prompt: history, prompt length, the client's bound; and the oracle above all."""

from __future__ import annotations

import numpy as np

from vllm_ext.prediction.evaluation.measures import Predicted
from vllm_ext.prediction.evaluation.predictor import LEVELS, constant, whole
from vllm_ext.prediction.evaluation.rows import Examples, Ints, Prompts
from vllm_ext.prediction.history import LengthHistory
from vllm_ext.prediction.law import LengthLaw
from vllm_ext.prediction.length import LengthQuery

WINDOW = 1000
"""Finished requests that histories remember (Past-Future's default)."""
_FEWEST_FOR_SLOPE = 3


class GlobalHistory:
    """Median and P90 of the last `WINDOW` output lengths, the same for every request."""

    name = "history"

    def __init__(self) -> None:
        self._quantiles = (1.0, 1.0)

    def fit(self, train: Examples) -> None:
        """Remember the newest lengths."""
        p50, p90 = np.quantile(train.lengths[-WINDOW:], LEVELS)
        self._quantiles = (float(p50), float(p90))

    def predict(self, prompts: Prompts) -> Predicted:
        """Return the same for all."""
        return constant(*self._quantiles, len(prompts))


class BucketHistory:
    """Median and P90 of the last output lengths of prompts of like length: what the scheduler does without a predictor.

    Source: `vllm_ext.prediction.history`.
    """

    name = "bucket-history"

    def __init__(self) -> None:
        self._history = LengthHistory(WINDOW)

    def fit(self, train: Examples) -> None:
        """Start anew from the lengths, oldest first."""
        self._history = LengthHistory(WINDOW)
        for tokens, length in zip(train.prompts.tokens.tolist(), train.lengths.tolist(), strict=True):
            self.observe(tokens, length)

    def observe(self, prompt_tokens: int, length: int) -> None:
        """Remember one more finished request."""
        self._history.observe(_query(prompt_tokens), length)

    def predict(self, prompts: Prompts) -> Predicted:
        """Ask the history; before anything finished it says 1."""
        laws = [self._history.predict(_query(n)) or LengthLaw.point(1) for n in prompts.tokens.tolist()]
        found = [[law.quantile(level) for level in LEVELS] for law in laws]
        quantiles = np.array(found, dtype=np.float64).reshape(-1, 2)
        return whole(quantiles[:, 0], quantiles[:, 1])


class PromptLength:
    """Least squares of ln(output) on ln(prompt tokens); P50 and P90 from the residuals' quantiles."""

    name = "prompt-length"

    def __init__(self) -> None:
        self._slope = 0.0
        self._levels = (0.0, 0.0)

    def fit(self, train: Examples) -> None:
        """Fit the line; of fewer than three rows, or prompts of one length, a constant."""
        x, y = np.log(train.prompts.tokens), np.log(train.lengths)
        spread = float(x.var())
        fits = len(x) >= _FEWEST_FOR_SLOPE and spread > 0
        self._slope = float(((x - x.mean()) * (y - y.mean())).mean()) / spread if fits else 0.0
        p50, p90 = np.quantile(y - self._slope * x, LEVELS)
        self._levels = (float(p50), float(p90))

    def predict(self, prompts: Prompts) -> Predicted:
        """Return the line's quantiles."""
        p50, p90 = (np.exp(self._slope * np.log(prompts.tokens) + level) for level in self._levels)
        return whole(p50, p90)


class MaxTokens:
    """The client's bound, which conservative schedulers reserve; here one for all, as few clients choose their own."""

    name = "max-tokens"

    def __init__(self, max_tokens: int) -> None:
        """Take the bound, in tokens, at least 1."""
        self._max_tokens = max_tokens

    def fit(self, train: Examples) -> None:
        """Nothing is learned."""

    def predict(self, prompts: Prompts) -> Predicted:
        """Return the bound for all."""
        return constant(self._max_tokens, self._max_tokens, len(prompts))


class Oracle:
    """The true lengths: what perfect knowledge is worth. `reveal` must come before `predict`."""

    name = "oracle"

    def __init__(self) -> None:
        self._lengths: Ints = np.zeros(0, dtype=np.int64)

    def fit(self, train: Examples) -> None:
        """Nothing is learned."""

    def reveal(self, lengths: Ints) -> None:
        """Tell the true lengths of the requests that will be asked for."""
        self._lengths = lengths

    def predict(self, prompts: Prompts) -> Predicted:  # noqa: ARG002 - as the others
        """Return what was revealed."""
        return whole(self._lengths, self._lengths)


def _query(prompt_tokens: int) -> LengthQuery:
    return LengthQuery(num_prompt_tokens=prompt_tokens, max_tokens=2**31)
