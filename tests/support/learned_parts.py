"""What the tests of the learned predictor share: an encoder of words, stores and entries."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ext.config.prediction import PredictorConfig
from vllm_ext.prediction.learned import LearnedPredictor
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt
from vllm_ext.prediction.store import Entries, NewEntry, Store, joined

DIM = 32


class WordEncoder:
    """A text's vector is the mean of its words', which are random: texts that share words are similar."""

    def __init__(self, name: str = "words") -> None:
        self.name, self.dim = name, DIM
        self.encoded: list[str] = []

    def encode(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        self.encoded += texts
        return np.stack([vector_of(text) for text in texts])


def vector_of(text: str) -> npt.NDArray[np.float32]:
    words = text.split() or [""]
    total = sum(
        np.random.default_rng(zlib.crc32(word.encode("utf-8", "surrogatepass"))).standard_normal(DIM) for word in words
    )
    return np.asarray(total / np.linalg.norm(total), np.float32)


def made(folder: Path, encoder: WordEncoder | None = None, **options: Any) -> LearnedPredictor:
    return LearnedPredictor(PredictorConfig(**{"batch_size": 4096, **options}), folder, encoder or WordEncoder())


def done(text: str, tokens: int, *, aborted: bool = False, time_s: float = 1.0, **prompt: Any) -> FinishedPrompt:
    return FinishedPrompt(ask(text, **prompt), tokens, time_s, aborted)


def ask(text: str, max_tokens: int = 10**6, model: str = "m", **prompt: Any) -> Prompt:
    return Prompt(text, max_tokens, model, **prompt)


def store(folder: Path, *, encoder: str = "words", capacity: int = 10_000, max_mib: int = 64, **options: Any) -> Store:
    return Store(folder, DIM, encoder=encoder, capacity=capacity, max_mib=max_mib, **options)


def entry(text: str, tokens: int, **options: Any) -> NewEntry:
    return NewEntry(text, vector_of(text), tokens, **{"model": "m", **options})


def entries(some: Sequence[NewEntry]) -> Entries:
    """The same in columns, with ids from 1."""
    return Entries(
        ids=np.arange(1, len(some) + 1),
        vectors=np.array([each.vector for each in some], np.float16).reshape(-1, DIM),
        tokens=np.array([each.tokens for each in some], np.int64),
        prompt_tokens=np.array([each.prompt_tokens for each in some], np.int64),
        turns=np.array([each.turn for each in some], np.int64),
        aborted=np.array([each.aborted for each in some], np.bool_),
        models=[each.model for each in some],
        salts=[each.salt for each in some],
        tags=[each.tag for each in some],
        conversations=[each.conversation for each in some],
    )


def everything(of: Store) -> Entries:
    return joined(list(of.since(0)), DIM)
