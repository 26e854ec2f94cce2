"""Timing of predictions, with a clock of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_ext.prediction.evaluation.latency import call_of, time_calls
from vllm_ext.prediction.evaluation.learned import Combined, Knowledge
from vllm_ext.prediction.evaluation.proxy import ProxyClassifier
from vllm_ext.prediction.evaluation.rows import Prompts

from .made_up import DIM, requests


class Clock:
    """Goes on when a call says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_time_per_prompt_is_that_of_the_fastest_repeat_of_each_batch() -> None:
    clock = Clock()
    took: Iterator[float] = iter([100.0, 0.4, 0.2, 0.9, 0.3, 1.0, 0.5])  # a first round, then two batches, three times

    def call(texts: Sequence[str]) -> None:
        clock.now += next(took)

    found = time_calls({"a": call}, ["x", "y", "z"], batch=2, repeats=3, clock=clock)
    # 0.2 s for two prompts, 0.3 s for one.
    assert found["a"].mean_ms == pytest.approx((100 + 300) / 2)
    assert found["a"].median_ms == pytest.approx(200)


def test_calls_take_turns() -> None:
    order: list[str] = []
    calls = {name: lambda texts, name=name: order.append(name) for name in "ab"}
    time_calls(calls, ["x"], batch=1, repeats=2)
    assert order == ["a", "b", "a", "b", "a", "b"]


@pytest.mark.parametrize(("texts", "batch"), [([], 1), (["x"], 0)])
def test_nothing_to_time_is_an_error(texts: list[str], batch: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        time_calls({}, texts, batch=batch)


def test_proxies_read_the_text_and_ours_its_embedding() -> None:
    class Encoder:
        dim = DIM
        asked = 0

        def encode(self, texts: Sequence[str]) -> np.ndarray:
            self.asked += len(texts)
            return np.eye(DIM, dtype=np.float32)[: len(texts)]

        def window_of(self, text: str) -> str:
            return text

    encoder: Any = Encoder()
    knowledge = Knowledge(DIM)
    knowledge.fit(requests(60))
    said: Any = call_of(Combined("alise", knowledge), encoder)(["one", "two"])
    assert len(said.tokens) == 2
    assert encoder.asked == 2

    read: list[Prompts] = []
    proxy = ProxyClassifier(encoder)
    proxy._model = SimpleNamespace(forward=lambda texts: np.zeros((len(texts), 10)))  # type: ignore[assignment]
    proxy._assume()
    original = proxy.predict
    proxy.predict = lambda prompts: (read.append(prompts), original(prompts))[1]  # type: ignore[method-assign]
    call_of(proxy, encoder)(["one", "two"])
    assert read[0].texts == ("one", "two")
    assert encoder.asked == 2
