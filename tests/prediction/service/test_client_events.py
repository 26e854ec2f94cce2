"""The front end's half under events in any order: each question is counted once, each prediction told once."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from vllm_ext.prediction.service import client
from vllm_ext.prediction.service.client import LateHint
from vllm_ext.prediction.service.messages import Ask, Status, Told

from .parts import LIMIT_S, Front


class Events(RuleBasedStateMachine):
    """A service, and a predictor's end of the socket that does anything."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="s-")
        self.front = Front(Path(self.folder.name), queue_limit=5)
        self.asked = 0
        self.running: list[str] = []
        self.owed: list[str] = []
        self.hinted: list[LateHint] = []
        self.warnings: list[str] = []

    @initialize()
    def begin(self) -> None:
        client.logger.addFilter(self.note)
        self.front.listen()

    def note(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())
        return False

    @contextlib.contextmanager
    def worker(self) -> Iterator[None]:
        """Do something at the predictor's end; nothing happens where nobody is connected."""
        try:
            self.owed += [question.req_id for question in self.front.there.heard() if isinstance(question, Ask)]
            yield
        except (BlockingIOError, ConnectionError):
            self.owed.clear()

    @rule(count=st.integers(1, 3))
    def ask(self, count: int) -> None:
        for _ in range(count):
            self.front.ask(f"r{self.asked}")
            self.running.append(f"r{self.asked}")
            self.asked += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), aborted=st.booleans())
    def end(self, data: st.DataObject, aborted: bool) -> None:
        req_id = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        if aborted:
            self.front.service.gone(req_id)
        else:
            self.front.service.finished(req_id, 4)

    @rule(data=st.data(), source=st.sampled_from(["retrieval", "decoder", "unknown", "expired", "overload", "error"]))
    def answer(self, data: st.DataObject, source: str) -> None:
        with self.worker():
            if self.owed:
                req_id = self.owed.pop(data.draw(st.integers(0, len(self.owed) - 1)))
                length = (7, 9) if source in ("retrieval", "decoder") else (0, 0)
                self.front.there.say(Told(req_id, *length, source))

    @rule(answered=st.integers(0, 2), errors=st.integers(0, 1))
    def tell_status(self, answered: int, errors: int) -> None:
        with self.worker():
            self.front.there.say(Status(answered=answered, errors=errors))

    @rule(garbage=st.sampled_from([b"", b"garbage!", b"\0\0\0\0"]))
    def hang_up(self, garbage: bytes) -> None:
        with self.worker():
            self.front.there.connection.sendall(garbage)
            self.front.there.hang_up()
            self.owed.clear()

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, LIMIT_S + 1.0]))
    def poll(self, seconds: float) -> None:
        self.hinted += self.front.pass_s(seconds)

    def teardown(self) -> None:
        try:
            for _ in range(3):
                self.poll(400)
            assert self.front.service.waiting == 0
            assert sum(self.front.metrics.counted.values()) == self.asked
            assert len(self.hinted) == self.front.metrics.outcomes["predicted"]
            assert len({hint.req_id for hint in self.hinted}) == len(self.hinted)
            assert len(self.warnings) <= 1
        finally:
            client.logger.removeFilter(self.note)
            self.front.service.close()
            self.front.stop_listening()
            self.folder.cleanup()


TestEvents = pytest.mark.filterwarnings("error")(Events.TestCase)
