"""The predictor's work between its connections: the queue, the batches, what is remembered until a request ends."""

from __future__ import annotations

import logging
import operator
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, SupportsIndex

from vllm_ext.prediction.estimate import LONGEST_TOKENS, Estimate
from vllm_ext.prediction.law import Prediction
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt, PromptPredictor
from vllm_ext.prediction.service.messages import ENDED, ERROR, EXPIRED, OVERLOAD, UNKNOWN, Ask, Status, Told
from vllm_ext.prediction.service.quality import Quality

logger = logging.getLogger(__name__)

_REMEMBERED = 16_384
"""Requests whose prompts are held until they finish, the oldest are forgotten first; 2 kB each at most."""
_LONGEST = 2**40
_LONGEST_NAME = 64


class Waiting(NamedTuple):
    """A question in the queue."""

    peer: int
    """Which connection asked."""
    ask: Ask
    since: float
    """When it came, in seconds of the monotonic clock."""


@dataclass(kw_only=True)
class _Open:
    """A request that was asked for and has not ended."""

    prompt: Prompt
    predicted: int = 0
    p90: int = 0


class Desk:
    """All of the process's state but its sockets.

    It is used by the event loop's thread only, except `predict` and `learn`, which run in threads of their own and
    touch nothing of it but the predictor.

    Whatever a predictor does, each question is answered once: what it raises, and what is no prediction, costs the
    questions of that batch theirs.
    """

    def __init__(self, *, queue_limit: int, batch_size: int, timeout_s: float) -> None:
        self._queue: deque[Waiting] = deque()
        self._queue_limit, self._batch_size, self._timeout_s = queue_limit, batch_size, timeout_s
        self._open: OrderedDict[tuple[int, str], _Open] = OrderedDict()
        self._remembered = max(_REMEMBERED, queue_limit)  # so that what is forgotten is not in the queue any more
        self._finished: deque[FinishedPrompt] = deque(maxlen=_REMEMBERED)  # bounded, as `learn` may hang
        self._quality = Quality()
        self._error_logged = False
        self.answered = 0
        self.errors = 0
        self.learned = 0

    @property
    def waiting(self) -> int:
        """Questions in the queue."""
        return len(self._queue)

    # --- what front ends say ----------------------------------------------------------------------------------------

    def ask(self, peer: int, ask: Ask, now: float) -> Told | None:
        """Queue a question; returns the answer at once where the queue is full."""
        if len(self._queue) >= self._queue_limit:
            return Told(ask.req_id, source=OVERLOAD)
        self._queue.append(Waiting(peer, ask, now))
        self._open.pop((peer, ask.req_id), None)  # asked once more: the newest from now on
        self._open[peer, ask.req_id] = _Open(prompt=_prompt(ask))
        if len(self._open) > self._remembered:
            self._open.popitem(last=False)
        return None

    def finished(self, peer: int, req_id: str, tokens: int) -> None:
        """Note that a request ended by itself after so many tokens; it will be learned."""
        request = self._open.pop((peer, req_id), None)
        if request is None or not 1 <= tokens <= LONGEST_TOKENS:
            return
        self._finished.append(FinishedPrompt(request.prompt, tokens, time.time()))
        if request.predicted:
            self._quality.add(request.predicted, request.p90, tokens)

    def gone(self, peer: int, req_id: str) -> None:
        """Forget an aborted request."""
        self._open.pop((peer, req_id), None)

    def hung_up(self, peer: int) -> None:
        """Forget all requests of a connection that closed."""
        self._queue = deque(waiting for waiting in self._queue if waiting.peer != peer)
        for key in [key for key in self._open if key[0] == peer]:
            del self._open[key]

    # --- what is done in the meantime -------------------------------------------------------------------------------

    def next_batch(self, now: float) -> tuple[list[Waiting], list[tuple[int, Told]]]:
        """Take questions off the queue.

        Returns:
            Those to predict now; and the answers, each with its connection, to those for which it is too late.
        """
        batch: list[Waiting] = []
        too_late: list[tuple[int, Told]] = []
        while self._queue and len(batch) < self._batch_size:
            waiting = self._queue.popleft()
            if (waiting.peer, waiting.ask.req_id) not in self._open:
                too_late.append((waiting.peer, Told(waiting.ask.req_id, source=ENDED)))
            elif now - waiting.since > self._timeout_s:
                too_late.append((waiting.peer, Told(waiting.ask.req_id, source=EXPIRED)))
            else:
                batch.append(waiting)
        self.answered += len(too_late)
        return batch, too_late

    def predict(
        self, predictor: PromptPredictor, batch: Sequence[Waiting]
    ) -> list[Estimate | Prediction | None] | None:
        """Ask the predictor; None where it failed. Runs in a thread of its own."""
        prompts = [_prompt(w.ask) for w in batch]
        try:
            return _checked(predictor.predict(prompts), len(prompts))
        except Exception as error:  # noqa: BLE001 - whatever a predictor raises costs these prompts their prediction
            self._failed("predict", error)
            return None

    def answers(
        self, batch: Sequence[Waiting], found: Sequence[Estimate | Prediction | None] | None
    ) -> list[tuple[int, Told]]:
        """Return the answer to each question of a batch, with its connection, and remember what was predicted."""
        self.answered += len(batch)
        if found is None:
            return [(waiting.peer, Told(waiting.ask.req_id, source=ERROR)) for waiting in batch]
        told = []
        for waiting, estimate in zip(batch, found, strict=True):
            if estimate is None:
                told.append((waiting.peer, Told(waiting.ask.req_id, source=UNKNOWN)))
                continue
            tokens, p90 = int(estimate.tokens), int(estimate.p90)
            request = self._open.get((waiting.peer, waiting.ask.req_id))
            if request is not None:
                request.predicted, request.p90 = tokens, p90
            told.append((waiting.peer, Told(waiting.ask.req_id, tokens, p90, estimate.source)))
        return told

    def take_finished(self) -> list[FinishedPrompt]:
        """Return what finished since the last call."""
        finished = list(self._finished)
        self._finished.clear()
        self.learned += len(finished)
        return finished

    def guarded(self, what: str, action: Callable[[], None]) -> None:
        """Run `PromptPredictor.learn` or `save`; what they raise is counted. Runs in a thread of its own."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - see predict
            self._failed(what, error)

    def status(self, predictor: PromptPredictor) -> Status:
        """Return how the predictor is."""
        entries = decoder_examples = 0
        try:
            own = predictor.status()
            entries, decoder_examples = _count(own.get("entries", 0)), _count(own.get("examples", 0))
        except Exception as error:  # noqa: BLE001 - see predict
            self._failed("status", error)
        quality = self._quality
        return Status(
            entries=entries,
            learned=self.learned,
            waiting=self.waiting,
            answered=self.answered,
            errors=self.errors,
            decoder_examples=decoder_examples,
            judged=len(quality),
            coverage=quality.coverage(),
            relative_error=quality.relative_error(),
            tau=quality.tau(),
        )

    def _failed(self, what: str, error: Exception) -> None:
        self.errors += 1
        if not self._error_logged:
            self._error_logged = True
            logger.error("the length predictor failed in %s; counted from now on, not logged", what, exc_info=error)


def _prompt(ask: Ask) -> Prompt:
    return Prompt(ask.text, ask.max_tokens, ask.model, ask.prompt_tokens)


def _checked(found: Sequence[Estimate | Prediction | None], wanted: int) -> list[Estimate | Prediction | None]:
    """Return the estimates, or raise ValueError if one is no length: a NaN must not reach a scheduler."""
    if len(found) != wanted:
        raise ValueError(f"predict: {len(found)} estimates for {wanted} prompts")
    for estimate in found:
        if estimate is not None and not 1 <= estimate.tokens <= estimate.p90 < _LONGEST:  # False for NaN as well
            raise ValueError(f"predict: {estimate!r}: must have 1 <= tokens <= p90")
        if estimate is not None and not _is_name(estimate.source):
            raise ValueError(f"predict: source={estimate.source!r}: must be a printable text of 1 to {_LONGEST_NAME}")
    return list(found)


def _is_name(source: object) -> bool:
    """Whether a message and a log can hold it."""
    return isinstance(source, str) and 1 <= len(source) <= _LONGEST_NAME and source.isprintable()


def _count(value: SupportsIndex) -> int:
    """Return a number that fits into a message. Raises ValueError or TypeError for any other."""
    number = operator.index(value)
    if not 0 <= number < _LONGEST:
        raise ValueError(f"status: {number}: must be at least 0 and below {_LONGEST}")
    return number
