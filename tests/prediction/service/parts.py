"""What the tests of the prediction service share: stand-ins for what lies beyond each part."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.extent import HANG_S
from vllm_ext.config import PredictorConfig
from vllm_ext.prediction.service.client import LateHint, PredictionService
from vllm_ext.prediction.service.messages import Answer, Frames, Question, Status, pack, read_question

DIM = 6
LIMIT_S = 30 + 5
"""Silence after which the predictor is given up by default: ``timeout_s`` and a margin."""
OBEDIENT = "fake_predictors:Obedient"


def make_config(**changes: Any) -> PredictorConfig:
    return PredictorConfig(**{"factory": OBEDIENT, "nice": 0, **changes})


def units(count: int, seed: int = 0) -> NDArray[np.float32]:
    """Random unit vectors, [count, DIM]."""
    rows = np.random.default_rng(seed).standard_normal((count, DIM))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows.astype(np.float32)


def until(reached: Callable[[], object], what: str) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + HANG_S
    while not reached():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.005)


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Recorder:
    """`ServiceMetrics` that remember."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.latencies: list[float] = []
        self.statuses: list[Status | None] = []
        self.started = 0

    def outcome(self, name: str, count: int = 1) -> None:
        assert name
        self.outcomes[name] += count

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
        self.calls.append("ensure")

    def works(self) -> None:
        self.calls.append("works")

    def kill(self) -> None:
        self.calls.append("kill")

    def close(self) -> None:
        self.calls.append("close")


class FakeWorker:
    """The predictor's end of the socket, in the test's own thread: hears and says what the test wants."""

    def __init__(self, path: Path) -> None:
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen()
        self._connection: socket.socket | None = None
        self._frames = Frames()

    @property
    def connection(self) -> socket.socket:
        if self._connection is None:
            self._listening.setblocking(False)
            self._connection, _ = self._listening.accept()
            self._connection.setblocking(False)
            self._frames = Frames()
        return self._connection

    def heard(self) -> list[Question]:
        """What has come since the last call."""
        found: list[Question] = []
        while True:
            try:
                data = self.connection.recv(1 << 20)
            except BlockingIOError:
                return found
            if not data:
                return found
            found += map(read_question, self._frames.feed(data))

    def say(self, *answers: Answer) -> None:
        for answer in answers:
            self.connection.sendall(pack(answer))

    def hang_up(self) -> None:
        self.connection.close()
        self._connection = None

    def close(self) -> None:
        self._listening.close()
        if self._connection is not None:
            self._connection.close()


class Front:
    """A service with everything around it in the test's hands."""

    def __init__(self, folder: Path, *, owner: bool = True, **config: Any) -> None:
        self.clock, self.metrics = Clock(), Recorder()
        self.process = FakeProcess() if owner else None
        self.path = folder / "s"
        self.worker: FakeWorker | None = None
        self.service = PredictionService(make_config(**config), self.path, self.process, self.metrics, self.clock)

    def listen(self) -> FakeWorker:
        """Let there be a predictor, once more."""
        self.stop_listening()
        self.path.unlink(missing_ok=True)
        self.worker = FakeWorker(self.path)
        return self.worker

    @property
    def there(self) -> FakeWorker:
        assert self.worker is not None
        return self.worker

    def stop_listening(self) -> None:
        if self.worker is not None:
            self.worker.close()

    def ask(self, *req_ids: str) -> None:
        for req_id in req_ids:
            self.service.ask(req_id, f"text of {req_id}", 50, "m", 4)

    def pass_s(self, seconds: float) -> list[LateHint]:
        self.clock.now += seconds
        return self.service.poll()

    @property
    def calls(self) -> list[str]:
        """What the process was told to do, asked for again left out."""
        assert self.process is not None
        return [call for call in self.process.calls if call != "ensure"]
