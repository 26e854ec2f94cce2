"""The benchmark of copies to and from a GPU, tried without one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.extent import HANG_S
from vllm_ext.report.results import NEEDS_DEVICE

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
            assert result["metrics"][f"{bits}_{kind}_polled_20ms_gb_per_s"] > 0
            assert result["metrics"][f"{bits}_{kind}_polled_6ms_launching_ms_per_gib"] > 0
            assert result["metrics"][f"{bits}_compute_time_beside_{kind}s_ratio"] > 0
    assert result["metrics"]["raw_host_bytes_per_kv_byte"] == 1
    assert set(result["baselines"]) == {"one pinned copy"}
    assert result["goals"] == [], "numbers of a try mean nothing"


@pytest.mark.parametrize(("rate", "missed"), [(46.0, set()), (13.0, {"store", "load"})])
def test_a_link_that_idles_between_looks_is_a_goal_missed(rate: float, missed: set[str]) -> None:
    """However fast a job is that is looked at all the time."""
    benchmark = importlib.import_module("kv_tier_cuda")
    metrics = {f"{name}_{kind}_gb_per_s": 100.0 for name in ("raw", "8bit") for kind in ("store", "load")}
    metrics |= {f"{name}_{kind}_kernel_gb_per_s": 900.0 for name in ("raw", "8bit") for kind in ("pack", "unpack")}
    metrics |= {f"raw_{kind}_polled_{period}ms_gb_per_s": 50.0 for kind in ("store", "load") for period in (6, 20)}
    metrics |= {f"raw_{kind}_polled_20ms_gb_per_s": rate for kind in ("store", "load")}
    goals = benchmark.goals(metrics, {"store_gb_per_s": 50.0, "load_gb_per_s": 50.0})
    found = {goal.metric for goal in goals if not goal.met}
    assert found == {f"raw_{kind}_polled_20ms / one pinned copy" for kind in missed}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert done.returncode == NEEDS_DEVICE
    assert "needs a CUDA device" in done.stderr
