"""The benchmark of attention on a GPU, tried without one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from tests.extent import HANG_S
from vllm_ext.report.results import NEEDS_DEVICE

from .conftest import BENCHMARKS

SPOILT = """
import sys
sys.argv = ["attention_gpu.py"]
import attention_gpu as benchmark
attend = benchmark.gpu.attend
benchmark.gpu.attend = lambda query, kv, step, out, **options: (
    attend(query, kv, step, out, **options), out.mul_(1.05)
)
benchmark.main(["--dry"])
"""


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], env={**os.environ, **environment}, cwd=BENCHMARKS,
        capture_output=True, text=True, timeout=HANG_S, check=False,
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
    assert result["goals"] == [], "numbers of a try mean nothing"


def test_an_output_that_is_off_is_found() -> None:
    said = run("-c", SPOILT, TRITON_INTERPRET="1").stderr
    found = re.search(r"RuntimeError: own on cpu: the output is off by ([\d.]+) of its norm", said)
    assert found is not None, said
    assert float(found[1]) == pytest.approx(0.05, rel=0.01), "spoilt by a twentieth, but for what half precision rounds"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so() -> None:
    done = run("attention_gpu.py")
    assert done.returncode == NEEDS_DEVICE
    assert "needs a CUDA device" in done.stderr
