"""The predictor's work between its connections: the queue, the batches, what is remembered until a request ends."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ext.prediction.estimate import Estimate
from vllm_ext.prediction.service.messages import Ask, Status, Told
from vllm_ext.prediction.service.predictor import FinishedPrompt, Prompt, PromptPredictor
from vllm_ext.prediction.service.quality import Quality

logger = logging.getLogger(__name__)

_REMEMBERED = 16_384
"""Requests whose prompts are held until they finish, the oldest are forgotten first; 2 kB each at most."""
_LONGEST = 2**40

UNKNOWN, EXPIRED, OVERLOAD, ERROR = "unknown", "expired", "overload", "error"
"""Why there is no prediction; see `Told.source`."""


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
    """All of the process's state but its sockets; used by the event loop's thread only, except `predict` and `learn`,
    which run in threads of their own and touch nothing of it but the predictor.

    Whatever a predictor does, each question is answered once: what it raises, and what is no prediction, costs the
    questions of that batch theirs.
    """

    def __init__(self, *, queue_limit: int, batch_size: int, timeout_s: float) -> None:
        self._queue: deque[Waiting] = deque()
        self._queue_limit, self._batch_size, self._timeout_s = queue_limit, batch_size, timeout_s
        self._open: OrderedDict[tuple[int, str], _Open] = OrderedDict()
        self._finished: list[FinishedPrompt] = []
        self._quality = Quality()
        self._error_logged = False
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
        self._open[peer, ask.req_id] = _Open(prompt=Prompt(ask.text, ask.max_tokens, ask.model))
        if len(self._open) > _REMEMBERED:
            self._open.popitem(last=False)
        return None

    def finished(self, peer: int, req_id: str, tokens: int) -> None:
        """Note that a request ended by itself after so many tokens; it will be learned."""
        request = self._open.pop((peer, req_id), None)
        if request is None or tokens < 1:
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

    def next_batch(self, now: float) -> tuple[list[Waiting], list[Waiting]]:
        """Take questions off the queue: those to predict now, and those that waited too long."""
        batch: list[Waiting] = []
        expired: list[Waiting] = []
        while self._queue and len(batch) < self._batch_size:
            waiting = self._queue.popleft()
            if now - waiting.since > self._timeout_s:
                expired.append(waiting)
            elif (waiting.peer, waiting.ask.req_id) in self._open:  # else it ended meanwhile
                batch.append(waiting)
        return batch, expired

    def predict(self, predictor: PromptPredictor, batch: Sequence[Waiting]) -> list[Estimate | None] | None:
        """Ask the predictor; None where it failed. Runs in a thread of its own."""
        prompts = [Prompt(w.ask.text, w.ask.max_tokens, w.ask.model) for w in batch]
        try:
            return _checked(predictor.predict(prompts), len(prompts))
        except Exception as error:  # noqa: BLE001 - whatever a predictor raises costs these prompts their prediction
            self._failed("predict", error)
            return None

    def answers(self, batch: Sequence[Waiting], found: Sequence[Estimate | None] | None) -> list[tuple[int, Told]]:
        """Return the answer to each question of a batch, with its connection, and remember what was predicted."""
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
        finished, self._finished = self._finished, []
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
        try:
            own = predictor.status()
        except Exception as error:  # noqa: BLE001 - see predict
            self._failed("status", error)
            own = {}
        quality = self._quality
        return Status(
            entries=int(own.get("entries", 0)),
            learned=self.learned,
            waiting=self.waiting,
            errors=self.errors,
            decoder_examples=int(own.get("decoder_examples", 0)),
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


def _checked(found: Sequence[Estimate | None], wanted: int) -> list[Estimate | None]:
    """Return the estimates, or raise ValueError if one is no length: a NaN must not reach a scheduler."""
    if len(found) != wanted:
        raise ValueError(f"predict: {len(found)} estimates for {wanted} prompts")
    for estimate in found:
        if estimate is not None and not 1 <= estimate.tokens <= estimate.p90 < _LONGEST:  # False for NaN as well
            raise ValueError(f"predict: {estimate!r}: must have 1 <= tokens <= p90")
    return list(found)
