"""Runs a script in a process of its own, as what decides at import needs it: Triton interprets kernels or compiles."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support.extent import HANG_S


def told(script: Path, *arguments: str, **environment: str) -> Any:
    """Return what a script printed in its last line, which is JSON.

    Args:
        script: Its file.
        arguments: Of its command line.
        environment: Variables besides those of this process, of which ``TRITON_INTERPRET`` is not inherited.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], env={**inherited, **environment}, capture_output=True, text=True,
        timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
