"""What Triton makes of the kernels for a GPU, without one: they compile, and values move 16 bytes at a time.

A pointer that is read from a table says nothing of its alignment, and values would move one by one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.extent import HANG_S

SCRIPT = Path(__file__).with_name("compile_script.py")
VALUES = 64 * 128


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, int]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return kernels


def test_values_of_pages_move_in_vectors(found: dict[str, dict[str, int]]) -> None:
    """64 values of a thread, 2 bytes each, or 16; of a copy 8 items of 8 bytes."""
    assert found["quantise"]["ld.global.v4.b32"] == VALUES * 2 // 128 // 16
    assert found["dequantise"]["st.global.v4.b32"] == VALUES * 2 // 128 // 16
    for copy in ("gather", "scatter"):
        assert found[copy]["ld.global.v2.b64"] == found[copy]["st.global.v2.b64"] == 4


def test_codes_move_in_vectors(found: dict[str, dict[str, int]]) -> None:
    assert found["quantise"]["st.global.v4.b32"] == VALUES // 128 // 16
    assert found["dequantise"]["ld.global.v4.b32"] == VALUES // 128 // 16


def test_nothing_is_fused(found: dict[str, dict[str, int]]) -> None:
    """Results would differ from those of the CPU."""
    assert not [name for kernel in found.values() for name in kernel if name.startswith("fma")]
