"""Waiting for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tests.support.extent import HANG_S


def until(there: Callable[[], object]) -> None:
    """Waits; a hang is the end of the test."""
    end = time.monotonic() + HANG_S
    while not there():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True
