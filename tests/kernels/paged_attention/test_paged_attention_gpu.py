"""The Triton kernel equals its definition, interpreted on the CPU; and compiles for GPUs that are not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extent import HANG_S
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kernels.paged_attention import PagedKV, gpu
from vllm_ext.kernels.paged_attention.gpu import Launch

HERE = Path(__file__).parent


def told(script: str, *arguments: str, **environment: str) -> dict[str, dict[str, float]]:
    """Return what a script printed."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(HERE / script), *arguments], env={**inherited, **environment}, capture_output=True,
        text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, dict[str, float]]) -> None:
    for case, facts in found.items():
        assert facts["error"] <= facts["allowed"], case
        assert facts["lse_error"] <= (1e-5 if "float32" in case else 1e-2), case
        assert facts["written_besides"] == facts["infinite_lse_differs"] == 0, case


def test_interpreted_kernel_is_the_definition() -> None:
    """In fp32 and fp16: Triton's interpreter computes with the bits of bfloat16."""
    found = told("gpu_script.py", "cpu", TRITON_INTERPRET="1")
    assert len(found) == 30
    check(found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_is_the_definition() -> None:
    check(told("gpu_script.py", "cuda"))


def test_kernel_compiles_for_tensor_cores_and_spills_nothing() -> None:
    found = told("compile_script.py")
    assert {case: facts["spilled_bytes"] for case, facts in found.items() if facts["spilled_bytes"]} == {}
    assert all(facts["tensor_cores"] for case, facts in found.items() if case.startswith("attend"))


def kv_of(layout: PageLayout) -> PagedKV:
    records = torch.zeros(1, RecordFormat(layout).record_bytes, dtype=torch.uint8)
    return PagedKV(layout, torch.zeros(1, layout.page_elements, dtype=layout.dtype), records)


KV = kv_of(PageLayout.rows(torch.float16, 8, 64, 32))


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        # Plenty of tiles: nothing is split. One decode over 32k: as many splits as keep 132 processors busy.
        ((32, 4096, 64, 32768, 132), Launch(rows=16, tiles=4096 // 4 + 64, splits=1)),
        ((32, 1, 1, 32768, 132), Launch(rows=16, tiles=1, splits=16)),
        ((32, 8, 1, 32768, 132), Launch(rows=16, tiles=3, splits=8)),
        ((32, 1, 1, 200, 132), Launch(rows=16, tiles=1, splits=1)),
        ((256, 1, 1, 32768, 132), Launch(rows=32, tiles=2, splits=16)),
        ((56, 4, 2, 32768, 132), Launch(rows=16, tiles=4, splits=8)),
    ],
    ids=["prefill", "decode", "8 tokens", "short", "32 heads share one", "7 heads share one"],
)
def test_programs_of_a_step(sizes: tuple[int, int, int, int, int], expected: Launch) -> None:
    assert Launch.of(KV, *sizes) == expected


@pytest.mark.parametrize(
    ("layout", "num_heads", "message"),
    [
        (PageLayout.rows(torch.float16, 2, 64, 48), 2, "block_size=48: must be a power of two"),
        (PageLayout.rows(torch.float16, 2, 64, 8), 2, "block_size=8: must be a power of two, at least 16"),
        (PageLayout.rows(torch.float16, 2, 64, 32), 3, "num_heads=3: must be a multiple of the 2 KV heads"),
        (PageLayout.transposed_keys(torch.float16, 2, 64, 32), 2, "channels of a token must be next to each other"),
    ],
)
def test_what_the_kernel_has_no_code_for_is_refused_by_name(layout: Any, num_heads: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpu.check(kv_of(layout), num_heads)
