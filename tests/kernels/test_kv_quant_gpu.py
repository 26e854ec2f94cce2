"""The Triton kernels of 8-bit KV say what the definition says, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.extent import HANG_S

SCRIPT = Path(__file__).with_name("gpu_script.py")


def differences(device: str, **environment: str) -> dict[str, dict[str, float]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), device], env={**os.environ, **environment}, capture_output=True, text=True,
        timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 12
    return found


def check(found: dict[str, dict[str, float]], *, rounds: bool) -> None:
    for name, facts in found.items():
        largest = 0.0 if rounds or "bfloat16" not in name else torch.finfo(torch.bfloat16).eps
        assert facts.pop("largest_relative_difference") <= largest, name
        assert facts == {"holds": 1.0, "records_that_differ": 0.0, "places_written_besides": 0.0}, name


def test_interpreted_kernels_are_the_definition() -> None:
    """But for the last bit of bfloat16: where a GPU rounds to the nearest, Triton's interpreter cuts."""
    check(differences("cpu", TRITON_INTERPRET="1"), rounds=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernels_are_the_definition() -> None:
    check(differences("cuda"), rounds=True)
