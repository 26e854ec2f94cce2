"""What the tests of the prediction service share: stand-ins for what lies beyond each part."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from tests.support.extent import HANG_S
from vllm_ext.config import PredictorConfig
from vllm_ext.prediction.predictor import Prompt
from vllm_ext.predictor.client import GATHER_S, PredictionClient
from vllm_ext.predictor.messages import Answer, Ask, Finished, Message, Status, pack, unpack

HERE = Path(__file__).parent
LIMIT_S = 30 + 5
"""Silence after which the predictor is given up by default: ``timeout_s`` and a margin."""
QUANTILES = (7,) * 9


def make_config(**changes: Any) -> PredictorConfig:
    return PredictorConfig(**{"factory": "fake_predictors:Obedient", "nice": 0, **changes})


def prompt(text: str = "hello") -> Prompt:
    return Prompt(text, 50, "m", 4)


def until(reached: Callable[[], object], what: str) -> None:
    """Wait for something that another thread or process does."""
    deadline = time.monotonic() + HANG_S
    while not reached():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)


def noted(folder: Path, key: str) -> list[Any]:
    """What a fake predictor wrote under a key."""
    try:
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry[key] for entry in entries if key in entry]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """Metrics that remember."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.statuses: list[Status | None] = []
        self.started = 0

    def outcome(self, name: str, count: int = 1) -> None:
        self.outcomes[name] += count

    def dropped(self, what: str, count: int = 1) -> None:
        self.drops[what] += count

    def latency(self, seconds: float) -> None:
        self.latencies.append(seconds)

    def status(self, status: Status | None) -> None:
        self.statuses.append(status)

    def starts(self, total: int) -> None:
        self.started = total

    @property
    def counted(self) -> dict[str, int]:
        return {name: count for name, count in self.outcomes.items() if count}


class FakeProcess:
    """Stands for `PredictorProcess`."""

    def __init__(self) -> None:
        self.given_up = False
        self.starts = 1
        self.calls: list[str] = []

    def ensure(self, now: float) -> None:
        pass

    def works(self) -> None:
        self.calls.append("works")

    def kill(self) -> None:
        self.calls.append("kill")

    def close(self) -> None:
        self.calls.append("close")


class FakeWorker:
    """The predictor's end of the socket, in the test's own thread: hears and says what the test wants."""

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(f"ipc://{path}")
        self.peer = b""
        self.heard: list[Message] = []

    def hear(self) -> list[Message]:
        """All messages so far of who spoke first."""
        while self._socket.poll(0):
            peer, body = self._socket.recv_multipart()
            self.peer = self.peer or peer
            if peer == self.peer:
                self.heard.append(unpack(body))
        return self.heard

    @property
    def asked(self) -> list[str]:
        return [message.req_id for message in self.hear() if isinstance(message, Ask)]

    @property
    def finished(self) -> list[Finished]:
        return [message for message in self.hear() if isinstance(message, Finished)]

    def say(self, *messages: Message | bytes) -> None:
        for message in messages:
            self._socket.send_multipart([self.peer, message if isinstance(message, bytes) else pack(message)])

    def close(self) -> None:
        self._context.destroy(linger=0)


class Front:
    """A client with everything around it in the test's hands."""

    def __init__(self, folder: Path, *, owner: bool = True, **config: Any) -> None:
        self.clock, self.metrics, self.process = Clock(), Recorder(), FakeProcess()
        self.path = folder / "s"
        self.worker: FakeWorker | None = None
        process: Any = self.process if owner else None
        metrics: Any = self.metrics
        self.service = PredictionClient(make_config(**config), self.path, process, metrics, self.clock)
        self.answers: list[Answer] = []

    def listen(self) -> FakeWorker:
        """Let there be a predictor, once more."""
        self.hang_up()
        self.worker = FakeWorker(self.path)
        return self.worker

    @property
    def there(self) -> FakeWorker:
        assert self.worker is not None
        return self.worker

    def hang_up(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def connect(self, status: Status | None = None) -> Front:
        """Let there be a predictor, loaded or in that state, that is heard of."""
        worker = self.listen()
        until(lambda: self.pass_s(0.2) and worker.hear(), "a ping")
        self.tell(status or Status(ready=True, entries=3))
        return self

    def tell(self, *messages: Message | bytes) -> None:
        """Say something, and wait until the client has taken it in, which shows by what is said last: no message."""
        self.there.say(*messages, b"no message")
        drops = self.metrics.drops
        known = drops["message"]
        expected = known + 1 + sum(isinstance(message, bytes) for message in messages)
        until(lambda: self.pass_s(0) and drops["message"] == expected, "what was said")
        drops["message"] -= 1

    @property
    def readable(self) -> bool:
        """Whether the client would find a message."""
        socket = self.service._socket
        return socket is not None and bool(socket.poll(0))

    def pass_s(self, seconds: float) -> bool:
        self.clock.now += seconds
        self.answers += self.service.poll()
        return True

    def ask(self, *req_ids: str) -> None:
        """Ask, and wait until the questions are sent."""
        for req_id in req_ids:
            self.service.ask(req_id, prompt(f"text of {req_id}"))
        self.pass_s(GATHER_S)

    def lose(self) -> None:
        """Let the predictor go, and wait until that is known."""
        self.hang_up()
        known = self.metrics.statuses.count(None)
        until(lambda: self.pass_s(0) and self.metrics.statuses.count(None) > known, "the end to be known")


def child_environment() -> dict[str, str]:
    """Of a process that is to find the fake predictors."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
