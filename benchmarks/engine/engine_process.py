"""Run one cell of a benchmark in a child process of its own, and leave nothing of it behind.

A part of the benchmarks on the real engine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CELL = Path(__file__).with_name("engine_cell.py")
TIMEOUT_S = 900.0
LOG_LINES = 60


class CellFailed(RuntimeError):
    """The engine of a cell did not start, failed or hung; the message ends with its last lines."""


def progress(text: str) -> None:
    """Say on stderr how far a benchmark is."""
    print(text, file=sys.stderr, flush=True)


def serve(label: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Start a fresh engine in a fresh process, serve, and return what was observed; see `engine_cell`.

    Raises:
        CellFailed: see there; the child and its own children are gone then too.
    """
    with tempfile.TemporaryDirectory(prefix="engine_cell-") as folder:
        spec_file, out_file = Path(folder, "spec.json"), Path(folder, "out.json")
        spec_file.write_text(json.dumps(spec), encoding="utf-8")
        run(f"{label}: the engine", [sys.executable, str(CELL), str(spec_file), str(out_file)])
        observed: dict[str, Any] = json.loads(out_file.read_text(encoding="utf-8"))
        return observed


def run(label: str, command: list[str]) -> None:
    """Run a command to its end.

    Raises:
        CellFailed: it failed or hung; see there.
    """
    with tempfile.TemporaryDirectory(prefix="engine_cell-") as folder:
        log_file = Path(folder, "log.txt")
        with log_file.open("wb") as log:
            status = _run(command, log)
        if status != "0":
            tail = log_file.read_text(encoding="utf-8", errors="replace").splitlines()[-LOG_LINES:]
            raise CellFailed("\n".join([f"{label} failed (exit status {status}); its last lines:", *tail]))


def _run(command: list[str], log: Any) -> str:
    """Return the exit status of a command in a session of its own, which ends with it, and with this process.

    Engine core and worker share the session, and vLLM's shutdown may have been cut short.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return str(child.wait(TIMEOUT_S))
    except subprocess.TimeoutExpired:
        return f"none after {TIMEOUT_S:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError):  # nothing may be left
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        signal.signal(signal.SIGTERM, before)
