"""What the set-up asks of the machine: a Python that vLLM supports, and whether there is a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

SUPPORTED = ((3, 11), (3, 14))
"""Oldest and newest Python that vLLM 0.32 installs on."""


class SetupError(Exception):
    """What went wrong and what to do about it."""


def clean_environ() -> dict[str, str]:
    """The environment without the variables that would make pip see or write another installation."""
    hidden = {"PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_USER", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in hidden}


def find_interpreter() -> str:
    """The Python to build with: the running one if vLLM supports it, else the newest supported one on the PATH.

    Raises:
        SetupError: None found that can make virtual environments; names what was seen.
    """
    oldest, newest = SUPPORTED
    minors = range(newest[1], oldest[1] - 1, -1)
    running = getattr(sys, "_base_executable", sys.executable)  # never the environment that is about to be replaced
    seen: list[str] = []
    for candidate in (running, *(f"python3.{minor}" for minor in minors)):
        if (path := shutil.which(candidate)) is None:
            continue
        probe = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
        result = subprocess.run([path, "-c", probe], capture_output=True, text=True, check=False, env=clean_environ())
        if result.returncode != 0:
            seen.append(f"{path} (does not run, or lacks venv or ensurepip)")
        elif oldest <= tuple(int(part) for part in result.stdout.split()) <= newest:
            return path
        else:
            seen.append(f"{path} (Python {'.'.join(result.stdout.split())})")
    raise SetupError(
        f"vLLM 0.32.0 needs Python {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]} with the venv module; found only "
        f"{', '.join(seen)}. Install one (on Debian: python3.11 and python3.11-venv) and run "
        "`make setup PYTHON=/path/to/python` again."
    )


def detect_device() -> str:
    """`cuda` if nvidia-smi works and lists a GPU, else `cpu`."""
    try:
        result = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return "cpu"
    return "cuda" if result.returncode == 0 and "GPU" in result.stdout else "cpu"
