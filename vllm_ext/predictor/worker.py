"""The predictor's process: `python -m vllm_ext.predictor.worker OPTIONS`, started by a front end.

One thread polls the socket of the front ends of one server, predicts in batches and answers; another (`learner`) loads
the model and learns. The process ends, having learned what ended, at SIGTERM and when the front end that started it is
gone.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import zmq

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.prediction import PredictorConfig
from vllm_ext.prediction.predictor import PromptPredictor
from vllm_ext.predictor.learner import Learner
from vllm_ext.predictor.messages import Answer, Ask, BadMessage, Finished, Ping, Status, pack, unpack
from vllm_ext.predictor.process import (
    CANNOT_START,
    TAKEN,
    WorkerOptions,
    remove_dead_sockets,
    remove_socket,
    take,
)
from vllm_ext.predictor.quality import Quality
from vllm_ext.predictor.request_batcher import Errors, RequestBatcher, answers

logger = logging.getLogger("vllm_ext.predictor")

_TICK_MS = 200
"""Longest rest, after which it is looked whether the process is to end."""
_MOST_AT_ONCE = 4096
"""Messages heard before anything else is done."""
_LAST_WORDS_MS = 100
"""Silence after which front ends are taken to have said all they had to say."""
_LAST_WORDS_S = 5.0
"""Time for these, less than `learner.GRACE_S`."""
_LAST_S = 30.0
"""Time for the last learning, which may hang."""


class Worker:
    """The thread that predicts, and all that front ends see."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._config = config = PredictorConfig(**options.config)  # type: ignore[arg-type]  # checked by itself
        self._desk = RequestBatcher(
            queue_limit=config.queue_limit, batch_size=config.batch_size, timeout_s=config.timeout_s
        )
        self._errors, self._quality = Errors(), Quality()
        self._learner = Learner(self._load, self._over, self._errors)
        self._stopped = False
        self._place: int | None = None
        """What keeps others from starting one, where it is shared; until the process ends."""
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.sndhwm = 0  # front ends bound what they are owed; an answer that is dropped is owed for ever

    def run(self) -> int:
        """Serve; returns the exit status."""
        path = Path(self._options.socket)
        remove_dead_sockets(path.parent.parent)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if self._options.shared:
                self._place = take(path)
                if self._place is None:
                    return TAKEN
            self._socket.bind(f"ipc://{path}")
        except (OSError, zmq.ZMQError) as error:
            logger.error("can't listen on %s (%s); requests are scheduled without it", path, error)
            return CANNOT_START
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        self._learner.start()
        while not self._over() and self._learner.is_alive():
            self._turn()
        if self._learner.failure:
            logger.error("can't start: %s; requests are scheduled without it", self._learner.failure)
            return CANNOT_START
        broken = not self._over()
        deadline = time.monotonic() + _LAST_WORDS_S
        while self._socket.poll(_LAST_WORDS_MS) and time.monotonic() < deadline:
            self._hear()
        self._learner.end()
        self._learner.join(_LAST_S)
        remove_socket(path)
        return 1 if broken else 0

    def _load(self) -> PromptPredictor:
        folder = Path(self._options.folder)
        if self._config.factory is None:
            from vllm_ext.prediction.learned import LearnedPredictor  # heavy: it listens before

            predictor: PromptPredictor = LearnedPredictor(self._config, folder)
        else:
            module, name = self._config.factory.split(":")
            predictor = getattr(importlib.import_module(module), name)(self._config, folder)
        logger.info("the length predictor is loaded")
        return predictor

    def _stop(self, *_: object) -> None:
        self._stopped = True

    def _over(self) -> bool:
        """Whether the process is to end: it was told to, or the front end that started it is gone."""
        return self._stopped or os.getppid() != self._options.parent

    def _turn(self) -> None:
        """Rest until something is to be done, and do it."""
        predictor = self._learner.predictor
        self._socket.poll(0 if predictor is not None and len(self._desk) else _TICK_MS)
        self._hear()
        if predictor is not None and (batch := self._desk.batch(time.monotonic())):
            for waiting, answer in zip(batch, answers(predictor, batch, self._errors), strict=True):
                self._tell(waiting.peer, answer)

    def _hear(self) -> None:
        with contextlib.suppress(zmq.Again):
            for _ in range(_MOST_AT_ONCE):
                peer, *bodies = self._socket.recv_multipart(zmq.NOBLOCK)
                try:
                    message = unpack(b"".join(bodies))
                except BadMessage as error:
                    self._errors.note("reading a message", error)
                    continue
                if isinstance(message, Ask):
                    if (refused := self._desk.ask(peer, message, time.monotonic())) is not None:
                        self._tell(peer, refused)
                elif isinstance(message, Finished):
                    self._learner.put(peer, message)
                    if message.p50 and not message.done.aborted:
                        self._quality.add(message.p50, message.p90, message.done.tokens)
                elif isinstance(message, Ping):
                    self._tell(peer, self._status(peer))

    def _tell(self, peer: bytes, reply: Answer | Status) -> None:
        with contextlib.suppress(zmq.ZMQError):  # a front end that is gone
            self._socket.send_multipart([peer, pack(reply)], zmq.NOBLOCK)

    def _status(self, peer: bytes) -> Status:
        learner, quality = self._learner, self._quality
        return Status(
            ready=learner.predictor is not None,
            busy_s=learner.busy_s(),
            taken=learner.taken.get(peer, 0),
            entries=learner.entries,
            examples=learner.examples,
            learned=learner.learned,
            waiting=len(self._desk),
            errors=self._errors.count,
            judged=len(quality),
            coverage=quality.coverage(),
            relative_error=quality.relative_error(),
            tau=quality.tau(),
        )


def main(argv: Sequence[str]) -> int:
    """Run the process with the options of its one argument."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s [vllm-ext predictor] %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides when we end
    options = msgspec.json.decode(argv[0], type=WorkerOptions)
    with contextlib.suppress(OSError):
        os.nice(int(str(options.config.get("nice", 0))))
    try:
        return Worker(options).run()
    except ConfigError as error:
        logger.error("%s", error)
        return CANNOT_START
    except Exception:
        logger.exception("the length predictor's process fails and ends")
        return 1


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    # What hangs would keep the interpreter waiting for its thread.
    os._exit(status)
