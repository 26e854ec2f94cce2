"""Benchmarks of engines on a GPU: what they make of what they measured, and a try of each on the CPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.extent import HANG_S
from vllm_ext.report.results import NEEDS_DEVICE
from vllm_ext.simulation.cost.fitted import Fitted
from vllm_ext.simulation.step_shape import StepShape
from vllm_ext.step_time import profile as profiles

from .conftest import BENCHMARKS

ENGINES = ("gpu_right", "gpu_budget", "gpu_decode", "gpu_return", "gpu_talks")


@pytest.fixture
def grid() -> Any:
    return importlib.import_module("gpu_grid")


def cells(grid: Any) -> list[Any]:
    """A device whose steps take 5 ms, 20 us a decode, 50 us a prompt token, 0.1 us a token of context."""
    spec = grid.GridSpec()
    return [
        grid.Cell(
            decodes=n, context=c, prompt_tokens=p, steps=4,
            seconds=(5e-3 + 2e-5 * n + 5e-5 * p + 1e-7 * (n * (c + 2) + p),) * 2,
        )
        for n, c in spec.pairs(400_000)
        for p in spec.prompt_tokens
        if n or p
    ]  # fmt: skip


def test_cells_fit_into_the_kv_beside_a_prompt(grid: Any) -> None:
    pairs = list(grid.GridSpec().pairs(400_000))
    assert pairs[0] == (0, 0)
    assert (256, 512) in pairs
    assert (256, 2048) not in pairs
    assert all(n * c <= 0.95 * (400_000 - 2 * 8192) for n, c in pairs)


def test_both_models_are_fitted_to_a_grid(grid: Any, tmp_path: Path) -> None:
    measured, key = cells(grid), profiles.EngineKey("llama-8b", "a device", "bfloat16", 1)
    grid.save_profile(measured, key, "0.32.0", tmp_path / "profile.json")
    found = profiles.load(tmp_path / "profile.json")
    assert found.key == key
    assert found.coefficients.base_s == pytest.approx(5e-3, rel=0.02)
    assert found.coefficients.decode_s == pytest.approx(2e-5, rel=0.05)
    assert found.coefficients.prefill_token_s == pytest.approx(5e-5, rel=0.02)
    assert found.coefficients.context_token_s == pytest.approx(1e-7, rel=0.05)
    cost = grid.cost_of(measured, "a device")
    cost.save(tmp_path / "cost.json")
    shape = StepShape.of_decodes(100, 1000).plus(StepShape.of_chunk(300))
    expected = 5e-3 + 2e-3 + 300 * 5e-5 + 1e-7 * 100_300
    assert Fitted.load(tmp_path / "cost.json").device_s(shape) == pytest.approx(expected, rel=0.05)


def test_the_pivot_is_the_smallest_step_of_prompts_with_nearly_the_best_throughput(grid: Any) -> None:
    """Of 8,192 tokens a step takes 415 ms, of 2,048 107 ms: 97 % of the throughput; of 1,024 94 %."""
    assert grid.pivot(cells(grid)) == (2048, pytest.approx(0.1076, rel=0.01))


@pytest.mark.parametrize(("seats", "kv_tokens", "running"), [(256, 10**9, 256), (256, 30_000, 99), (4, 10**9, 4)])
def test_saturation_is_where_a_full_batch_is_just_enough(grid: Any, seats: int, kv_tokens: int, running: int) -> None:
    """N requests of 200 and 200 tokens: each step N decodes and N prompt tokens; a request takes 200 steps."""
    cost = grid.cost_of(cells(grid), "a device")
    found = grid.saturation_per_s(cost, prompt=200.0, output=200.0, seats=seats, kv_tokens=kv_tokens)
    step_s = 5e-3 + running * (2e-5 + 5e-5 + 301 * 1e-7)
    assert found == pytest.approx(running / (200 * step_s), rel=0.06 if running > 10 else 0.3)


def answers(*tokens: list[int], logprob: float = -1.0, **facts: Any) -> dict[str, Any]:
    return {
        "tokens": list(tokens), "logprobs": [[logprob] * len(one) for one in tokens], "unfinished": 0,
        "preemptions": 0, "loaded_bytes": 0, "state": {"attention": None, "fallbacks": 0}, **facts,
    }  # fmt: skip


def test_tokens_are_compared_up_to_the_first_that_differs() -> None:
    right = importlib.import_module("gpu_right")
    reference = answers([1, 2, 3, 4], [5, 6, 7, 8])
    found = right.compared(answers([1, 2, 9, 4], [5, 6, 7, 8], logprob=-1.25), reference)
    assert found == {"tokens_equal_share": 6 / 8, "largest_logprob_difference": 0.25}


@pytest.mark.parametrize(
    ("setting", "facts", "problem"),
    [
        ("own", {"tokens_equal_share": 0.5}, "only 50% of the tokens are vLLM's"),
        ("own", {"largest_logprob_difference": 0.4}, "a logprob is off by 0.400"),
        ("stock", {"unfinished": 2}, "2 requests never ended"),
        ("tier-8", {"preemptions": 3}, "the tier was not tried"),
        ("own", {}, "our kernel served no step"),
        ("int8", {"state": {"attention": {"steps": {"own": 3}, "tokens": {"own bfloat16": 9}}}}, "no KV in 8 bits"),
        ("alise", {"state": {"fallbacks": 4}}, "4 steps fell back to FCFS"),
    ],
)
def test_what_is_wrong_with_an_engine_is_said(setting: str, facts: dict[str, Any], problem: str) -> None:
    right = importlib.import_module("gpu_right")
    fine = answers([1], tokens_equal_share=1.0, largest_logprob_difference=0.0)
    assert any(problem in said for said in right.problems(setting, {**fine, **facts}))
    assert right.problems("stock", fine) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
@pytest.mark.parametrize("name", ENGINES)
def test_without_a_gpu_it_says_so(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == NEEDS_DEVICE
    assert "needs a CUDA device" in done.stderr


@pytest.mark.full
@pytest.mark.e2e
@pytest.mark.parametrize("name", ENGINES)
def test_a_try_on_the_cpu_starts_its_engines_and_writes_its_result(name: str, tmp_path: Path) -> None:
    out = tmp_path / f"{name}.json"
    options = {
        "gpu_right": ["--settings", "stock,tier-16,tier-8,own,int8"],
        "gpu_budget": ["--profile", str(tmp_path / "profile.json"), "--window-s", "2", "--drain-s", "2"],
    }
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--dry", "--out", str(out), *options.get(name, [])]
    limits = [] if name == "gpu_budget" else ["--limit-s", str(HANG_S)]
    done = subprocess.run([*command, *limits], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    if name == "gpu_budget":
        assert set(found["windows"]) == {"128", "32"}
        assert profiles.load(tmp_path / "profile.json").num_steps == 4 * len(found["grid"])
    else:
        assert all(one["problems"] == [] for one in found.values())
