"""The Triton kernels of 8-bit KV say what the definition says, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.compared import compared

SCRIPT = Path(__file__).with_name("gpu_script.py")
CASES = 12
SPOILT = """
from tests.kernels import gpu_script as script
dequantise = script.gpu.dequantise
def spoilt(records, slots, pages, ids, fmt):
    dequantise(records, slots, pages, ids, fmt)
    pages[ids] *= 3
script.gpu.dequantise = spoilt
raise SystemExit(script.main("cpu"))
"""


def test_interpreted_kernels_are_the_definition() -> None:
    found = compared(str(SCRIPT), "cpu", TRITON_INTERPRET="1")
    assert found.holds, json.dumps(found.cases)
    assert len(found.cases) == CASES


def test_values_that_come_back_thrice_as_large_are_wrong() -> None:
    """In every case, whatever its type; and the exit status says so."""
    found = compared("-c", SPOILT, TRITON_INTERPRET="1")
    assert found.status == 1
    assert found.end == {"wrong": list(found.cases), "failed": [], "cases": CASES}
    assert {tuple(facts["over"]) for facts in found.cases.values()} == {("largest_relative_difference",)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernels_are_the_definition() -> None:
    found = compared(str(SCRIPT), "cuda")
    assert found.holds, json.dumps(found.cases)
