"""The benchmark of copies to and from a GPU, tried without one."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.extent import HANG_S
from vllm_ext.report.results import NEEDS_DEVICE

from .conftest import GPU

CHANGED = """
import os, sys
import kv_tier_cuda as benchmark
{}
sys.exit(benchmark.main(["--dry", *sys.stdin.read().split()]))
"""
WRONG = """
benchmark.wrong_bytes = lambda tier: 5 * (tier.bits == benchmark.QUANTISED)
"""
FAILS = """
def polled(tier, repeats):
    raise RuntimeError("a copy failed")
benchmark.polled = polled
"""
ENDED = """
benchmark.polled = lambda tier, repeats: os._exit(9)
"""


def run(*args: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], env={**os.environ, **environment}, cwd=GPU, input=stdin, capture_output=True,
        text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def test_a_try_on_the_cpu_checks_bytes_and_fills_the_result() -> None:
    done = run("kv_tier_cuda.py", "--dry", TRITON_INTERPRET="1")
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
    assert result["claims"] == [], "numbers of a try mean nothing"
    assert (result["complete"], result["wrong"], result["failed"]) == (True, [], {})


def test_wrong_bytes_are_named_and_what_keeps_its_bytes_is_measured() -> None:
    done = run("-c", CHANGED.format(WRONG), TRITON_INTERPRET="1")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["wrong"] == ["5 bytes are wrong at 8 bits"]
    assert "raw_store_gb_per_s" in result["metrics"]
    assert not [name for name in result["metrics"] if name.startswith("8bit")]


def test_a_part_that_fails_is_named_and_leaves_the_others() -> None:
    done = run("-c", CHANGED.format(FAILS), TRITON_INTERPRET="1")
    assert done.returncode == 3, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failed"] == {f"{name} polled": "RuntimeError: a copy failed" for name in ("raw", "8bit")}
    assert {"raw_store_gb_per_s", "8bit_load_before_stores_gb_per_s"} <= result["metrics"].keys()
    assert (result["complete"], result["wrong"]) == (True, [])


def test_a_process_that_is_ended_has_written_the_parts_before(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run("-c", CHANGED.format(ENDED), stdin=f"--out {out}", TRITON_INTERPRET="1")
    assert done.returncode == 9, done.stderr
    result = json.loads(out.read_text())
    assert {"raw_store_gb_per_s", "raw_load_gb_per_s"} <= result["metrics"].keys()
    assert set(result["baselines"]) == {"one pinned copy"}
    assert not result["complete"]


@pytest.mark.parametrize(("rate", "missed"), [(46.0, set()), (13.0, {"store", "load"})])
def test_a_link_that_idles_between_looks_is_a_goal_missed(rate: float, missed: set[str]) -> None:
    """However fast a job is that is looked at all the time."""
    benchmark = importlib.import_module("kv_tier_cuda")
    metrics = {f"{name}_{kind}_gb_per_s": 100.0 for name in ("raw", "8bit") for kind in ("store", "load")}
    metrics |= {f"{name}_{kind}_kernel_gb_per_s": 900.0 for name in ("raw", "8bit") for kind in ("pack", "unpack")}
    metrics |= {f"raw_{kind}_polled_{period}ms_gb_per_s": 50.0 for kind in ("store", "load") for period in (6, 20)}
    metrics |= {f"raw_{kind}_polled_20ms_gb_per_s": rate for kind in ("store", "load")}
    goals = benchmark.claims(metrics, {"store_gb_per_s": 50.0, "load_gb_per_s": 50.0})
    found = {goal.name for goal in goals if not goal.met}
    assert found == {f"raw_{kind}_polled_20ms / one pinned copy" for kind in missed}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so() -> None:
    done = run("kv_tier_cuda.py")
    assert done.returncode == NEEDS_DEVICE
    assert "needs a CUDA device" in done.stderr
