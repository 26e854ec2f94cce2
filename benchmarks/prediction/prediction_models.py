"""What prediction.py compares: the predictor that ships, parts of it, and networks. A part of prediction.py."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.config.prediction import PredictorConfig
from vllm_ext.contract.length_distribution import LengthDistribution, Prediction
from vllm_ext.prediction.encoder import Encoder, find_model
from vllm_ext.prediction.evaluate import History
from vllm_ext.prediction.learned import LearnedPredictor
from vllm_ext.prediction.neighbours import Near
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt

SHIPPED, RIDGE, MLP, HISTORY, PROXY = "ridge+neighbours", "ridge", "mlp", "history", "proxy"
ROWS = (SHIPPED, RIDGE, MLP, HISTORY)
"""What is always compared; `PROXY` takes minutes a data set and is asked for."""
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


class Network:
    """A model of the log length, trained once.

    Its residuals on a held-out fifth make the distribution, as the regression's do.
    """

    name = ""

    def __init__(self, encoder: Cached, seed: int) -> None:
        self._encoder, self._seed = encoder, seed
        self._rows: list[FinishedPrompt] = []
        self._residuals = np.zeros(1)

    def predict(self, prompts: Sequence[Prompt]) -> list[Prediction | None]:
        """Answer with the network."""
        points = self._points(prompts)
        return [
            Prediction(LengthDistribution.of(np.exp(np.clip(point + self._residuals, 0, 13)).round()), self.name)
            for point in points
        ]

    def learn(self, finished: Sequence[FinishedPrompt]) -> None:
        """Remember; what comes after the training is not learned."""
        self._rows += finished

    def fit(self) -> None:
        """Train."""
        order = np.random.default_rng(self._seed).permutation(len(self._rows))
        held, used = order[: len(order) // 5], order[len(order) // 5 :]
        prompts, logs = [done.prompt for done in self._rows], np.log([done.tokens for done in self._rows])
        self._train([prompts[i] for i in used], logs[used])
        self._residuals = np.quantile(logs[held] - self._points([prompts[i] for i in held]), _LEVELS)

    def status(self) -> dict[str, int]:
        """As of `PromptPredictor`."""
        return {"entries": len(self._rows), "examples": len(self._rows)}

    def close(self) -> None:
        """Nothing to let go of."""

    def _train(self, prompts: Sequence[Prompt], logs: npt.NDArray[np.float64]) -> None:
        raise NotImplementedError

    def _points(self, prompts: Sequence[Prompt]) -> npt.NDArray[np.float64]:
        raise NotImplementedError


class Mlp(Network):
    """The decoder of ALISE's kind: a network from the embedding and the log prompt length to the log length."""

    name = MLP

    def _train(self, prompts: Sequence[Prompt], logs: npt.NDArray[np.float64]) -> None:
        from sklearn.neural_network import MLPRegressor

        self._model = MLPRegressor(
            hidden_layer_sizes=(512, 256), early_stopping=True, validation_fraction=0.15, n_iter_no_change=6,
            max_iter=60, alpha=1e-2, batch_size=64, random_state=self._seed,
        )  # fmt: skip
        self._model.fit(self._columns(prompts), logs)

    def _points(self, prompts: Sequence[Prompt]) -> npt.NDArray[np.float64]:
        found: npt.NDArray[np.float64] = self._model.predict(self._columns(prompts))
        return found

    def _columns(self, prompts: Sequence[Prompt]) -> npt.NDArray[np.float64]:
        vectors = self._encoder.encode([prompt.text for prompt in prompts])
        tokens = np.log1p([prompt.prompt_tokens for prompt in prompts])
        return np.concatenate((vectors * np.sqrt(vectors.shape[1]), tokens[:, None] / 2), axis=1, dtype=np.float64)


class Proxy(Network):
    """A proxy model as others serve with: the whole encoder fine-tuned, with a linear head, on the log length.

    Source: SSJF (Qiu et al., 2024), whose proxy is BERT-base; here it is the encoder that the predictor ships with, so
    that fine-tuning and not size is what differs.
    """

    name = PROXY
    _BATCH, _EPOCHS, _MAX_TOKENS = 16, 3, 128

    def _train(self, prompts: Sequence[Prompt], logs: npt.NDArray[np.float64]) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.manual_seed(self._seed)
        self._body = SentenceTransformer(str(find_model(None)[1]), device="cpu")
        self._head = torch.nn.LazyLinear(1)
        self._forward(prompts[:1])  # the head takes the encoder's width
        self._centre, self._spread = float(logs.mean()), float(logs.std()) or 1.0
        targets = torch.tensor((logs - self._centre) / self._spread, dtype=torch.float32)
        optimiser = torch.optim.AdamW(
            [{"params": self._body.parameters(), "lr": 5e-5}, {"params": self._head.parameters(), "lr": 1e-3}]
        )
        steps = self._EPOCHS * -(-len(prompts) // self._BATCH)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, [5e-5, 1e-3], total_steps=steps, pct_start=0.1)
        by_length = np.argsort([prompt.prompt_tokens for prompt in prompts], kind="stable")
        batches = np.array_split(by_length, -(-len(prompts) // self._BATCH))  # alike in length: less padding
        rng = np.random.default_rng(self._seed)
        self._body.train()
        for _ in range(self._EPOCHS):
            for number in rng.permutation(len(batches)):
                chosen = batches[number]
                loss = torch.nn.functional.mse_loss(self._forward([prompts[i] for i in chosen]), targets[chosen])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                schedule.step()
        self._body.eval()

    def _points(self, prompts: Sequence[Prompt]) -> npt.NDArray[np.float64]:
        import torch

        with torch.inference_mode():
            found = [self._forward(prompts[i : i + 64]).numpy() for i in range(0, len(prompts), 64)]
        return np.concatenate(found).astype(np.float64) * self._spread + self._centre

    def _forward(self, prompts: Sequence[Prompt]) -> Any:
        tokens = self._body.tokenizer(
            [prompt.text for prompt in prompts],
            padding=True, truncation=True, max_length=self._MAX_TOKENS, return_tensors="pt",
        )  # fmt: skip
        return self._head(self._body(dict(tokens))["sentence_embedding"]).squeeze(1)


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
    if name in (MLP, PROXY):
        return (Mlp if name == MLP else Proxy)(encoder, seed)
    kind = LearnedPredictor if name == SHIPPED else RidgeAlone
    return kind(PredictorConfig(batch_size=512, seed=seed), folder, encoder)
