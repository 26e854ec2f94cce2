"""How good are predicted output lengths? Every measure, with its formula.

l is the true length, p the predicted one, u the predicted P90, all in tokens, over n requests.

| measure | formula | better |
|---|---|---|
| `accuracy_200` | share with p and l in the same bin of 200 tokens: floor(p / 200) = floor(l / 200) | higher |
| `accuracy_deciles` | share with the predicted and the true length in the same tenth of the training lengths | higher |
| `within_one_decile` | share at most one tenth off | higher |
| `relative_error` | mean of abs(p - l) / l | lower |
| `median_relative_error` | median of abs(p - l) / l | lower |
| `total_error` | sum of abs(p - l) / sum of l: long requests weigh as they cost | lower |
| `tau` | Kendall's tau-b of p and l: 1 ordered alike, 0 by chance or constant | higher |
| `pair_accuracy` | share of pairs of different l that p orders rightly; equal p count half | higher |
| `coverage_p90` | share with l <= u | 0.9 |
| `pinball` | pinball loss of ln p as median and ln u as P90, in nats | lower |

Source: ALISE, Table 2: accuracy in "evenly divided bins", whose number it does not state (200 tokens is the simulator's
choice, `simulation.metrics.BUCKET_TOKENS`), and "prediction error" between predicted and actual lengths, which it does
not define: `relative_error` is the plain reading, `total_error` is the one that short answers don't dominate. Tenths
of the lengths as classes: S3, SSJF.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.evaluation.rows import Ints

BIN_TOKENS = 200
"""Width of the even bins; that of `simulation.metrics.BUCKET_TOKENS`."""
NUM_CLASSES = 10
_ROWS_AT_ONCE = 512
HIGHER, LOWER = "higher", "lower"


class Predicted(NamedTuple):
    """What a predictor said of n requests."""

    tokens: Ints
    """[n], expected output length, at least 1."""
    p90: Ints
    """[n], bound that nine in ten stay within, at least ``tokens``."""
    classes: Ints | None = None
    """[n], the likeliest class of `Deciles`, where a predictor says so itself; None: that of ``tokens``."""

    def take(self, picked: npt.NDArray[np.intp]) -> Predicted:
        """Return what was said of the picked requests, in the order of ``picked``."""
        return Predicted(self.tokens[picked], self.p90[picked], None if self.classes is None else self.classes[picked])


class Deciles:
    """Tenths of the training lengths: class 0 holds the shortest, `NUM_CLASSES` - 1 the longest."""

    def __init__(self, lengths: Ints) -> None:
        """Lay the edges between equal shares of the lengths; where many are equal, classes stay empty."""
        last = np.ceil(np.arange(1, NUM_CLASSES) * len(lengths) / NUM_CLASSES).astype(np.int64) - 1
        self.edges: Ints = np.sort(lengths)[last]
        """[9], lengths in tokens; an edge belongs to the class below it."""

    def of(self, lengths: npt.ArrayLike) -> Ints:
        """Return the class of each length, 0 to 9."""
        return np.searchsorted(self.edges, np.asarray(lengths), side="left").astype(np.int64)


def score(predicted: Predicted, lengths: Ints, deciles: Deciles) -> dict[str, float]:
    """Return all measures of the table above by name.

    Raises:
        ValueError: nothing to measure, or the two differ in number.
    """
    p, u, l = (np.asarray(a, dtype=np.int64) for a in (predicted.tokens, predicted.p90, lengths))  # noqa: E741
    if not len(l) or p.shape != l.shape or u.shape != l.shape:
        raise ValueError(f"{p.shape} and {u.shape} predictions for {l.shape} lengths: must be as many, and some")
    tau, pair_accuracy = _order(p, l)
    off = np.abs(deciles.of(p) - deciles.of(l))
    exact = off if predicted.classes is None else predicted.classes - deciles.of(l)
    missed = np.abs(p - l)
    return {
        "accuracy_200": float((p // BIN_TOKENS == l // BIN_TOKENS).mean()),
        "accuracy_deciles": float((exact == 0).mean()),
        "within_one_decile": float((off <= 1).mean()),
        "relative_error": float((missed / l).mean()),
        "median_relative_error": float(np.median(missed / l)),
        "total_error": float(missed.sum() / l.sum()),
        "tau": tau,
        "pair_accuracy": pair_accuracy,
        "coverage_p90": float((l <= u).mean()),
        "pinball": _pinball(p, l, 0.5) + _pinball(u, l, 0.9),
    }


MEASURES = {
    "accuracy_200": HIGHER,
    "accuracy_deciles": HIGHER,
    "within_one_decile": HIGHER,
    "relative_error": LOWER,
    "median_relative_error": LOWER,
    "total_error": LOWER,
    "tau": HIGHER,
    "pair_accuracy": HIGHER,
    "coverage_p90": HIGHER,
    "pinball": LOWER,
}
"""Names of all measures, and which direction is better (of coverage: up to 0.9)."""


def _pinball(quantile: Ints, lengths: Ints, level: float) -> float:
    missed = np.log(lengths) - np.log(quantile)
    return float(np.maximum(level * missed, (level - 1) * missed).mean())


def _order(p: Ints, l: Ints) -> tuple[float, float]:  # noqa: E741
    """Return tau-b and the share of pairs ordered rightly; 0 and 0.5 where either is constant.

    Counts all pairs, a few rows at a time: n = 10,000 takes a second and little memory.
    """
    concordance, differ_p, differ_l = 0, 0, 0
    for start in range(0, len(l), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        sign_p = np.sign(p[rows, None] - p[None, :]).astype(np.int8)
        sign_l = np.sign(l[rows, None] - l[None, :]).astype(np.int8)
        concordance += int((sign_p * sign_l).sum(dtype=np.int64))
        differ_p += int(np.count_nonzero(sign_p))
        differ_l += int(np.count_nonzero(sign_l))
    if not differ_p or not differ_l:
        return 0.0, 0.5
    return concordance / float(np.sqrt(float(differ_p) * float(differ_l))), 0.5 + concordance / differ_l / 2


def bootstrap(
    first: Predicted, second: Predicted, lengths: Ints, measure: Callable[[Predicted, Ints], float], *,
    draws: int = 200, seed: int = 0,
) -> tuple[float, float]:  # fmt: skip
    """Return by how much a measure of ``first`` exceeds that of ``second``, and the standard error of the difference.

    Both are measured on the same resampled requests, so that what is hard for both does not count.
    """
    rng = np.random.default_rng(seed)

    def difference(rows: npt.NDArray[np.int64]) -> float:
        one, other = (Predicted(p.tokens[rows], p.p90[rows]) for p in (first, second))
        return measure(one, lengths[rows]) - measure(other, lengths[rows])

    drawn = [difference(rng.integers(len(lengths), size=len(lengths))) for _ in range(draws)]
    return difference(np.arange(len(lengths))), float(np.std(drawn))
