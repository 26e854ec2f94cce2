"""Processes of the check of a machine with a GPU: start them, end them at a limit or at a signal, read what they wrote.

Each is the leader of a session of its own and prints into files. So it can be ended with all that it started, and no
pipe that some descendant holds open keeps the check waiting.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Any, Self

from gpu_parts import Command

ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    "vllm": "vLLM is not here: bring the bundle of scripts/gpu_bundle.py",
    "pydantic": "pydantic, which reads options, is not here: bring the bundle of scripts/gpu_bundle.py",
    "pytest": "pytest is not here",
}
"""Modules that commands need, and what to say where one is missing."""
_POLL_S = 0.05
_KILLED_S = 10.0
"""For a killed process to go; one that the driver holds may take longer, and is left behind."""
_WIND_UP_S = 10.0
"""Of a command's limit, for its imports, which its own clock may not see, and for its end."""
_TAIL_CHARS = 2500
Found = dict[str, Any]
"""What became of a command: its ``outcome``, exit ``status``, ``seconds`` and ``result``, names of what it found
``wrong``, ``why`` it was ended or not begun, and the ``tail`` of what it printed."""


class Outcome(StrEnum):
    """How a command ended."""

    DONE = "done"
    WRONG = "wrong"
    FAILED = "failed"
    INCOMPLETE = "incomplete"
    INTERRUPTED = "interrupted"
    NOT_BEGUN = "not begun"
    LEFT_OUT = "left out"
    """It needs what is not here."""


class Interrupted(BaseException):
    """The process was told to end; the text is the signal's name. Like KeyboardInterrupt, it is no error."""


class Signals:
    """SIGINT and SIGTERM as `Interrupted`: raised wherever the process is, or `at_safe_points`, by `check` only."""

    def __init__(self) -> None:
        self.at_safe_points = False
        self._received: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `Interrupted` if a signal came; only once, so that what ends all is not interrupted itself."""
        if self._received is not None:
            received, self._received = self._received, None
            raise Interrupted(received)

    def _receive(self, number: int, _: object) -> None:
        self._received = signal.Signals(number).name
        if not self.at_safe_points:
            self.at_safe_points = True
            self.check()


@dataclass(frozen=True, kw_only=True)
class Running:
    """A process that was started."""

    part: str
    command: Command
    process: subprocess.Popen[bytes]
    began: float


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Runs commands.

    Args:
        environment: Of the processes.
        modules: Of `MODULES`, those that they can import.
        scratch: For all that they write, temporary files included.
        dry: Try imports and arguments only.
        signals: Looked at while processes are waited for.
    """

    environment: Mapping[str, str]
    modules: frozenset[str]
    scratch: Path
    dry: bool
    signals: Signals = field(default_factory=Signals)
    running: list[Running] = field(default_factory=list)

    def obstacle(self, command: Command) -> str | None:
        """Return why a command can't be run; None: it can."""
        missing = [name for name in command.needs.split() if name not in self.modules]
        return MODULES[missing[0]] if missing else None

    def start(self, part: str, command: Command, limit_s: float) -> Running:
        """Start a command, and tell it when it will be ended."""
        folder, temporary = self.folder(part), self.scratch / "tmp"
        for path in (folder, temporary):
            path.mkdir(exist_ok=True)
        texts = {
            "{out}": str(self._file(part, command, "json")),
            "{folder}": str(folder),
            "{seconds}": f"{max(0.0, limit_s - _WIND_UP_S):.0f}",
        }
        arguments = [_filled(argument, texts) for argument in (command.dry if self.dry else command.arguments)]
        with (
            self._file(part, command, "stdout").open("wb") as stdout,
            self._file(part, command, "stderr").open("wb") as stderr,
        ):
            process = subprocess.Popen(
                [sys.executable, *arguments], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
                env={**os.environ, "TMPDIR": str(temporary), **self.environment}, start_new_session=True,
            )  # fmt: skip
        running = Running(part=part, command=command, process=process, began=time.monotonic())
        self.running.append(running)
        return running

    def wait(self, started: Iterable[Running], limit_s: float) -> dict[str, Found]:
        """Wait until processes have ended, end those that are left at the limit, and return what they wrote, by name.

        Raises:
            Interrupted: A signal came; those that had not ended still run.
        """
        end, left, found = time.monotonic() + limit_s, list(started), {}
        while left:
            self.signals.check()
            for one in [one for one in left if one.process.poll() is not None]:
                left.remove(one)
                found[one.command.name] = self._ended(one)
            if left and time.monotonic() >= end:
                why = f"ended at its limit of {limit_s:.0f} s"
                found |= {one.command.name: self._ended(one, Outcome.INCOMPLETE, why) for one in left}
                break
            time.sleep(_POLL_S if left else 0)
        return found

    def end_all(self, why: str) -> list[tuple[str, str, Found]]:
        """End all that runs; return part, command and what it had written."""
        return [(one.part, one.command.name, self._ended(one, Outcome.INTERRUPTED, why)) for one in list(self.running)]

    def folder(self, part: str) -> Path:
        """Return where the commands of a part write."""
        return self.scratch / part

    def _ended(self, one: Running, outcome: Outcome | None = None, why: str = "") -> Found:
        """Return what a process wrote, after it and all that it started were ended.

        Args:
            one: The process.
            outcome: If it was ended before its time; None: by its status.
            why: It was.
        """
        seconds = round(time.monotonic() - one.began, 1)
        with contextlib.suppress(ProcessLookupError):  # what a command leaves behind would hold the device's memory
            os.killpg(one.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.process.wait(_KILLED_S)
        self.running.remove(one)
        status = one.process.returncode
        result = self._result(one)
        wrong = _wrong(result)
        outcome = outcome or _outcome(status, wrong)
        found: Found = {"outcome": outcome, "status": status, "seconds": seconds}
        found |= {"why": why} if why else {}
        found |= {"wrong": wrong} if wrong else {}
        if outcome is not Outcome.DONE:
            stdout, stderr = (self._printed(one, stream) for stream in ("stdout", "stderr"))
            found["tail"] = (stdout[-_TAIL_CHARS // 2 :] + stderr[-_TAIL_CHARS:]).strip()
        if result is not None:
            found["result"] = result
        return found

    def _result(self, one: Running) -> Any:
        """Return what is in a command's file, or else the objects of the lines that it printed; None: nothing."""
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._file(one.part, one.command, "json").read_bytes())
        return [found for line in self._printed(one, "stdout").splitlines() if (found := _object(line))] or None

    def _printed(self, one: Running, stream: str) -> str:
        return self._file(one.part, one.command, stream).read_text(errors="replace")

    def _file(self, part: str, command: Command, ending: str) -> Path:
        return self.folder(part) / f"{command.name}.{ending}"


def _outcome(status: int, wrong: Sequence[str]) -> Outcome:
    if wrong and status in (0, 1):
        return Outcome.WRONG
    return Outcome.DONE if status == 0 else Outcome.FAILED


def _wrong(result: Any) -> list[str]:
    """Return what a result says is wrong; of lines whose last is missing, the cases that are over their allowance."""
    results = [one for one in (result if isinstance(result, list) else [result]) if isinstance(one, dict)]
    named = [names for one in results if isinstance(names := one.get("wrong"), list)]
    over = [one["case"] for one in results if one.get("over") and "case" in one]
    return list(dict.fromkeys(map(str, (*over, *chain.from_iterable(named)))))


def _object(line: str) -> dict[str, Any] | None:
    """Return the JSON object that a line is; None: it is something else, or was cut off."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        if isinstance(found, dict):
            return found
    return None


def _filled(argument: str, texts: Mapping[str, str]) -> str:
    for name, value in texts.items():
        argument = argument.replace(name, value)
    return argument
