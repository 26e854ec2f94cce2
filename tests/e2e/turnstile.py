"""An engine that makes steps when a test says so, and whose clock they move: imported by a server's, see `servers`.

The variable ``TURNSTILE`` names a file, with which a test tells the engine of a running server how many steps it may
make: none, so many, or any number, as without the file. The engine takes in requests and aborts, and answers questions,
all the same.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import by_steps
from forks import HANG_S

VARIABLE = "TURNSTILE"
_LOOK_S = 0.005


class Turnstile:
    """A test's side; open at first."""

    def __init__(self, file: Path) -> None:
        """Take the file, which is written when there is something to tell."""
        self.file = file
        self._orders = 0

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Let no step begin meanwhile. To be entered while the engine has nothing to do."""
        self._tell(0)
        try:
            yield
        finally:
            self._tell(-1)

    def let(self, steps: int) -> None:
        """Return when so many steps that compute something have been made.

        Raises:
            TimeoutError: There was nothing to compute for so long.
        """
        self._tell(steps)
        deadline = time.monotonic() + HANG_S
        while _read(_answer(self.file)) != str(self._orders):
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {HANG_S} s the engine has not made {steps} steps")
            time.sleep(_LOOK_S)

    def _tell(self, steps: int) -> None:
        self._orders += 1
        _write(self.file, f"{self._orders} {steps}")


class _Gate:
    """An engine's side."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._order = ""
        self._left = -1
        """Steps that may be made; less than 0: any number."""

    def is_closed(self) -> bool:
        order, _, steps = _read(self._file).partition(" ")
        if order != self._order:
            self._order, self._left = order, int(steps)
        return self._left == 0

    def passed(self) -> None:
        if self._left > 0:
            self._left -= 1
            if not self._left:
                _write(_answer(self._file), self._order)


def install(file: Path) -> None:
    """Let the engine core that this process or a fork of it runs go by a file."""
    from vllm.v1.engine.core import EngineCoreProc

    run = EngineCoreProc.run_busy_loop

    def run_busy_loop(core: Any) -> Any:
        by_steps.go_by_steps(core.scheduler)
        core.step_fn = _through(_Gate(file), core, core.step_fn)
        return run(core)

    EngineCoreProc.run_busy_loop = run_busy_loop


def _through(gate: _Gate, core: Any, step: Callable[[], tuple[Any, bool]]) -> Callable[[], tuple[Any, bool]]:
    def gated() -> tuple[Any, bool]:
        if core.is_running() and gate.is_closed():
            time.sleep(_LOOK_S)  # for the threads that take in requests
            return None, False
        outputs, has_computed = step()
        if has_computed:
            gate.passed()
        return outputs, has_computed

    return gated


def _answer(file: Path) -> Path:
    return Path(f"{file}.made")


def _read(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def _write(file: Path, text: str) -> None:
    """Write a file as a whole: who reads it meanwhile reads what it held before."""
    new = Path(f"{file}.new")
    new.write_text(text)
    new.replace(file)


if VARIABLE in os.environ:
    install(Path(os.environ[VARIABLE]))
