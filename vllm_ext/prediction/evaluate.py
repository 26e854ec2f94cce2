"""How good are predicted output lengths? Drives a predictor through recorded requests and measures what it said.

l is the true length, p the predicted median, u the predicted P90, in tokens, over n requests.

| measure | formula | better |
|---|---|---|
| `tau` | Kendall's tau-b of p and l: 1 ordered alike, 0 by chance or constant | higher |
| `pinball` | pinball loss of ln p as median plus that of ln u as P90, in nats | lower |
| `coverage` | share with l <= u | 0.9 |
| `relative_error` | median of abs(p - l) / l | lower |
| `answered` | share that the predictor had an answer to; the history's distribution stands for the others | higher |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.contract.length_distribution import LengthDistribution
from vllm_ext.prediction.predictor import FinishedPrompt, PromptPredictor

MEASURES = ("tau", "pinball", "coverage", "relative_error", "answered")
LEARNED_AT_ONCE = 512
_PREDICTED_AT_ONCE = 16
_WINDOW = 1000
"""Lengths that the history remembers (`PredictionConfig.window`)."""
Progress = Callable[[int], None]


class Said(NamedTuple):
    """What was said of n requests, and what they became; columns of tokens, [n]."""

    p50: npt.NDArray[np.int64]
    p90: npt.NDArray[np.int64]
    true: npt.NDArray[np.int64]
    turns: npt.NDArray[np.int64]
    """Earlier turns of the conversation."""
    answered: npt.NDArray[np.bool_]

    def where(self, picked: npt.NDArray[np.bool_]) -> Said:
        """Return some of them."""
        return Said(self.p50[picked], self.p90[picked], self.true[picked], self.turns[picked], self.answered[picked])


class History:
    """The baseline: every request gets the distribution of the last lengths; as of `PromptPredictor`."""

    def __init__(self) -> None:
        self._lengths: list[int] = []

    def predict(self, prompts: Sequence[object]) -> list[LengthDistribution | None]:
        """Return the same distribution for all; None before anything ended."""
        distribution = LengthDistribution.of(self._lengths[-_WINDOW:]) if self._lengths else None
        return [distribution] * len(prompts)

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        """Remember lengths."""
        self._lengths += [done.tokens for done in finished if not done.aborted]


def learn(predictor: PromptPredictor, finished: Sequence[FinishedPrompt], progress: Progress | None = None) -> None:
    """Have a predictor learn recorded requests, some at a time."""
    for start in range(0, len(finished), LEARNED_AT_ONCE):
        predictor.learn(finished[start : start + LEARNED_AT_ONCE])
        if progress is not None:
            progress(min(start + LEARNED_AT_ONCE, len(finished)))


def split(
    finished: Sequence[FinishedPrompt], test_share: float, seed: int
) -> tuple[list[FinishedPrompt], list[FinishedPrompt]]:
    """Divide requests at random into those to learn from and those to judge by; a conversation is never divided.

    Equal single prompts are not divided either: a prompt that was learned is no test.

    Raises:
        ValueError: the share is not between 0 and 1, or fewer than two different prompts.
    """
    if not 0 < test_share < 1:
        raise ValueError(f"test_share={test_share!r}: must be above 0 and below 1")
    keys = [done.prompt.conversation or _normalised(done.prompt.text) for done in finished]
    different = list(dict.fromkeys(keys))
    if len(different) < 2:
        raise ValueError(
            f"{len(different)} different prompts: at least 2 are needed, to learn from one and judge by another"
        )
    order = np.random.default_rng([seed, 1]).permutation(len(different))
    tested = {different[at] for at in order[: min(max(1, round(test_share * len(different))), len(different) - 1)]}
    return (
        [done for done, key in zip(finished, keys, strict=True) if key not in tested],
        [done for done, key in zip(finished, keys, strict=True) if key in tested],
    )


def judge_split(predictor: PromptPredictor, history: History, tested: Sequence[FinishedPrompt]) -> Said:
    """Ask for requests, none of which was learned: first all first turns, and so on; each turn is learned when judged.

    Args:
        predictor: It has learned others.
        history: Stands in where the predictor has no answer.
        tested: To be judged by.
    """
    ordered = sorted(tested, key=lambda done: done.prompt.turn)
    parts = []
    for _, turn in groupby(ordered, key=lambda done: done.prompt.turn):
        same = list(turn)
        parts.append(_asked(predictor, history, same))
        learn(predictor, [done for done in same if done.prompt.conversation])
    return _joined(parts)


def judge_online(
    predictor: PromptPredictor,
    history: History,
    served: Sequence[FinishedPrompt],
    *,
    at_once: int = 64,
    progress: Progress | None = None,
) -> Said:
    """Ask for requests in order, each some requests before it is learned, as a server would.

    Args:
        predictor: As it is at the start.
        history: The baseline, which learns as well.
        served: In the order of their arrival.
        at_once: Requests that are asked for before the first of them is learned.
        progress: Told how many are done.
    """
    parts = []
    for start in range(0, len(served), at_once):
        some = served[start : start + at_once]
        parts.append(_asked(predictor, history, some))
        predictor.learn(some)
        history.learn(some)
        if progress is not None:
            progress(start + len(some))
    return _joined(parts)


def scores(said: Said) -> dict[str, float]:
    """Return the measures of the table above.

    Raises:
        ValueError: there is nothing to measure.
    """
    from scipy.stats import kendalltau

    if not len(said.true):
        raise ValueError("0 requests: there is nothing to measure")
    true = said.true.astype(np.float64)
    tau = float(kendalltau(said.p50, said.true).statistic) if len(true) > 1 else 0.0
    return {
        "tau": tau if np.isfinite(tau) else 0.0,
        "pinball": _pinball(said.p50, true, 0.5) + _pinball(said.p90, true, 0.9),
        "coverage": float((said.true <= said.p90).mean()),
        "relative_error": float(np.median(np.abs(said.p50 - true) / true)),
        "answered": float(said.answered.mean()),
    }


def _asked(predictor: PromptPredictor, history: History, some: Sequence[FinishedPrompt]) -> Said:
    distributions: list[LengthDistribution | None] = []
    for start in range(0, len(some), _PREDICTED_AT_ONCE):
        prompts = [done.prompt for done in some[start : start + _PREDICTED_AT_ONCE]]
        found = predictor.predict(prompts)
        instead = history.predict(prompts)
        distributions += [other if one is None else one.distribution for one, other in zip(found, instead, strict=True)]
    known = [
        distribution if distribution is not None else LengthDistribution.point(1) for distribution in distributions
    ]
    return Said(
        p50=np.array([distribution.p50 for distribution in known], np.int64),
        p90=np.array([distribution.p90 for distribution in known], np.int64),
        true=np.array([done.tokens for done in some], np.int64),
        turns=np.array([done.prompt.turn for done in some], np.int64),
        answered=np.array([distribution is not None for distribution in distributions], np.bool_),
    )


def _joined(parts: Sequence[Said]) -> Said:
    return Said(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _pinball(quantile: npt.NDArray[np.int64], true: npt.NDArray[np.float64], level: float) -> float:
    missed = np.log(true) - np.log(quantile)
    return float(np.maximum(level * missed, (level - 1) * missed).mean())


def _normalised(text: str) -> str:
    return " ".join(text.lower().split())
