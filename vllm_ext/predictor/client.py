"""The front end's half of prediction: asks the predictor's process, and collects what the scheduler is to be told.

Nothing here waits or computes: requests go on whatever the predictor does, on what the scheduler assumes without it.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import zmq

from vllm_ext.config.prediction import PredictorConfig
from vllm_ext.contract.length_distribution import LEVELS
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt
from vllm_ext.predictor.messages import (
    ERROR,
    OVERLOAD,
    Answer,
    Ask,
    BadMessage,
    Finished,
    Ping,
    Status,
    is_distribution,
    pack,
    unpack,
)

if TYPE_CHECKING:
    from vllm_ext.predictor.metrics import PredictorMetrics
    from vllm_ext.predictor.process import PredictorProcess

logger = logging.getLogger("vllm.vllm_ext.predictor")

PREDICTED, LATE, EXPIRED, LOST, TIMEOUT, NOT_READY = "predicted", "late", "expired", "lost", "timeout", "not-ready"
"""What came of a question, beside the reasons of `messages.Answer`: late, its request ended first; expired, no answer
within ``timeout_s``; lost or timeout, the predictor was gone or hung; not-ready, it was not there."""
UNLEARNED, MALFORMED = "finished", "message"
"""What is dropped: requests that ended and are not learned; messages that are none."""

MARGIN_S = 5.0
"""A process is given up that answers nothing for so much longer than a question may wait."""
BUSY_S = 300.0
"""Time for loading a model, when it is fetched from a hub for instance, and for learning."""
MOST_KEPT = 8192
"""Requests that ended and are not known to be learned."""
MOST_OPEN = 65_536
"""Requests that have not ended: offline, all come at once."""
GATHER_S = 0.05
"""How long questions wait for others to share a batch with: together they cost a fraction of what they cost one by one.
A lone one waits as well, and here: where cores are few, embedding its prompt would slow down its own prefill, and even
waking up the process would."""
LOOK_S = 0.005
"""Between two looks for answers that are owed. ZeroMQ's descriptor tells of changes only, and sending hides them."""
_TEND_S, _PING_S = 0.1, 1.0
_LINGER_MS = 100
"""Longest wait of an orderly end for what was sent last."""


class _Asked(NamedTuple):
    """A request that has not ended, with the P50 and P90 that were predicted; 0 until then."""

    prompt: Prompt
    p50: int = 0
    p90: int = 0


class _Ended(NamedTuple):
    """A request that ended, as a message, and whether it is sent for the second time."""

    number: int
    body: bytes
    again: bool = False


class PredictionClient:
    """One per front-end process. The one that owns the predictor's process keeps it running; others only connect.

    A prompt is kept until its request ends and was learned, so that a predictor that was started again loses nothing.
    Used from one thread. In a process forked from this one it is a client of its own, which owns nothing.
    """

    def __init__(
        self,
        config: PredictorConfig,
        path: Path,
        process: PredictorProcess | None,
        metrics: PredictorMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._path, self._process = config, path, process
        self._metrics, self._clock = metrics, clock
        self._limit_s = config.timeout_s + MARGIN_S
        self._numbers = itertools.count(1)
        self._warned = self._warned_of_drops = self._closed = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._open: OrderedDict[str, _Asked] = OrderedDict()
        self._waiting: OrderedDict[str, float] = OrderedDict()
        """Questions without an answer, oldest first, with the time they were asked."""
        self._gathered: dict[str, bytes] = {}
        """Of these, those that are not sent yet."""
        self._unsent: deque[_Ended] = deque()
        self._sent: deque[_Ended] = deque()
        """Not known to be learned, oldest first."""
        self._status: Status | None = None
        self._since_s = 0.0
        """When the connection in use was begun."""
        self._pinged_s: float | None = None
        """When the first ping was sent after which nothing was heard."""
        self._next_tend_s = self._next_ping_s = 0.0

    @property
    def ready(self) -> bool:
        """Whether the predictor has loaded its model and is connected."""
        return self._status is not None and self._status.ready

    @property
    def waiting(self) -> int:
        """Questions without an answer."""
        return len(self._waiting)

    # --- requests ---------------------------------------------------------------------------------------------------

    def ask(self, req_id: str, prompt: Prompt) -> None:
        """Ask for the output length of a request; what comes of it is in a later `poll`."""
        self._check_process()
        if self._closed:
            self._metrics.outcome(NOT_READY)
            return
        try:
            body = pack(Ask(req_id, prompt))
        except BadMessage:
            self._metrics.outcome(ERROR)
            return
        self._open[req_id] = _Asked(prompt)
        if len(self._open) > MOST_OPEN:
            self.ended(next(iter(self._open)), 0)  # which will not be learned
            self._drop(1)
        if len(self._waiting) >= self._config.queue_limit:
            self._metrics.outcome(OVERLOAD)
            return
        self._waiting[req_id] = self._clock()
        self._gathered[req_id] = body
        if len(self._gathered) >= self._config.batch_size:
            self._send_gathered()

    def ended(self, req_id: str, tokens: int, *, aborted: bool = False) -> None:
        """Have the predictor learn how long a request became, or was when its client gave it up."""
        self._check_process()
        asked = self._open.pop(req_id, None)
        if asked is None:
            return
        self._gathered.pop(req_id, None)
        if self._waiting.pop(req_id, None) is not None:
            self._metrics.outcome(LATE)
        if tokens < 1 or self._closed:
            return
        number = next(self._numbers)
        done = FinishedPrompt(asked.prompt, tokens, time.time(), aborted)
        self._unsent.append(_Ended(number, pack(Finished(number, done, asked.p50, asked.p90))))
        if len(self._sent) + len(self._unsent) > MOST_KEPT:
            (self._unsent or self._sent).popleft()  # what was sent is on its way
            self._drop(1)
        self._send_ended()

    def _send_gathered(self) -> None:
        for req_id, body in self._gathered.items():
            if not self._send(body):
                del self._waiting[req_id]
                self._metrics.outcome(OVERLOAD if self._status is not None and not self._is_gone() else NOT_READY)
        self._gathered.clear()

    def _send_ended(self) -> None:
        while self._unsent and self._send(self._unsent[0].body):
            self._sent.append(self._unsent.popleft())

    def _send(self, body: bytes) -> bool:
        """Send a message; False where nobody is connected, or the socket takes no more."""
        if self._socket is None:
            return False
        try:
            self._socket.send(body, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _check_process(self) -> None:
        if os.getpid() != self._pid:  # forked: sockets and process are those of the other, and not to be touched
            self._process = None
            self._begin()

    # --- what comes back --------------------------------------------------------------------------------------------

    def poll(self) -> list[Answer]:
        """Take in what came, see to the process, and return what the scheduler is to be told. Returns at once."""
        self._check_process()
        if self._closed:
            return []
        now = self._clock()
        gone = self._is_gone()
        found = self._receive(now)  # what it said before it went is there by now
        if gone:
            self._down(LOST, "is gone")
        if now >= self._next_tend_s:
            self._next_tend_s = now + _TEND_S
            self._tend(now)
        if self._gather_s(now) <= 0:
            self._send_gathered()
        self._send_ended()
        return found

    def rest_s(self) -> float:
        """Return the seconds after which to poll again for the questions' sake; infinity where none waits."""
        answers_s = LOOK_S if len(self._waiting) > len(self._gathered) else math.inf
        return max(0.0, min(answers_s, self._gather_s(self._clock())))

    def _gather_s(self, now: float) -> float:
        """Return the seconds until what was gathered is due."""
        if not self._gathered:
            return math.inf
        return self._waiting[next(iter(self._gathered))] + GATHER_S - now

    def _receive(self, now: float) -> list[Answer]:
        found = []
        while self._socket is not None:
            try:
                reply = unpack(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                break
            except BadMessage:
                self._metrics.dropped(MALFORMED)
                continue
            self._pinged_s = None
            if isinstance(reply, Status):
                self._report(reply)
            elif isinstance(reply, Answer) and self._take(reply, now):
                found.append(reply)
        return found

    def _take(self, answer: Answer, now: float) -> bool:
        """Take in an answer; whether the scheduler is to be told."""
        predicted = is_distribution(answer.quantiles)
        if self._process is not None and answer.source not in (ERROR, OVERLOAD):
            self._process.works()
        sent_s = self._waiting.pop(answer.req_id, None)
        if sent_s is None:  # its request ended, which was counted
            return False
        if not predicted:
            self._metrics.outcome(ERROR if answer.quantiles else answer.source)
            return False
        p50, p90 = (answer.quantiles[LEVELS.index(level)] for level in (0.5, 0.9))
        self._open[answer.req_id] = self._open[answer.req_id]._replace(p50=p50, p90=p90)
        self._metrics.outcome(PREDICTED)
        self._metrics.latency(now - sent_s)
        return True

    def _report(self, status: Status) -> None:
        if status.ready and not self.ready:
            logger.info("length prediction is ready: %d finished requests known", status.entries)
        self._status = status
        if status.ready:
            self._metrics.status(status)
        if status.errors:
            self._warn("raises errors, see its log")
        while self._sent and self._sent[0].number <= status.taken:
            self._sent.popleft()

    # --- the process ------------------------------------------------------------------------------------------------

    def _tend(self, now: float) -> None:
        if self._process is not None:
            self._process.ensure(now)
            self._metrics.starts(self._process.starts)
            if self._process.given_up:
                self._warn("can't start, see its log")
            elif self._process.starts > 1:
                self._warn("ended and was started again, see its log")
        if self._socket is None:
            self._connect(now)
        if now >= self._next_ping_s and self._send(pack(Ping())):
            self._next_ping_s = now + _PING_S
            if self._pinged_s is None:
                self._pinged_s = now
        if why := self._hangs(now):
            if self._process is not None:
                self._process.kill()
            self._down(TIMEOUT, why)
        while self._waiting and now - next(iter(self._waiting.values())) > self._config.timeout_s:
            req_id, _ = self._waiting.popitem(last=False)
            self._gathered.pop(req_id, None)
            self._metrics.outcome(EXPIRED)

    def _hangs(self, now: float) -> str:
        """Why the process is taken to hang; empty if it is not."""
        limit_s = self._limit_s if self.ready else BUSY_S  # what is imported holds the interpreter
        if self._pinged_s is not None and now - self._pinged_s > limit_s:
            return f"has not answered for {limit_s:g} s"
        if self._status is None and now - self._since_s > BUSY_S:
            return f"has not begun to listen within {BUSY_S:g} s"
        if self._status is not None and self._status.busy_s > BUSY_S:
            return f"has been at {'learning' if self._status.ready else 'loading its model'} for {BUSY_S:g} s"
        return ""

    def _connect(self, now: float) -> None:
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.sndhwm = 2 * self._config.queue_limit
        self._socket.immediate = 1  # nothing is queued for a process that is not there
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(f"ipc://{self._path}")
        self._since_s = self._next_ping_s = now

    def _is_gone(self) -> bool:
        return self._monitor is not None and bool(self._monitor.poll(0))

    def _disconnect(self, linger_ms: int = 0) -> None:
        if self._socket is not None and self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close(linger_ms)
        self._socket = self._monitor = self._status = self._pinged_s = None

    def _down(self, outcome: str, why: str) -> None:
        """Begin anew: the process is gone or given up, and with it what it was asked."""
        self._disconnect()
        self._metrics.status(None)
        self._metrics.outcome(outcome, len(self._waiting))
        self._waiting.clear()
        self._gathered.clear()
        # What it took along is sent once more, and only once: it may be what it died of.
        self._drop(sum(ended.again for ended in self._sent))
        self._unsent.extendleft(ended._replace(again=True) for ended in reversed(self._sent) if not ended.again)
        self._sent.clear()
        self._warn(why)

    def _warn(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "the length predictor %s; requests without a prediction are scheduled by the other sources "
                "(counted in vllm_ext:length_predictions_total, not logged again)",
                why,
            )

    def _drop(self, count: int) -> None:
        self._metrics.dropped(UNLEARNED, count)
        if count and not self._warned_of_drops:
            self._warned_of_drops = True
            logger.warning(
                "finished requests are not learned: the length predictor has ended or is too slow "
                "(counted in vllm_ext:predictor_dropped_total, not logged again)"
            )

    def close(self) -> None:
        """Hang up, and let the process learn what ended and end if it is ours. Questions get no answer any more."""
        self._check_process()
        if self._closed:
            return
        self._send_ended()
        self._closed = True
        self._metrics.outcome(LOST, len(self._waiting))
        self._waiting.clear()
        self._gathered.clear()
        self._drop(len(self._unsent))
        self._disconnect(_LINGER_MS)
        self._context.term()  # waits no longer than that
        if self._process is not None:
            self._process.close()
