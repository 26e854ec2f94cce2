"""The front end's half of prediction: asks the predictor's process, and collects what the scheduler is to be told.

Nothing here waits or computes: requests go on whatever the predictor does, on what the scheduler assumes without it.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from vllm_ext.config import PredictorConfig
from vllm_ext.prediction.service.link import Link, LinkBroken
from vllm_ext.prediction.service.messages import (
    ERROR,
    OVERLOAD,
    UNKNOWN,
    Ask,
    Failed,
    Finished,
    FrameError,
    Gone,
    Question,
    Status,
    Told,
)

logger = logging.getLogger("vllm.vllm_ext.predictor")

_CONNECT_EVERY_S = 0.1
_MARGIN_S = 5.0
_LOADING_S = 300.0
"""Time a predictor has to load its model, when it is fetched from a hub for instance."""

PREDICTED, LATE, LOST, TIMEOUT, NOT_READY = "predicted", "late", "lost", "timeout", "not-ready"
"""What came of a question, beside the reasons of `messages.Told`."""


class LateHint(NamedTuple):
    """What the scheduler is to be told of a request that it has already queued. Lengths in tokens."""

    req_id: str
    tokens: int
    p90: int
    source: str


class Process(Protocol):
    """What is needed of `PredictorProcess`."""

    given_up: bool
    starts: int

    def ensure(self, now: float) -> None:
        """Start the process unless it runs, is to pause, or was given up. Does not wait."""

    def works(self) -> None:
        """Note that the process answered: if it ends now, it is started again after a short pause."""

    def kill(self) -> None:
        """End a process that answers nothing any more."""

    def close(self) -> None:
        """Let the process save and end; returns at once."""


class ServiceMetrics(Protocol):
    """Where the service reports; see `observability.predictor_metrics`."""

    def outcome(self, name: str, count: int = 1) -> None:
        """Count requests by what came of their prediction."""

    def latency(self, seconds: float) -> None:
        """Note how long a prediction took."""

    def status(self, status: Status | None) -> None:
        """Take over what the predictor says of itself; None when it is gone."""

    def starts(self, total: int) -> None:
        """Take over how often the process was started."""


class PredictionService:
    """One per front-end process. The one that owns the predictor's process keeps it running; others only connect.

    Used from one thread.
    """

    def __init__(
        self,
        config: PredictorConfig,
        socket: Path,
        process: Process | None,
        metrics: ServiceMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._socket = socket
        self._process = process
        self._metrics = metrics
        self._clock = clock
        self._link: Link | None = None
        self._asked: OrderedDict[str, float] = OrderedDict()
        """Questions without an answer yet, oldest first, with the time they were sent."""
        self._late: set[str] = set()
        """Of these, those whose requests ended. They are owed too: else nobody who hangs is found out by short ones."""
        self._heard_at = 0.0
        """When the predictor last answered a question, of whichever front end."""
        self._answered = 0
        self._ready = False
        self._next_connect = 0.0
        self._warned = False
        self._closed = False

    @property
    def ready(self) -> bool:
        """Whether the predictor has loaded its model and is connected."""
        return self._ready

    @property
    def link(self) -> Link | None:
        """The connection, for an event loop to watch."""
        return self._link

    @property
    def waiting(self) -> int:
        """Questions without an answer."""
        return len(self._asked)

    # --- requests ---------------------------------------------------------------------------------------------------

    def ask(self, req_id: str, text: str, max_tokens: int, model: str, prompt_tokens: int = 0) -> None:
        """Ask for the output length of a request; what comes of it is in a later `poll`."""
        if self._link is None and not self._closed:
            self._tend(self._clock())
        if self._link is None:
            self._metrics.outcome(NOT_READY)
        elif len(self._asked) >= self._config.queue_limit:
            self._metrics.outcome(OVERLOAD)
        elif (failure := self._send(Ask(req_id, text, max_tokens, model, prompt_tokens))) is not None:
            self._metrics.outcome(failure)
        else:
            self._asked[req_id] = self._clock()

    def finished(self, req_id: str, tokens: int) -> None:
        """Tell the predictor how long a request became that ended by itself."""
        self._ended(req_id, Finished(req_id, tokens))

    def gone(self, req_id: str) -> None:
        """Tell the predictor that a request was aborted."""
        self._ended(req_id, Gone(req_id))

    def _ended(self, req_id: str, message: Question) -> None:
        if req_id in self._asked and req_id not in self._late:
            self._late.add(req_id)
            self._metrics.outcome(LATE)
        self._send(message)

    def _send(self, message: Question) -> str | None:
        """Send a message; returns the outcome of a question that can't be."""
        if self._link is None:
            return LOST
        try:
            return None if self._link.send(message) else OVERLOAD
        except FrameError:
            return ERROR
        except LinkBroken:
            # Left to `poll`: there may be a last word to read, and an event loop may still watch the descriptor, whose
            # number must not become that of a client's connection before `poll`'s caller has let go of it.
            return LOST

    # --- what comes back --------------------------------------------------------------------------------------------

    def poll(self) -> list[LateHint]:
        """Take in what came, see to the process, and return what the scheduler is to be told. Returns at once."""
        if self._closed:
            return []
        now = self._clock()
        hints = self._receive(now)
        self._tend(now)
        return hints

    def _receive(self, now: float) -> list[LateHint]:
        if self._link is None:
            return []
        hints = []
        try:
            for answer in self._link.receive():
                if isinstance(answer, Told):
                    if (hint := self._told(answer, now)) is not None:
                        hints.append(hint)
                elif isinstance(answer, Status):
                    self._report(answer, now)
                elif isinstance(answer, Failed):
                    self._warn(f"can't start: {answer.reason}")
            self._link.flush()  # after the last words of a process that is gone were read
        except LinkBroken as error:
            self._broken(str(error))
        return hints

    def _told(self, answer: Told, now: float) -> LateHint | None:
        if answer.tokens or answer.source != OVERLOAD:  # which says that it listens, not that it predicts
            self._heard_at = now
        if self._process is not None and (answer.tokens or answer.source == UNKNOWN):
            self._process.works()
        asked = self._asked.pop(answer.req_id, None)
        if asked is None:
            return None
        if answer.req_id in self._late:  # it was counted when it ended
            self._late.discard(answer.req_id)
            return None
        if not 1 <= answer.tokens <= answer.p90:
            self._metrics.outcome(answer.source)
            return None
        self._metrics.outcome(PREDICTED)
        self._metrics.latency(now - asked)
        return LateHint(answer.req_id, answer.tokens, answer.p90, answer.source)

    def _report(self, status: Status, now: float) -> None:
        self._metrics.status(status)
        if status.answered != self._answered:
            self._answered, self._heard_at = status.answered, now
        if not self._ready:
            self._ready, self._heard_at = True, now
            logger.info("length prediction is ready: %d finished requests known", status.entries)
        if status.errors:
            self._warn("raises errors, see its log")

    # --- the process ------------------------------------------------------------------------------------------------

    def _tend(self, now: float) -> None:
        if self._link is not None:
            self._check_silence(now)
        if self._link is None and now >= self._next_connect:
            self._next_connect = now + _CONNECT_EVERY_S
            if self._process is not None:
                self._process.ensure(now)
                self._metrics.starts(self._process.starts)
                if self._process.given_up:
                    self._warn("can't start, see its log")
                elif self._process.starts > 1:
                    self._warn("ended and was started again, see its log")
            self._connect(now)

    def _connect(self, now: float) -> None:
        try:
            self._link = Link(self._socket, max_unsent=self._config.queue_limit)
        except OSError:
            return  # not there yet
        self._heard_at = now

    def _check_silence(self, now: float) -> None:
        """Give up on a process that owes answers and has given none for too long, alive as it may look otherwise."""
        limit = self._config.timeout_s + _MARGIN_S if self._ready else _LOADING_S
        oldest = next(iter(self._asked.values()), now)
        if now - max(oldest, self._heard_at) <= limit:
            return
        if self._process is not None:
            self._process.kill()
        self._broken(f"has not answered for {limit:g} s", TIMEOUT)

    def _broken(self, why: str, outcome: str = LOST) -> None:
        if self._link is not None:
            self._link.close()
        self._link = None
        self._ready = False
        self._metrics.outcome(outcome, len(self._asked) - len(self._late))
        self._metrics.status(None)
        self._asked.clear()
        self._late.clear()
        self._warn(why)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "the length predictor %s; requests without a prediction are scheduled by the other sources "
                "(counted in vllm_ext:length_predictions_total, not logged again)",
                why,
            )

    def close(self) -> None:
        """Hang up, and let the process save and end if it is ours. Nothing starts it again; questions get no answer."""
        self._closed = True
        self._ready = False
        if self._link is not None:
            self._link.close()
            self._link = None
        if self._process is not None:
            self._process.close()
