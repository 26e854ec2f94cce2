"""What the tests of the predictor that comes with the package share: an encoder that costs nothing, and trainings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ext.config import PredictorConfig
from vllm_ext.prediction import decoder_file
from vllm_ext.prediction.decoder import Decoder, DecoderSpec
from vllm_ext.prediction.estimate import Estimate
from vllm_ext.prediction.folder import DECODER
from vllm_ext.prediction.service.predictor import FinishedPrompt, Prompt, RetrievalPredictor

from .parts import make_config

TOPICS = ("tides", "taxes", "tea", "trains")
DIM = 2 * len(TOPICS)


class FakeEncoder:
    """Texts of one topic, their first word, are similar (0.9 and above), those of two are not; equal ones are equal."""

    made: FakeEncoder

    def __init__(self, model: str | None, **options: Any) -> None:
        self.options = {"model": model, **options}
        self.name, self.dim = model or "fake", DIM
        self.batches: list[list[str]] = []
        FakeEncoder.made = self

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.batches.append(list(texts))
        return np.stack([vector_of(text) for text in texts])


def vector_of(text: str) -> NDArray[np.float32]:
    topic = TOPICS.index(text.split()[0])
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass")).digest()
    detail = np.frombuffer(digest[: len(TOPICS)], np.uint8) / 255
    vector: NDArray[np.float64] = np.concatenate([np.eye(len(TOPICS))[topic], 0.2 * detail])
    vector /= np.linalg.norm(vector)
    return vector.astype(np.float32)


class NoRefresh:
    """Stands for `DecoderRefresh`: a training ends when the test says so."""

    made: NoRefresh

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self.done = False
        self.calls: list[object] = []
        NoRefresh.made = self

    def start_if_due(self, inserted: int, trained_on: int) -> None:
        self.calls.append((inserted, trained_on))

    def finished(self) -> bool:
        done, self.done = self.done, False
        return done

    def stop(self) -> None:
        self.calls.append("stop")


def retrieval(**options: Any) -> PredictorConfig:
    return make_config(**{"factory": None, "strategy": "alise", **options})


def prompt(text: str, max_tokens: int = 1000, model: str = "m", prompt_tokens: int = 0) -> Prompt:
    return Prompt(text, max_tokens, model, prompt_tokens)


def finish(predictor: RetrievalPredictor, *rows: tuple[str, int], model: str = "m", time_s: float = 1.0) -> None:
    """Ask for prompts and let them end with these lengths."""
    prompts = [prompt(text, model=model) for text, _ in rows]
    predictor.predict(prompts)
    predictor.learn([FinishedPrompt(asked, tokens, time_s) for asked, (_, tokens) in zip(prompts, rows, strict=True)])


def lengths(found: Sequence[Estimate | None]) -> list[tuple[int, int, str] | None]:
    return [None if estimate is None else estimate[:3] for estimate in found]


def write_decoder(
    folder: Path, length: float, *, encoder: str = "fake", num_examples: int = 50, features: tuple[str, ...] = ()
) -> None:
    """Write a decoder that says the same of every prompt: P50 = ``length``, P90 twice as much, rounded up.

    With a feature, P50 is ``length`` times e to the power of it.
    """
    spec = DecoderSpec(
        dim=DIM, hidden=(), features=features, encoder=encoder, max_tokens=10_000, num_examples=num_examples
    )
    tensors = {name: np.zeros(shape, np.float32) for name, shape in spec.shapes().items()}
    tensors["feature_scale"] = np.ones(spec.shapes()["feature_scale"], np.float32)
    tensors["weight0"][DIM:, 0] = 1
    tensors["bias0"] = np.array([np.log(length), np.log(np.exp(np.log(1.99)) - 1)], np.float32)
    decoder_file.save(Decoder(spec, tensors), folder / DECODER)
