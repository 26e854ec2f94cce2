"""What tests with a real predictor's process share: the process, and a socket to it that remembers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq

from tests.support.extent import HANG_S
from vllm_ext.prediction.predictor import FinishedPrompt
from vllm_ext.predictor.messages import Answer, Ask, Finished, Message, Ping, Status, pack, unpack
from vllm_ext.predictor.process import WorkerOptions

from .parts import child_environment, make_config, noted, prompt, until


class FrontEnd:
    """A socket to a predictor's process, with what that said."""

    def __init__(self, path: Path) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.connect(f"ipc://{path}")
        self.heard: list[Message] = []

    def send(self, *messages: Message | bytes) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else pack(message))

    def ask(self, req_id: str, text: str = "hello") -> None:
        self.send(Ask(req_id, prompt(text)))

    def end(self, number: int, text: str = "hello", *, predicted: int = 0) -> None:
        done = FinishedPrompt(prompt(text), number, 1.0)
        self.send(Finished(number, done, predicted, predicted))

    def listen(self) -> list[Message]:
        while self.socket.poll(0):
            self.heard.append(unpack(self.socket.recv()))
        return self.heard

    def answer_to(self, req_id: str) -> Answer:
        """Wait for the answer to a question, which must be the only one."""

        def found() -> list[Answer]:
            return [each for each in self.listen() if isinstance(each, Answer) and each.req_id == req_id]

        until(found, f"the answer to {req_id}")
        (answer,) = found()
        return answer

    def status(self) -> Status:
        known = len(self.listen())
        self.send(Ping())
        until(lambda: any(isinstance(each, Status) for each in self.listen()[known:]), "its status")
        return next(each for each in reversed(self.heard) if isinstance(each, Status))

    def ready(self) -> FrontEnd:
        until(lambda: self.status().ready, "a predictor that is ready")
        return self

    def close(self) -> None:
        self._context.destroy(linger=0)


def worker_command(
    folder: Path, *, patch: str = "", name: str = "p/s", shared: bool = False, **config: Any
) -> list[str]:
    """What runs a predictor's process that learns every 20 ms; its parent is who starts it.

    Args:
        folder: Its own, with a short path.
        patch: Statements that change constants of its modules ``worker`` and ``learner``.
        name: Of the socket in the folder.
        shared: Whether several may be started, of which one serves.
        config: As of `PredictorConfig`.
    """
    made = make_config(**config).model_dump(mode="json")
    options = WorkerOptions(str(folder / name), str(folder / "kept"), 0, made, shared)
    code = f"""
import logging, os, sys
from vllm_ext.predictor import learner, worker
learner.EVERY_S = 0.02
learner._FIRST_PAUSE_S = 0.02
{patch}
status = worker.main([sys.argv[1].replace('"parent":0', f'"parent":{{os.getppid()}}')])
logging.shutdown()
os._exit(status)
"""
    return [sys.executable, "-c", code, msgspec.json.encode(options).decode()]


class WorkerProcess:
    """A predictor's process with a fake predictor."""

    def __init__(self, folder: Path, *, name: str = "p/s", **options: Any) -> None:
        """Start it; arguments as of `worker_command`."""
        self.folder, self.socket = folder, folder / name
        self._stderr = folder / "stderr"
        self._fronts: list[FrontEnd] = []
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                worker_command(folder, name=name, **options),
                stdin=subprocess.DEVNULL,
                stderr=stderr,
                env=child_environment(),
            )

    def kill(self) -> None:
        """Kill it if it still runs."""
        self.process.kill()
        self.process.wait(HANG_S)
        for front in self._fronts:
            front.close()

    def connect(self) -> FrontEnd:
        self._fronts.append(FrontEnd(self.socket))
        return self._fronts[-1]

    def terminate(self) -> int:
        """Have it end; returns the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()

    def ended(self) -> int:
        """Wait for its end; returns the exit status."""
        return self.process.wait(HANG_S)

    @property
    def log(self) -> str:
        return self._stderr.read_text(encoding="utf-8")

    def noted(self, key: str) -> list[Any]:
        """What the fake predictor was asked or told."""
        return noted(self.folder / "kept", key)
