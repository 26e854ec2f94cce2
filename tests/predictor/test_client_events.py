"""The front end's half under events in any order: each question is counted once, each prediction told once."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from vllm_ext.predictor import client
from vllm_ext.predictor.messages import Answer, Finished, Message, Status

from .parts import LIMIT_S, QUANTILES, Front, prompt, until


class Events(RuleBasedStateMachine):
    """A client, and a predictor's end of the socket that does anything."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="s-")
        self.front = Front(Path(self.folder.name), queue_limit=5)
        self.asked = 0
        self.running: list[str] = []
        self.told: set[str] = set()
        self.sent: list[Finished] = []
        """What ended and reached any predictor."""
        self.warnings: list[str] = []
        client.logger.addFilter(self.note)

    def note(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            self.warnings.append(record.getMessage())
        return False

    @property
    def there(self) -> bool:
        return self.front.worker is not None

    @rule(count=st.integers(1, 3))
    def ask(self, count: int) -> None:
        for _ in range(count):
            self.front.service.ask(f"r{self.asked}", prompt(f"text of r{self.asked}"))
            self.running.append(f"r{self.asked}")
            self.asked += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 1), aborted=st.booleans())
    def end(self, data: st.DataObject, tokens: int, aborted: bool) -> None:
        req_id = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.front.service.ended(req_id, tokens, aborted=aborted)
        self.told |= {f"text of {req_id}"} if tokens else set()

    @precondition(lambda self: not self.there)
    @rule(ready=st.booleans())
    def begin(self, ready: bool) -> None:
        self.front.connect(Status(ready=ready))

    @precondition(lambda self: self.there)
    @rule(
        replies=st.lists(
            st.sampled_from(["distribution", "no distribution", "unknown", "overload", "error"]), max_size=4
        ),
        again=st.booleans(),
    )
    def answer(self, replies: list[str], again: bool) -> None:
        """The newest questions first, and some twice; some are answered that were never asked."""
        asked = [*reversed(self.front.there.asked), "nobody's"]
        found: list[Message | bytes] = []
        for req_id, reply in zip(asked, replies, strict=False):
            distribution = {"distribution": QUANTILES, "no distribution": (0,) * 9}.get(reply, ())
            found += [Answer(req_id, distribution, "retrieval" if distribution else reply)] * (1 + again)
        self.front.tell(*found)

    @precondition(lambda self: self.there)
    @rule(taken=st.booleans(), errors=st.integers(0, 1), garbage=st.sampled_from([b"", b"garbage"]))
    def tell_status(self, taken: bool, errors: int, garbage: bytes) -> None:
        numbers = [message.number for message in self.front.there.finished]
        self.front.tell(Status(ready=True, errors=errors, taken=max(numbers, default=0) if taken else 0), garbage)

    @precondition(lambda self: self.there)
    @rule()
    def lose(self) -> None:
        self.sent += self.front.there.finished
        self.front.lose()

    @rule(seconds=st.sampled_from([0.0, 0.05, 1.0, LIMIT_S + 1.0]))
    def poll(self, seconds: float) -> None:
        downs = self.front.metrics.statuses.count(None)
        self.front.pass_s(seconds)
        if self.there and self.front.metrics.statuses.count(None) > downs:  # given up for its silence
            self.sent += self.front.there.finished
            self.front.hang_up()

    def teardown(self) -> None:
        front, metrics = self.front, self.front.metrics
        try:
            if self.there:
                self.lose()
            front.connect()
            until(lambda: front.pass_s(0) and not front.service._unsent, "all to be sent")
            front.service.close()
            assert front.service.waiting == 0
            assert sum(metrics.counted.values()) == self.asked
            assert len(front.answers) == metrics.outcomes["predicted"]
            assert len({answer.req_id for answer in front.answers}) == len(front.answers)
            kept = len(front.service._sent)
            until(lambda: len(front.there.finished) >= kept, "what was sent last")
            learned = {message.done.prompt.text for message in [*self.sent, *front.there.finished]}
            assert learned <= self.told
            assert len(self.told - learned) <= metrics.drops["finished"]
            assert len(self.warnings) == len(set(self.warnings))
        finally:
            client.logger.removeFilter(self.note)
            front.hang_up()
            self.folder.cleanup()


TestEvents = pytest.mark.filterwarnings("error")(Events.TestCase)
