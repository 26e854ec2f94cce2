"""Runs scripts that compare kernels with their definition, and reads what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.extent import HANG_S

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Compared:
    """What a script said."""

    status: int
    cases: dict[str, dict[str, Any]]
    """Facts by case."""
    end: dict[str, Any]
    """Its last line: which cases are ``wrong``, which ``failed``, and how many there are."""

    @property
    def holds(self) -> bool:
        """Whether every case was compared and is right."""
        return (self.status, self.end) == (0, {"wrong": [], "failed": [], "cases": len(self.cases)})


def compared(*arguments: str, **environment: str) -> Compared:
    """Run Python with some arguments, such as a script and a device, and return what it said.

    ``TRITON_INTERPRET`` is not inherited.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *arguments], env={**inherited, **environment}, cwd=ROOT, capture_output=True, text=True,
        timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    *lines, end = map(json.loads, done.stdout.splitlines())
    return Compared(done.returncode, {line.pop("case"): line for line in lines}, end)
