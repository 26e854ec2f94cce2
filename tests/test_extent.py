"""What `make test` leaves out is left out only there: `make test-all` runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extent import HANG_S

ROOT = Path(__file__).parents[1]
SAMPLE = """
import pytest
from tests.support.extent import quick, with_full

@pytest.mark.parametrize("number", with_full([1], [1, 2]))
def test_one_argument(number):
    assert number in (1, 2)

@pytest.mark.parametrize(("one", "other"), with_full([(1, 2)], [(1, 2), (3, 4), (5, 6)]))
def test_several_arguments(one, other):
    assert other == one + 1

@pytest.mark.full
def test_whole():
    assert quick(1, full=2) == 2
"""


@pytest.mark.parametrize(("full", "chosen"), [("", "2 passed, 4 deselected"), ("1", "6 passed in")])
def test_only_a_full_run_takes_everything(tmp_path: Path, full: str, chosen: str) -> None:
    sample = tmp_path / "test_sample.py"
    sample.write_text(SAMPLE, encoding="utf-8")
    command = [
        str(Path(sys.executable).with_name("pytest")),
        "-p",
        "tests.conftest",
        "-c",
        str(ROOT / "pyproject.toml"),
        str(sample),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_EXT_TEST_FULL": full}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert chosen in done.stdout
