"""Prometheus' own programs, where they are installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.support.extent import HANG_S


def program(name: str) -> str:
    """Where `prometheus` or `promtool` is; the test is skipped where there is none."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not on PATH: expressions are not tried by Prometheus itself (Debian: prometheus)")
    return found


def promtool(*arguments: str) -> str:
    """Run it and return what it prints; a complaint fails the test."""
    run = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout
