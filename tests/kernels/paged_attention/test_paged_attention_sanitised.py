"""The kernel for the CPU touches nothing but what it is given, and does nothing that C++ leaves undefined."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extent import HANG_S, quick
from vllm_ext.kernels import native
from vllm_ext.kernels.paged_attention import cpu

SCRIPT = Path(__file__).with_name("sanitised_script.py")
SANITISERS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""Not optimised: 11 s to compile and 14 s to run, and with -O1 50 s to compile."""
FLAGS = tuple(flag for flag in native.FLAGS if flag != "-O3")
FIELDS = json.dumps([(name, kind.__name__) for name, kind in cpu._FIELDS])


@pytest.fixture(scope="module")
def runtimes() -> list[str]:
    """The sanitisers' libraries, which have to be there before Python itself."""
    found = []
    for name in ("libasan.so", "libubsan.so"):
        command = [native.COMPILER, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"this {native.COMPILER} has no {name}")
        found.append(path)
    return found


@pytest.fixture(scope="module")
def library(runtimes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sanitised") / "cpu.so"
    command = [native.COMPILER, *FLAGS, *cpu.FLAGS, *SANITISERS, "-o", str(made), str(cpu.SOURCE)]
    subprocess.run(command, check=True, timeout=HANG_S)
    return made


def run(library: Path, runtimes: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    command = [sys.executable, str(SCRIPT), str(library), FIELDS, *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=HANG_S)


def test_sanitisers_find_nothing(library: Path, runtimes: list[str]) -> None:
    done = run(library, runtimes, *quick((), full=("--all",)))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == quick(84, full=1008)


@pytest.mark.parametrize(
    ("planted", "finding"),
    [
        ("id", "AddressSanitizer: heap-buffer-overflow"),
        ("query", "AddressSanitizer: heap-buffer-overflow"),
        ("misaligned", "runtime error: load of misaligned address"),
    ],
)
def test_sanitisers_find_what_was_planted(planted: str, finding: str, library: Path, runtimes: list[str]) -> None:
    """Lengths that bypass the checks in Python, told to be larger than they are, and a pointer to half a number."""
    done = run(library, runtimes, "--plant", planted)
    assert done.returncode != 0
    assert finding in done.stderr
    assert "cpu.cpp" in done.stderr, "the finding is the kernel's"
