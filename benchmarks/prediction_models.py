"""What prediction.py compares: the predictor that ships, parts of it, and a small network. A part of prediction.py."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.config_prediction import PredictorConfig
from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.evaluate import History
from vllm_ext.prediction.law import LengthLaw, Prediction
from vllm_ext.prediction.learned import LearnedPredictor
from vllm_ext.prediction.neighbours import Near
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt

SHIPPED, RIDGE, MLP, HISTORY = "ridge+neighbours", "ridge", "mlp", "history"
ROWS = (SHIPPED, RIDGE, MLP, HISTORY)
_LEVELS = np.linspace(0.0125, 0.9875, 40)
Vectors = npt.NDArray[np.float32]


class Cached:
    """An encoder that embeds each text once, and keeps vectors in a folder if one is given."""

    def __init__(self, encoder: Encoder, folder: Path | None) -> None:
        self.name, self.dim, self._encoder = encoder.name, encoder.dim, encoder
        self._file = None if folder is None else folder / "vectors.npz"
        self._known: dict[str, Vectors] = {}
        if self._file is not None and self._file.exists():
            with np.load(self._file, allow_pickle=False) as kept:
                if str(kept["encoder"]) == self.name:
                    self._known = dict(zip(kept["keys"].tolist(), kept["vectors"], strict=True))

    def encode(self, texts: Sequence[str]) -> Vectors:
        """As of `Encoder`."""
        keys = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:32] for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self._known}
        if new:
            self._known.update(zip(new, self._encoder.encode(list(new.values())), strict=True))
        return np.stack([self._known[key] for key in keys])

    def count_tokens(self, text: str) -> int:
        """As of `Encoder`."""
        return self._encoder.count_tokens(text)

    def keep(self) -> None:
        """Write what is known."""
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            keys, vectors = list(self._known), np.stack(list(self._known.values()))
            np.savez(self._file, keys=keys, vectors=vectors, encoder=self.name)


class RidgeAlone(LearnedPredictor):
    """The regression without neighbours."""

    def _near(self, prompts: Sequence[Prompt], vectors: Vectors) -> list[Near]:
        return [Near(np.empty(0, np.int64), np.empty(0))] * len(prompts)


class Mlp:
    """The decoder of ALISE's kind: a network from the embedding and the log prompt length to the log length.

    Its residuals on a held-out fifth make the law, as the regression's do.
    """

    def __init__(self, encoder: Cached, seed: int) -> None:
        self._encoder, self._seed = encoder, seed
        self._rows: list[FinishedPrompt] = []
        self._model: Any = None
        self._residuals = np.zeros(1)

    def predict(self, prompts: Sequence[Prompt]) -> list[Prediction | None]:
        """Answer with the network."""
        points = self._model.predict(self._columns(prompts))
        return [
            Prediction(LengthLaw.of(np.exp(np.clip(point + self._residuals, 0, 13)).round()), MLP) for point in points
        ]

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        """Remember; what comes after the training is not learned."""
        self._rows += finished

    def fit(self) -> None:
        """Train."""
        from sklearn.neural_network import MLPRegressor

        order = np.random.default_rng(self._seed).permutation(len(self._rows))
        held, used = order[: len(order) // 5], order[len(order) // 5 :]
        x = self._columns([done.prompt for done in self._rows])
        y = np.log([done.tokens for done in self._rows])
        self._model = MLPRegressor(
            hidden_layer_sizes=(512, 256), early_stopping=True, validation_fraction=0.15, n_iter_no_change=6,
            max_iter=60, alpha=1e-2, batch_size=64, random_state=self._seed,
        )  # fmt: skip
        self._model.fit(x[used], y[used])
        self._residuals = np.quantile(y[held] - self._model.predict(x[held]), _LEVELS)

    def status(self) -> dict[str, int]:
        """As of `PromptPredictor`."""
        return {"entries": len(self._rows), "examples": len(self._rows)}

    def close(self) -> None:
        """Nothing to let go of."""

    def _columns(self, prompts: Sequence[Prompt]) -> npt.NDArray[np.float64]:
        vectors = self._encoder.encode([prompt.text for prompt in prompts])
        tokens = np.log1p([prompt.prompt_tokens for prompt in prompts])
        return np.concatenate((vectors * np.sqrt(vectors.shape[1]), tokens[:, None] / 2), axis=1, dtype=np.float64)


class Silent(History):
    """The history alone: no predictor."""

    def predict(self, prompts: Sequence[object]) -> list[Any]:
        """Return nothing; the history stands in."""
        return [None] * len(prompts)

    def fit(self) -> None:
        """Nothing to fit."""

    def status(self) -> dict[str, int]:
        """As of `PromptPredictor`."""
        return {}

    def close(self) -> None:
        """Nothing to let go of."""


def made(name: str, encoder: Cached, folder: Path, seed: int) -> Any:
    """Return a new predictor of a row."""
    if name == HISTORY:
        return Silent()
    if name == MLP:
        return Mlp(encoder, seed)
    kind = LearnedPredictor if name == SHIPPED else RidgeAlone
    return kind(PredictorConfig(batch_size=512, seed=seed), folder, encoder)
