"""The benchmark of attention on a GPU, tried without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.extent import HANG_S
from vllm_ext.report.results import NEEDS_DEVICE

from .conftest import GPU

SPOILT = """
import sys
sys.argv = ["attention_gpu.py"]
import attention_gpu as benchmark
attend = benchmark.gpu.attend
benchmark.gpu.attend = lambda query, kv, step, out, **options: (
    attend(query, kv, step, out, **options), out.mul_(1.05)
)
sys.exit(benchmark.main(["--dry"]))
"""
RIVALS = """
import sys
sys.argv = ["attention_gpu.py"]
import attention_gpu as benchmark
def missing():
    raise ImportError("no kernel image")
def off(step):
    return [lambda: step._out.fill_(3.0)]
benchmark.Step._rivals = lambda step: {benchmark.FLASH: missing, benchmark.UNIFIED: lambda: off(step)}
sys.exit(benchmark.main(["--dry"]))
"""
ENDED = """
import os, sys
sys.argv = ["attention_gpu.py"]
import attention_gpu as benchmark
measured = benchmark.measured
def ended(cell, *others):
    return os._exit(9) if cell is benchmark.TINY[1] else measured(cell, *others)
benchmark.measured = ended
benchmark.main(["--dry", "--out", sys.stdin.read()])
"""


def run(*args: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], env={**os.environ, **environment}, cwd=GPU, input=stdin, capture_output=True,
        text=True, timeout=HANG_S, check=False,
    )  # fmt: skip


def test_a_try_on_the_cpu_compares_outputs_with_the_definition_and_fills_the_result() -> None:
    done = run("attention_gpu.py", "--dry", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["name"] == "attention_gpu"
    assert set(result["metrics"]) == {
        f"{cell}_{name}_us" for cell in ("1q1s32", "2q8s64") for name in ("own", "own_int8")
    }
    assert all(value > 0 for value in result["metrics"].values())
    assert set(result["baselines"]) == {"memory"}
    assert result["claims"] == [], "numbers of a try mean nothing"
    assert (result["complete"], result["wrong"], result["failed"]) == (True, [], {})


def test_an_output_that_is_off_is_wrong_and_nothing_is_timed() -> None:
    done = run("-c", SPOILT, TRITON_INTERPRET="1")
    assert done.returncode == 1, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert [said.split(":")[0] for said in result["wrong"]] == [
        f"{name} of {cell}" for cell in ("1q1s32", "2q8s64") for name in ("own", "own_int8")
    ]
    off = re.search(r"off by ([\d.]+) of its norm", result["wrong"][0])
    assert off is not None
    assert float(off[1]) == pytest.approx(0.05, rel=0.01), "spoilt by a twentieth, but for what half precision rounds"
    assert result["metrics"] == {}


def test_others_that_fail_are_named_and_leave_our_numbers() -> None:
    """One doesn't import, and the output of the other is off."""
    done = run("-c", RIVALS, TRITON_INTERPRET="1")
    assert done.returncode == 3, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["failed"]) == {"flash_attn_3", "triton_unified"}
    assert result["failed"]["flash_attn_3"] == "ImportError: no kernel image"
    assert "off by" in result["failed"]["triton_unified"]
    assert len(result["metrics"]) == 4
    assert set(result["baselines"]) == {"memory"}
    assert (result["complete"], result["wrong"]) == (True, [])


def test_a_process_that_is_ended_has_written_the_cells_before(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    done = run("-c", ENDED, stdin=str(out), TRITON_INTERPRET="1")
    assert done.returncode == 9, done.stderr
    result = json.loads(out.read_text())
    assert set(result["metrics"]) == {"1q1s32_own_us", "1q1s32_own_int8_us"}
    assert not result["complete"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so() -> None:
    done = run("attention_gpu.py")
    assert done.returncode == NEEDS_DEVICE
    assert "needs a CUDA device" in done.stderr
