"""Proxy models in the manner of S3 and SSJF: a small transformer encoder fine-tuned, end to end, for output lengths.

- `ProxyClassifier` (S3): classes are the tenths of the training lengths; cross entropy. Its median and P90 are read off
  the classes' probabilities, so that it is not held to the middle of its likeliest class.
- `ProxyRegressor` (SSJF): the log length; L1 loss, which has the median as its best answer. P90 is the median plus the
  90 % quantile of what it missed on held-out rows.

Both start from the weights of the predictor's own encoder, average over tokens as it does, and see the same window of a
prompt, so that what differs is the method. They get what a fair opponent needs: all weights trained, AdamW with warm-up
and linear decay, early stopping on held-out rows, the best epoch kept.

Source: S3 (Jin et al., 2023) fine-tunes DistilBERT for ten length classes; SSJF (Qiu et al., 2024) BERT variants for
classes or a regression, best with L1 loss. Learning rates were chosen on Alpaca, ShareGPT and Dolly.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.evaluation.measures import NUM_CLASSES, Deciles, Predicted
from vllm_ext.prediction.evaluation.predictor import LEVELS, whole
from vllm_ext.prediction.evaluation.rows import EvaluationError, Examples, Prompts
from vllm_ext.prediction.fine_tuning import LengthTransformer
from vllm_ext.prediction.tuning_options import TuningOptions

Floats = npt.NDArray[np.float64]

MIN_EXAMPLES = 20
_VALIDATION_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class TuningReport:
    """How a proxy was trained."""

    seconds: float
    """Wall time."""
    epochs: int
    """Run."""
    best_epoch: int
    """Whose weights were kept; 0: none was better than the start."""
    validation_losses: tuple[float, ...]
    """Before training and after each epoch."""


class Proxy(ABC):
    """What both kinds share: the split, the training, the batches."""

    name: str
    outputs: int

    def __init__(
        self,
        encoder: Encoder,
        *,
        model: str | None = None,
        seed: int = 0,
        options: TuningOptions | None = None,
    ) -> None:
        """Nothing is loaded before `fit`.

        Args:
            encoder: Whose window and threads are taken; it is not changed.
            model: What the encoder was built from, whose weights are where training starts.
            seed: Of the head's weights, the split, the order and dropout.
            options: How it is trained; None for the defaults.
        """
        self._encoder = encoder
        self._source = model
        self._seed = seed
        self._options = options or TuningOptions()
        self._model: LengthTransformer | None = None
        self.report: TuningReport | None = None

    def fit(self, train: Examples) -> None:
        """Fine-tune from the encoder's weights.

        Raises:
            EvaluationError: fewer than 20 examples.
        """
        if len(train) < MIN_EXAMPLES:
            raise EvaluationError(f"{self.name}: {len(train)} examples, at least {MIN_EXAMPLES} are needed")
        started = time.perf_counter()
        order = np.random.default_rng([self._seed, 2]).permutation(len(train))
        held = max(1, round(_VALIDATION_SHARE * len(train)))
        targets = self._targets(train)
        model = self._load()
        losses, best = model.tune(
            train.prompts.texts, targets, fitted=order[held:], held=order[:held], loss=self._loss, options=self._options
        )
        self._model = model
        self._calibrate(model.forward([train.prompts.texts[i] for i in order[:held]]), train.take(order[:held]))
        self.report = TuningReport(
            seconds=time.perf_counter() - started,
            epochs=len(losses) - 1,
            best_epoch=best,
            validation_losses=tuple(round(loss, 4) for loss in losses),
        )

    def predict(self, prompts: Prompts) -> Predicted:
        """Return quantiles.

        Raises:
            EvaluationError: `fit` was not called.
        """
        if self._model is None:
            raise EvaluationError(f"{self.name}: fit comes before predict")
        return self._read(self._model.forward(prompts.texts))

    def untrained(self, precision: Literal["float32", "bfloat16"] = "float32") -> None:
        """Load the model with a random head instead of `fit`: enough to measure latency, which weights don't change."""
        self._model = self._load()
        self._model.compute_in(precision)
        self._assume()

    def _load(self) -> LengthTransformer:
        return LengthTransformer(self._encoder.window_of, self.outputs, model=self._source, seed=self._seed)

    @abstractmethod
    def _targets(self, train: Examples) -> npt.NDArray[Any]:
        """Return what is learned, [n]; what is needed to read answers is kept."""

    @abstractmethod
    def _loss(self, outputs: Any, targets: Any) -> Any:
        """Return the mean loss of outputs [n, `outputs`], as a tensor."""

    @abstractmethod
    def _calibrate(self, outputs: Floats, held: Examples) -> None:
        """Learn from held-out rows, after training."""

    @abstractmethod
    def _read(self, outputs: Floats) -> Predicted:
        """Turn outputs into predictions."""

    @abstractmethod
    def _assume(self) -> None:
        """Set what `_read` needs without any training."""


class ProxyClassifier(Proxy):
    """Ten classes, as S3 does."""

    name = "proxy-classifier"
    outputs = NUM_CLASSES

    def _targets(self, train: Examples) -> npt.NDArray[np.int64]:
        deciles = Deciles(train.lengths)
        ends = [float(train.lengths.min()), *deciles.edges, float(train.lengths.max())]
        self._log_ends: Floats = np.log(ends)
        return deciles.of(train.lengths)

    def _loss(self, outputs: Any, targets: Any) -> Any:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets)

    def _calibrate(self, outputs: Floats, held: Examples) -> None:
        """Probabilities are taken as they are."""

    def _read(self, outputs: Floats) -> Predicted:
        chances = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        reached = np.cumsum(chances / chances.sum(axis=1, keepdims=True), axis=1)
        p50, p90 = (np.exp([self._log_length(row, level) for row in reached]) for level in LEVELS)
        return whole(p50, p90, outputs.argmax(axis=1))

    def _log_length(self, reached: Floats, level: float) -> float:
        """Interpolate the log length at which the share ``level`` is reached; within a class it is spread evenly."""
        return float(np.interp(level, np.concatenate(([0.0], reached)), self._log_ends))

    def _assume(self) -> None:
        self._log_ends = np.log(np.geomspace(1, 1024, NUM_CLASSES + 1))


class ProxyRegressor(Proxy):
    """The log length, as SSJF does; standardised for training."""

    name = "proxy-regressor"
    outputs = 1

    def _targets(self, train: Examples) -> npt.NDArray[np.float32]:
        y = np.log(train.lengths)
        self._middle, self._scale = float(np.median(y)), max(float(y.std()), 1e-3)
        return ((y - self._middle) / self._scale).astype(np.float32)

    def _loss(self, outputs: Any, targets: Any) -> Any:
        return (outputs[:, 0] - targets).abs().mean()

    def _calibrate(self, outputs: Floats, held: Examples) -> None:
        self._gap = max(0.0, float(np.quantile(np.log(held.lengths) - self._median(outputs), LEVELS[1])))

    def _read(self, outputs: Floats) -> Predicted:
        median = self._median(outputs)
        return whole(np.exp(median), np.exp(median + self._gap))

    def _median(self, outputs: Floats) -> Floats:
        median: Floats = self._middle + self._scale * outputs[:, 0]
        return median

    def _assume(self) -> None:
        self._middle, self._scale, self._gap = 4.0, 1.0, 1.0


PROXIES: dict[str, type[Proxy]] = {proxy.name: proxy for proxy in (ProxyClassifier, ProxyRegressor)}
