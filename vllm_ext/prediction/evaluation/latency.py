"""What a prediction costs: wall time per prompt, text in, quantiles out, on the encoder's threads.

A proxy is one forward pass through its transformer, tokenising included. Ours is the same pass, or half of it where the
encoder was tuned, then a search of the store, the decoder, and the combination. Learned weights don't change the time,
so nothing needs to be trained for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.evaluation.predictor import Predictor
from vllm_ext.prediction.evaluation.proxy import Proxy
from vllm_ext.prediction.evaluation.rows import Prompts
from vllm_ext.prediction.evaluation.tuned import Tuned

Call = Callable[[Sequence[str]], object]
"""Predicts the output lengths of some texts."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Wall time per prompt in milliseconds."""

    mean_ms: float
    median_ms: float


def time_calls(
    calls: dict[str, Call],
    texts: Sequence[str],
    *,
    batch: int,
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Timing]:
    """Time each call on all texts, a batch at a time, the calls taking turns so that other load meets all alike.

    Of ``repeats`` timings of one batch the fastest counts. A first round on the first batch is not measured.

    Raises:
        ValueError: there is no text, or a number is below 1.
    """
    if not texts or batch < 1 or repeats < 1:
        raise ValueError(f"{len(texts)} texts, batch={batch!r}, repeats={repeats!r}: must be at least 1")
    for call in calls.values():
        call(texts[:batch])
    found: dict[str, list[float]] = {name: [] for name in calls}
    for start in range(0, len(texts), batch):
        some = texts[start : start + batch]
        fastest = dict.fromkeys(calls, float("inf"))
        for _ in range(repeats):
            for name, call in calls.items():
                started = clock()
                call(some)
                fastest[name] = min(fastest[name], (clock() - started) / len(some))
        for name, seconds in fastest.items():
            found[name].append(seconds)
    return {
        name: Timing(mean_ms=1e3 * float(np.mean(times)), median_ms=1e3 * float(np.median(times)))
        for name, times in found.items()
    }


def call_of(predictor: Predictor, encoder: Encoder) -> Call:
    """Return a call that takes texts: proxies and `Tuned` read them themselves, the others are given embeddings.

    Prompt lengths are not counted, as nothing that reads prompts asks for them.
    """
    width = 0 if isinstance(predictor, Proxy | Tuned) else encoder.dim

    def call(texts: Sequence[str]) -> object:
        vectors = encoder.encode(texts) if width else np.zeros((len(texts), 0), dtype=np.float32)
        return predictor.predict(
            Prompts(texts=tuple(texts), tokens=np.ones(len(texts), dtype=np.int64), vectors=vectors)
        )

    return call
