"""The predictor's process: `python -m vllm_ext.prediction.service.worker OPTIONS`, started by a front end.

It listens on a Unix socket for the front ends of one server, and ends, saving what it learned, when its standard input
does: that is the front end that started it. The event loop only moves messages; prompts are embedded in one thread, and
what finished is learned and saved in another.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec

from vllm_ext.config import ConfigError, PredictorConfig
from vllm_ext.prediction.learned import LearnedPredictor
from vllm_ext.prediction.predictor import PromptPredictor
from vllm_ext.prediction.service.messages import (
    Answer,
    Ask,
    Failed,
    Finished,
    FrameError,
    Frames,
    Gone,
    Status,
    pack,
    read_question,
)
from vllm_ext.prediction.service.work import Desk
from vllm_ext.prediction.service.worker_options import CANNOT_START, WorkerOptions

logger = logging.getLogger("vllm_ext.predictor")

_READ_BYTES = 1 << 16
_STATUS_S = 1.0
_LAST_S = 30.0
"""Time that the end of the process, with a last save, may take."""
_LISTENER_S = 10.0
"""Time in which a front end is to connect that is told why there is no predictor."""
_LONGEST_REASON = 2000
_SAVE_S = 20.0
_REST_PER_SAVE = 100
"""A full store takes a second to write: then the disk is left alone for a hundred."""


class Worker:
    """Serves until it is told to stop."""

    def __init__(self, options: WorkerOptions) -> None:
        self._socket, self._folder = Path(options.socket), Path(options.folder)
        self._config = PredictorConfig(**options.config)  # type: ignore[arg-type]  # checked by itself
        config = self._config
        self._desk = Desk(queue_limit=config.queue_limit, batch_size=config.batch_size, timeout_s=config.timeout_s)
        self._peers: dict[int, asyncio.StreamWriter] = {}
        self._numbers = itertools.count()
        self._work = asyncio.Event()
        self._stop = asyncio.Event()
        self._encoding = ThreadPoolExecutor(1, "encode")
        self._learning = ThreadPoolExecutor(1, "learn")

    async def run(self) -> int:
        """Serve; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        loop.add_reader(sys.stdin.fileno(), self._parent_speaks)
        # Before the model is loaded, which takes seconds: what is asked meanwhile waits in the queue.
        try:
            self._socket.unlink(missing_ok=True)
            server = await asyncio.start_unix_server(self._serve, path=str(self._socket))
        except OSError as error:
            logger.error("can't listen on %s (%s); requests are scheduled without it", self._socket, error)
            return CANNOT_START
        stopped = asyncio.create_task(self._stop.wait())
        loading = loop.run_in_executor(self._encoding, self._load)
        await asyncio.wait((loading, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            return 0
        try:
            predictor = loading.result()
        except (ImportError, ValueError, OSError, AttributeError, TypeError) as error:
            return await self._cannot_start(error)
        ready = self._desk.status(predictor)
        logger.info("the length predictor is ready: %d finished requests known", ready.entries)
        self._broadcast(ready)
        predicting = asyncio.create_task(self._predict(predictor))
        keeping_up = asyncio.create_task(self._keep_up(predictor))
        await asyncio.wait((stopped, predicting, keeping_up), return_when=asyncio.FIRST_COMPLETED)
        broken = not self._stop.is_set()
        self._stop.set()
        server.close()
        predicting.cancel()
        await asyncio.wait((predicting, keeping_up), timeout=_LAST_S)  # not longer: what is learned may hang
        for task in (predicting, keeping_up):
            if task.done() and not task.cancelled() and (failure := task.exception()) is not None:
                logger.error("the length predictor's process fails and ends", exc_info=failure)
        if callable(close := getattr(predictor, "close", None)):
            self._desk.guarded("close", close)
        self._socket.unlink(missing_ok=True)
        return 1 if broken else 0

    def _load(self) -> PromptPredictor:
        if self._config.factory is None:
            return LearnedPredictor(self._config, self._folder)
        module, name = self._config.factory.split(":")
        predictor: PromptPredictor = getattr(importlib.import_module(module), name)(self._config, self._folder)
        return predictor

    async def _cannot_start(self, error: Exception) -> int:
        reason = f"{type(error).__name__}: {error}"[:_LONGEST_REASON].encode("utf-8", "replace").decode()
        deadline = time.monotonic() + _LISTENER_S
        while not self._peers and time.monotonic() < deadline and not self._stop.is_set():
            await asyncio.sleep(0.05)  # the front end is about to connect, and is to be told
        if not self._peers:
            logger.error("can't start: %s; requests are scheduled without it", reason)
        self._broadcast(Failed(reason))
        with contextlib.suppress(OSError):
            await asyncio.gather(*(writer.drain() for writer in self._peers.values()))
        return CANNOT_START

    def _parent_speaks(self) -> None:
        if not os.read(sys.stdin.fileno(), _READ_BYTES):
            self._stop.set()
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())

    # --- connections ------------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = next(self._numbers)
        self._peers[peer] = writer
        frames = Frames()
        try:
            while data := await reader.read(_READ_BYTES):
                for body in frames.feed(data):
                    self._hear(peer, body)
        except FrameError as error:
            logger.error("a front end is not understood any more and is disconnected: %s", error)
        except (OSError, asyncio.CancelledError):
            pass  # it is gone, with answers unread; or this process ends, which is nothing for asyncio to report
        finally:
            del self._peers[peer]
            self._desk.hung_up(peer)
            writer.close()

    def _hear(self, peer: int, body: bytes) -> None:
        question = read_question(body)
        if isinstance(question, Ask):
            refused = self._desk.ask(peer, question, time.monotonic())
            if refused is not None:
                self._tell(peer, refused)
            self._work.set()
        elif isinstance(question, Finished):
            self._desk.finished(peer, question.req_id, question.tokens)
        elif isinstance(question, Gone):
            self._desk.gone(peer, question.req_id)

    def _tell(self, peer: int, answer: Answer) -> None:
        writer = self._peers.get(peer)
        if writer is not None and not writer.is_closing():
            writer.write(pack(answer))

    def _broadcast(self, answer: Answer) -> None:
        for peer, writer in self._peers.items():
            # One that does not read for hours, as between two offline batches, is not to fill our memory.
            if not (isinstance(answer, Status) and writer.transport.get_write_buffer_size()):
                self._tell(peer, answer)

    # --- work -------------------------------------------------------------------------------------------------------

    async def _predict(self, predictor: PromptPredictor) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._work.wait()
            batch, too_late = self._desk.next_batch(time.monotonic())
            for peer, told in too_late:
                self._tell(peer, told)
            if batch:
                found = await loop.run_in_executor(self._encoding, self._desk.predict, predictor, batch)
                for peer, told in self._desk.answers(batch, found):
                    self._tell(peer, told)
            if not self._desk.waiting:
                self._work.clear()

    async def _keep_up(self, predictor: PromptPredictor) -> None:
        """Learn, save and report, once per second at most; ends, having saved, when the process is to stop."""
        parent = os.getppid()
        next_save = time.monotonic() + _SAVE_S
        while not self._stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _STATUS_S)
            if os.getppid() != parent:  # a process forked from the front end keeps our standard input open
                self._stop.set()
            await self._learn(predictor)
            if (started := time.monotonic()) >= next_save:
                await self._save(predictor)
                took = time.monotonic() - started
                next_save = started + max(_SAVE_S, _REST_PER_SAVE * took)
            self._broadcast(self._desk.status(predictor))
        await self._learn(predictor)  # what finished during the last save, for instance
        await self._save(predictor)

    async def _save(self, predictor: PromptPredictor) -> None:
        act: Callable[[], None] = partial(
            self._desk.guarded, "save", getattr(predictor, "save", lambda: predictor.learn([]))
        )
        await asyncio.get_running_loop().run_in_executor(self._learning, act)

    async def _learn(self, predictor: PromptPredictor) -> None:
        finished = self._desk.take_finished()
        if finished:
            act: Callable[[], None] = partial(self._desk.guarded, "learn", partial(predictor.learn, finished))
            await asyncio.get_running_loop().run_in_executor(self._learning, act)


def main(argv: Sequence[str]) -> int:
    """Run the process with the options of its one argument."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s [vllm-ext predictor] %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the front end decides when we end
    options = msgspec.json.decode(argv[0], type=WorkerOptions)
    with contextlib.suppress(OSError):
        os.nice(int(str(options.config.get("nice", 0))))
    try:
        worker = Worker(options)
    except ConfigError as error:
        logger.error("%s", error)
        return CANNOT_START
    try:
        return asyncio.run(worker.run())
    except Exception:
        logger.exception("the length predictor's process fails and ends")
        return 1


if __name__ == "__main__":
    status = main(sys.argv[1:])
    logging.shutdown()
    # A prediction that hangs would keep the interpreter waiting for its thread.
    os._exit(status)
