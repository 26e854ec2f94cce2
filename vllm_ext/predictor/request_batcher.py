"""The predictor's queue, and what becomes of its questions. Time is handed in, in monotonic seconds."""

from __future__ import annotations

import logging
import operator
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from vllm_ext.contract.length_distribution import LEVELS, Prediction
from vllm_ext.prediction.predictor import PromptPredictor
from vllm_ext.predictor.messages import ERROR, OVERLOAD, UNKNOWN, Answer, Ask, is_distribution

logger = logging.getLogger("vllm_ext.predictor")

_LONGEST_NAME = 64


class Waiting(NamedTuple):
    """A question in the queue."""

    peer: bytes
    """Who asked."""
    ask: Ask
    since_s: float
    """When it came."""


class Errors:
    """Counts what goes wrong with a predictor; the first is logged with its traceback."""

    def __init__(self) -> None:
        self.count = 0

    def note(self, what: str, error: BaseException) -> None:
        """Count an error in, say, ``predict``."""
        self.count += 1
        if self.count == 1:
            logger.error("the length predictor failed in %s; counted from now on, not logged", what, exc_info=error)


class RequestBatcher:
    """Questions that wait. One that waited for ``timeout_s`` is let go: who asked has given it up."""

    def __init__(self, *, queue_limit: int, batch_size: int, timeout_s: float) -> None:
        self._queue: deque[Waiting] = deque()
        self._queue_limit, self._batch_size, self._timeout_s = queue_limit, batch_size, timeout_s

    def __len__(self) -> int:
        return len(self._queue)

    def ask(self, peer: bytes, ask: Ask, now: float) -> Answer | None:
        """Queue a question; returns the answer at once where the queue is full."""
        self._let_go(now)
        if len(self._queue) >= self._queue_limit:
            return Answer(ask.req_id, source=OVERLOAD)
        self._queue.append(Waiting(peer, ask, now))
        return None

    def batch(self, now: float) -> list[Waiting]:
        """Take the questions off that are to be predicted together."""
        self._let_go(now)
        return [self._queue.popleft() for _ in range(min(len(self._queue), self._batch_size))]

    def _let_go(self, now: float) -> None:
        while self._queue and now - self._queue[0].since_s > self._timeout_s:
            self._queue.popleft()


def answers(predictor: PromptPredictor, batch: Sequence[Waiting], errors: Errors) -> list[Answer]:
    """Return the answer to each question; what the predictor raises, or says that is no length, costs all of them."""
    try:
        found = list(predictor.predict([waiting.ask.prompt for waiting in batch]))
        if len(found) != len(batch):
            raise ValueError(f"predict: {len(found)} predictions for {len(batch)} prompts")
        return [_answer(waiting.ask.req_id, prediction) for waiting, prediction in zip(batch, found, strict=True)]
    except Exception as error:  # noqa: BLE001 - whatever a predictor raises costs these prompts their predictions
        errors.note("predict", error)
        return [Answer(waiting.ask.req_id, source=ERROR) for waiting in batch]


def _answer(req_id: str, prediction: Prediction | None) -> Answer:
    if prediction is None:
        return Answer(req_id, source=UNKNOWN)
    quantiles = tuple(map(operator.index, prediction.distribution.quantiles()))
    if not is_distribution(quantiles):
        raise ValueError(f"predict: quantiles={quantiles!r}: must be {len(LEVELS)} ascending lengths from 1")
    source = prediction.source
    if not (isinstance(source, str) and 1 <= len(source) <= _LONGEST_NAME and source.isprintable()):
        raise ValueError(f"predict: source={source!r}: must be a printable text of 1 to {_LONGEST_NAME}")
    return Answer(req_id, quantiles, source)
