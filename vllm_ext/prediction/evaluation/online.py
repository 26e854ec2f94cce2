"""Learning curve: predict a request, then learn from it, as a server does that begins with nothing or warm.

The decoder is trained as the service does: at 200 entries of the store, then whenever it grew by half, on the newest
20,000. One that is no better than constants leaves the earlier one in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ext.prediction.evaluation.learned import UNKNOWN, Combined, Knowledge
from vllm_ext.prediction.evaluation.measures import Deciles, Predicted, score
from vllm_ext.prediction.evaluation.priors import BucketHistory, GlobalHistory
from vllm_ext.prediction.evaluation.rows import EvaluationError, Examples, Vectors

CHECKPOINTS = (0, 100, 1000, 10_000)
"""Requests served."""
FIRST_TRAINING = 200
"""Entries of the store at which the decoder is trained first."""
GROWTH = 1.5
"""Factor of the store's size from one training to the next."""
STRATEGIES = ("alise", "shrunk")


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Requests between two checkpoints, and how well they were predicted."""

    served: int
    """Requests that had been served when the first of them was predicted."""
    requests: int
    scores: dict[str, dict[str, float]]
    """By predictor, as of `measures.score`; classes are tenths of the lengths of the whole stream."""


def learning_curve(
    stream: Examples,
    *,
    warm: Examples | None = None,
    checkpoints: Sequence[int] = CHECKPOINTS,
    seed: int = 0,
    on_request: Callable[[int], None] | None = None,
) -> list[Stretch]:
    """Serve a stream in its order.

    Args:
        stream: Embedded requests, those learned from before not among them.
        warm: What was learned before: a store filled, a decoder trained; None for a cold start.
        checkpoints: Ascending; the first is 0. Those beyond the stream's end are left out.
        seed: Of training and index.
        on_request: Told how many requests are done.

    Raises:
        EvaluationError: checkpoints don't ascend from 0, or there is no request.
    """
    if not len(stream) or list(checkpoints) != sorted(set(checkpoints)) or checkpoints[0] != 0:
        raise EvaluationError(f"checkpoints={tuple(checkpoints)!r}: must ascend from 0, with at least one request")
    server = _Server(stream.prompts.vectors.shape[1], warm, seed)
    for at in range(len(stream)):
        server.serve(stream.take(np.array([at])))
        if on_request is not None:
            on_request(at + 1)
    deciles = Deciles(stream.lengths)
    starts = [c for c in checkpoints if c < len(stream)]
    stretches = []
    for start, end in zip(starts, [*starts[1:], len(stream)], strict=True):
        said = {name: Predicted(*(np.array(column[start:end], np.int64) for column in columns))
                for name, columns in server.said.items()}  # fmt: skip
        scores = {name: score(predicted, stream.lengths[start:end], deciles) for name, predicted in said.items()}
        stretches.append(Stretch(served=start, requests=end - start, scores=scores))
    return stretches


class _Server:
    """What is known at a time, and what was said before."""

    def __init__(self, dim: int, warm: Examples | None, seed: int) -> None:
        self._knowledge = Knowledge(dim, seed=seed)
        self._strategies = [Combined(name, self._knowledge) for name in STRATEGIES]
        self._vectors: list[Vectors] = []
        self._lengths: list[int] = []
        self._prompt_tokens: list[int] = []
        self._buckets = BucketHistory()
        self._next_training = FIRST_TRAINING
        self.said: dict[str, tuple[list[int], list[int]]] = {
            name: ([], []) for name in (*STRATEGIES, BucketHistory.name, GlobalHistory.name)
        }
        if warm is not None:
            self._knowledge.add(warm.prompts.vectors, warm.lengths)
            self._vectors.extend(warm.prompts.vectors)
            self._lengths.extend(warm.lengths.tolist())
            self._prompt_tokens.extend(warm.prompts.tokens.tolist())
            self._buckets.fit(warm)
            self._train_if_due()

    def serve(self, request: Examples) -> None:
        """Predict one request, then learn from it."""
        history = self._knowledge.prior()
        for strategy in self._strategies:
            self._note(strategy.name, strategy.predict(request.prompts))
        for name in (BucketHistory.name, GlobalHistory.name):
            if history is None:
                constant = np.array([UNKNOWN.tokens])
                self._note(name, Predicted(constant, constant))
            elif name == GlobalHistory.name:
                self._note(name, Predicted(np.array([history.tokens]), np.array([history.p90])))
            else:
                self._note(name, self._buckets.predict(request.prompts))
        length = int(request.lengths[0])
        self._knowledge.add(request.prompts.vectors, request.lengths)
        self._vectors.append(request.prompts.vectors[0])
        self._lengths.append(length)
        self._prompt_tokens.append(int(request.prompts.tokens[0]))
        self._buckets.observe(int(request.prompts.tokens[0]), length)
        self._train_if_due()

    def _note(self, name: str, predicted: Predicted) -> None:
        self.said[name][0].append(int(predicted.tokens[0]))
        self.said[name][1].append(int(predicted.p90[0]))

    def _train_if_due(self) -> None:
        if len(self._lengths) >= self._next_training:
            lengths, tokens = (np.array(kept, np.int64) for kept in (self._lengths, self._prompt_tokens))
            self._knowledge.train_decoder(np.stack(self._vectors), lengths, tokens)
            self._next_training = round(GROWTH * len(self._lengths))
