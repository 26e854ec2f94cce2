"""The benchmark of copies to and from a GPU, tried without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.extent import HANG_S
from vllm_ext.observability.results import NEEDS_DEVICE

from .conftest import BENCHMARKS


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / "kv_tier_cuda.py"), *args], env={**os.environ, **environment},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def test_a_try_on_the_cpu_checks_bytes_and_fills_the_result() -> None:
    done = run("--dry", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["name"] == "kv_tier_cuda"
    for bits in ("raw", "8bit"):
        for kind in ("store", "load"):
            assert result["metrics"][f"{bits}_{kind}_gb_per_s"] > 0
            assert result["metrics"][f"{bits}_{kind}_of_one_chunk_through_us"] > 0
    assert result["metrics"]["raw_host_bytes_per_kv_byte"] == 1
    assert set(result["baselines"]) == {"one pinned copy"}
    assert result["goals"] == [], "numbers of a try mean nothing"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == NEEDS_DEVICE
    assert "needs a CUDA device" in done.stderr
