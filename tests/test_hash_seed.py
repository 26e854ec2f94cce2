"""Invariant 9: decisions and simulated runs are the same bytes in a process of another hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support import digests, run_digests
from tests.support.extent import HANG_S


def test_invariant_9_nothing_depends_on_the_hash_seed() -> None:
    """Sets of request ids iterate in an order that changes with the process; nothing may follow it."""
    script = Path(__file__).with_name("support") / "print_digests.py"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ours = f"{digests.digests()}\n{run_digests.digests()}"
    assert ours.count("depth 2") > 20
    assert done.stdout.strip().splitlines() == ours.splitlines()
