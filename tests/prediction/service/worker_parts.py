"""What tests with a real predictor's process share: the process, and a connection to it that remembers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.extent import HANG_S
from vllm_ext.prediction.service.link import Link, LinkBroken
from vllm_ext.prediction.service.messages import Answer, Ask, Question, Status, Told
from vllm_ext.prediction.service.worker_options import WorkerOptions

from .parts import make_config, until

HERE = Path(__file__).parent


class FrontEnd:
    """A connection to a predictor's process, with what it said."""

    def __init__(self, path: Path) -> None:
        self.link = _connected(path)
        self.answers: list[Answer] = []
        self._broken = False

    def ask(
        self, req_id: str, text: str = "hello", *, max_tokens: int = 100, model: str = "m", prompt_tokens: int = 0
    ) -> None:
        self.send(Ask(req_id, text, max_tokens, model, prompt_tokens))

    def send(self, question: Question) -> None:
        assert self.link.send(question)

    def listen(self) -> list[Answer]:
        """Return what has come so far."""
        if not self._broken:
            try:
                self.answers += self.link.receive()
            except LinkBroken:
                self._broken = True
        return self.answers

    def broken(self) -> bool:
        """Whether the process hung up, and all it said was read."""
        self.listen()
        return self._broken

    @property
    def told(self) -> list[Told]:
        return [answer for answer in self.listen() if isinstance(answer, Told)]

    @property
    def status(self) -> Status | None:
        """The last one."""
        return next((answer for answer in reversed(self.listen()) if isinstance(answer, Status)), None)

    def answer_to(self, req_id: str) -> Told:
        """Wait for the answer to a question, which must be the only one."""
        until(lambda: any(told.req_id == req_id for told in self.told), f"the answer to {req_id}")
        (found,) = (told for told in self.told if told.req_id == req_id)
        return found

    def ready(self) -> FrontEnd:
        until(lambda: self.status, "a predictor that is ready")
        return self


def _connected(path: Path) -> Link:
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            return Link(path, max_unsent=10_000)
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens at {path}"
            time.sleep(0.005)


def worker_command(folder: Path, *, patch: str = "", name: str = "s", **config: Any) -> list[str]:
    """What runs a predictor's process that learns every 20 ms.

    Args:
        folder: Its own, with a short path.
        patch: Statements that change constants of its modules ``worker`` and ``work``.
        name: Of the socket in the folder.
        config: As of `PredictorConfig`.
    """
    made = msgspec.to_builtins(make_config(**config))
    options = WorkerOptions(socket=str(folder / name), folder=str(folder / "kept"), config=made)
    code = f"""
import logging, os, sys
from vllm_ext.prediction.service import work, worker
worker._STATUS_S = 0.02
{patch}
status = worker.main(sys.argv[1:])
logging.shutdown()
os._exit(status)
"""
    return [sys.executable, "-c", code, msgspec.json.encode(options).decode()]


class WorkerProcess:
    """A predictor's process with a fake predictor, as a front end starts it."""

    def __init__(self, folder: Path, *, name: str = "s", **options: Any) -> None:
        """Start it; arguments as of `worker_command`."""
        self.folder = folder
        self.socket = folder / name
        self._stderr = folder / "stderr"
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                worker_command(folder, name=name, **options),
                stdin=subprocess.PIPE,
                stderr=stderr,
                env=child_environment(),
            )

    def end(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait(HANG_S)
        self.end_input()

    def connect(self) -> FrontEnd:
        return FrontEnd(self.socket)

    def end_input(self) -> None:
        """What a front end does that goes, however it goes."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Wait for its end; returns the exit status."""
        return self.process.wait(HANG_S)

    @property
    def log(self) -> str:
        return self._stderr.read_text(encoding="utf-8")

    def noted(self, key: str) -> list[Any]:
        """What the fake predictor was asked or told."""
        return noted(self.folder / "kept", key)


def noted(folder: Path, key: str) -> list[Any]:
    """What a fake predictor wrote under a key."""
    try:
        lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return [entry[key] for entry in entries if key in entry]


def child_environment() -> dict[str, str]:
    """Of a process that is to find the fake predictors."""
    return {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
