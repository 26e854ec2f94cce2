"""The closing line of .ci/run: the sums of all pytest runs, and no success where one of them died."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "add_up_tests.py"
UNIT = "=== 2 failed, 4321 passed, 2 skipped, 300 deselected, 1 warning, 2 errors in 400.01s (0:06:40) ===\n"
ENGINES = "==================== 128 passed, 1 skipped in 88.20s (0:01:28) ====================\n"
SERVERS = "109 passed in 123.45s (0:02:03)\n"
NOISE = "E   10 passed in 3.00s, said a test\n(13 durations < 1s hidden.)\n"


def run(log: str) -> tuple[int, list[str]]:
    done = subprocess.run([sys.executable, str(SCRIPT), "3"], input=log, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def test_all_runs_are_added_up() -> None:
    assert run(UNIT + NOISE + ENGINES + SERVERS) == (0, ["4558 passed, 4 failed, 3 skipped"])


def test_a_run_that_died_is_no_success() -> None:
    said = ["only 2 of 3 pytest runs finished", "237 passed, 0 failed, 1 skipped"]
    assert run(ENGINES + NOISE + SERVERS) == (1, said)
