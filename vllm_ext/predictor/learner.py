"""The thread that loads a predictor and teaches it what ended, beside the thread that predicts."""

from __future__ import annotations

import itertools
import logging
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from vllm_ext.prediction.predictor import PromptPredictor
from vllm_ext.predictor import free_memory
from vllm_ext.predictor.messages import Finished
from vllm_ext.predictor.request_batcher import Errors

logger = logging.getLogger("vllm_ext.predictor")

EVERY_S = 1.0
"""Between two calls of `PromptPredictor.learn`, with nothing for upkeep where nothing ended."""
GIVE_BACK_EVERY = 30
"""Calls of these between two returns of memory that is free."""
GRACE_S = 10.0
"""Time that the other thread has to notice that the process is to end: a prediction may hang."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Learner(threading.Thread):
    """Owns the predictor: loads it, teaches it, lets go of it. The other thread only asks it."""

    def __init__(self, load: Callable[[], PromptPredictor], over: Callable[[], bool], errors: Errors) -> None:
        """Take what makes the predictor, what tells whether the process is to end, and where errors are counted."""
        super().__init__(name="learn", daemon=True)
        self._make, self._over, self._errors = load, over, errors
        self.predictor: PromptPredictor | None = None
        """There once it is loaded."""
        self.failure = ""
        """Why it can't be loaded, now or later: a package is missing, or an option is wrong."""
        self.learned = self.entries = self.examples = 0
        self.taken: dict[bytes, int] = {}
        """Number of the last `Finished` that was learned, by front end."""
        self._finished: deque[tuple[bytes, Finished]] = deque()  # front ends bound what they have not seen acknowledged
        self._end = threading.Event()
        self._busy_since: float | None = None

    def put(self, peer: bytes, finished: Finished) -> None:
        """Have a request learned that ended."""
        self._finished.append((peer, finished))

    def busy_s(self) -> float:
        """Return for how long it has been at what it does now, in seconds; 0 while it rests."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def end(self) -> None:
        """Learn what there is, let go of the predictor, and end."""
        self._end.set()

    def run(self) -> None:
        """Load, learn about once per second, and let go."""
        if not self._load():
            return
        for turn in itertools.count():
            if self._end.wait(EVERY_S) or self._abandoned():
                break
            self._learn()
            if turn % GIVE_BACK_EVERY == 0:
                free_memory.give_back()
        self._learn()
        assert self.predictor is not None
        with self._busy():
            self._guarded("close", self.predictor.close)
        if not self._end.is_set():
            logger.error("a prediction hangs at shutdown; the process ends without it")
            os._exit(1)

    def _load(self) -> bool:
        pause_s = _FIRST_PAUSE_S
        while not self._end.is_set():
            try:
                with self._busy():
                    predictor = self._make()
                    self._guarded("status", partial(self._note_status, predictor))
                self.predictor = predictor
                return True
            except OSError as error:  # a hub that is out of reach is none for ever
                if pause_s == _FIRST_PAUSE_S:
                    logger.warning("can't load the length predictor (%s); tried again from time to time", error)
            except (ImportError, ValueError, AttributeError, TypeError) as error:
                self.failure = f"{type(error).__name__}: {error}"
                return False
            self._end.wait(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return False

    def _learn(self) -> None:
        predictor = self.predictor
        assert predictor is not None
        batch = [self._finished.popleft() for _ in range(len(self._finished))]
        with self._busy():
            self._guarded("learn", partial(predictor.learn, [finished.done for _, finished in batch]))
            self._guarded("status", partial(self._note_status, predictor))
        self.learned += len(batch)
        for peer, finished in batch:
            self.taken[peer] = finished.number

    def _note_status(self, predictor: PromptPredictor) -> None:
        found = predictor.status()
        self.entries, self.examples = (max(0, operator.index(found.get(name, 0))) for name in ("entries", "examples"))

    def _abandoned(self) -> bool:
        """Whether the process is to end and the thread that predicts does not see to it."""
        return self._over() and not self._end.wait(GRACE_S)

    def _guarded(self, what: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - predictions go on whatever learning raises
            self._errors.note(what, error)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._busy_since = time.monotonic()
        try:
            yield
        finally:
            self._busy_since = None
