"""Engines on vLLM's CUDA platform, on a CPU: see `fake_cuda`. Whoever schedules and attends, the tokens are the same.

In fp16, which FlashAttention wants. Where two tokens are nearly as likely, kernels in fp16 choose by their rounding, so
the prompts are such that each next token is a clear choice: by 0.2 in logprob or more, beside errors of about 0.01.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, Outcome, arrival
from forks import ENVIRONMENT

from tests.support.extent import FULL, HANG_S, quick, with_full
from tests.support.upstream import INSTALLED

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(INSTALLED == "0.31.0", reason="its GPU worker starts otherwise than ours for these tests"),
]

SCRIPT = Path(__file__).parents[1] / "support" / "fake_cuda_engines.py"
REFERENCE = "stock v2"
RUNNERS = {"v1": "vllm.v1.worker.gpu_model_runner", "v2": "vllm.v1.worker.gpu.model_runner"}
CLEAR = {"long": (224, 200, 110), "short": (124, 17, 292)}
"""Seeds of prompts after which the likeliest of the next tokens, 12 or 3 of them, is the likeliest by far."""
NUM_OF_EACH, LONG_TOKENS = quick(2, full=3), quick(6, full=12)
FEW_BLOCKS: Mapping[str, Any] = {"num_gpu_blocks_override": 6, "max_num_seqs": 3}
"""Two of the long requests fit."""
MORE_BLOCKS: Mapping[str, Any] = {**FEW_BLOCKS, "num_gpu_blocks_override": 10}
"""Of which some are for KV in 8 bits."""
SOME_ROWS = ("stock v2", "own v2")


def ours(system: str, **options: Any) -> dict[str, Any]:
    prediction = {"sources": ["hint", "history"]}
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": {"prediction": prediction, **options}}}


def tier(bits: int, **options: Any) -> dict[str, Any]:
    """KV of preempted requests goes to host memory and comes back."""
    kept = {"gib": 1 / 16, "bits": bits, "store": "early"}
    return {**ours("alise-published", kv_tier=kept, residency={"choose": "swap"}, **options), **FEW_BLOCKS}


OWN = {"kernel": "own"}
ENGINES: dict[str, dict[str, Any]] = {
    "stock": {},
    "triton": {"attention_backend": "TRITON_ATTN"},
    "auto": ours("fcfs", attention={"kernel": "auto"}),
    "own": ours("fcfs", attention=OWN),
    "alise": {**ours("alise"), **FEW_BLOCKS},
    "tier": tier(16),
    "tier-own": tier(16, attention=OWN),
    "tier-8": tier(8),
    "records": {**ours("alise-published", attention=OWN, kv_tier={"device_int8_share": 0.3}), **MORE_BLOCKS},
}
Outcomes = Callable[[str], Outcome]
"""Outcomes by the name of a row: an engine and a runner."""
ROWS = [f"{name} {runner}" for name in ENGINES for runner in RUNNERS]


def arrivals(*, fewer: bool) -> list[dict[str, Any]]:
    """Long requests, and short ones that arrive while those decode; ``fewer``: one of each."""

    def prompt(seed: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(32, 127) for _ in range(40)]

    def some(kind: str) -> list[tuple[int, int]]:
        return list(enumerate(CLEAR[kind][: 1 if fewer else NUM_OF_EACH]))

    longs = [arrival(f"long-{i}", 0, prompt(seed), LONG_TOKENS, osl=LONG_TOKENS) for i, seed in some("long")]
    shorts = [arrival(f"short-{i}", 3 + 2 * i, prompt(seed), 3, osl=3) for i, seed in some("short")]
    return longs + shorts


@pytest.fixture(scope="module")
def outcomes(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Runs all rows; in short those of `SOME_ROWS`."""
    folder = tmp_path_factory.mktemp("fake-cuda")
    jobs = {}
    for row in ROWS if FULL else SOME_ROWS:
        name, runner = row.split()
        engine = {**BASE_ENGINE, "model": str(llama), "dtype": "float16", "max_model_len": 96, **ENGINES[name]}
        result, log = (str(folder / f"{name}-{runner}.{kind}") for kind in ("json", "log"))
        run = {"name": row, "engine": engine, "arrivals": arrivals(fewer=name == "triton")}
        jobs[row] = {"runner": runner, "run": run, "result": result, "log": log}
    (folder / "jobs").write_text(json.dumps(list(jobs.values())))
    command = [sys.executable, str(SCRIPT), str(folder / "jobs")]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)

    def outcome(row: str) -> Outcome:
        result, log = Path(jobs[row]["result"]), Path(jobs[row]["log"])
        if not result.exists():
            pytest.fail(f"{row} ended early: {log.read_text()[-6000:] if log.exists() else done.stderr[-6000:]}")
        return Outcome(**json.loads(result.read_text()), log=str(log))

    return outcome


@pytest.mark.parametrize("row", with_full(SOME_ROWS, ROWS))
def test_4_tokens_are_those_of_vllm_as_it_is(outcomes: Outcomes, row: str) -> None:
    found = outcomes(row)
    assert found.tokens
    assert found.tokens.items() <= outcomes(REFERENCE).tokens.items()
    assert (found.blocks_missing, found.left_running, found.left_waiting, found.fallbacks) == (0, 0, 0, 0)


@pytest.mark.parametrize("row", with_full(SOME_ROWS, ROWS))
def test_10_platform_runner_and_scheduler_are_those_of_a_gpu(outcomes: Outcomes, row: str) -> None:
    name, runner = row.split()
    found, log = outcomes(row), Path(outcomes(row).log).read_text()
    assert found.runner == RUNNERS[runner]
    assert found.scheduler == ("SteeredScheduler" if "scheduler_cls" in ENGINES[name] else "AsyncScheduler")
    assert found.batch_queue == 2, "async scheduling is CUDA's default"
    assert ("Using FlashAttention version 3" in log) == (name != "triton")


@pytest.mark.parametrize("row", with_full(["own v2"], ["own v1", "tier-own v1", "tier-own v2"]))
def test_10_decode_is_our_kernels(outcomes: Outcomes, row: str) -> None:
    assert outcomes(row).attention["steps"]["own"] >= LONG_TOKENS - 1
    assert "own float16" in outcomes(row).attention["tokens"]


def test_the_prompts_lead_to_different_outputs(outcomes: Outcomes) -> None:
    """Equality would mean little if the model said the same whatever its KV holds."""
    outputs = [tuple(tokens[:3]) for tokens in outcomes(REFERENCE).tokens.values()]
    assert len(set(outputs)) == len(outputs)


@pytest.mark.full
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ["tier", "tier-own", "tier-8"])
def test_4_kv_of_preempted_requests_came_back_from_host_memory(outcomes: Outcomes, name: str, runner: str) -> None:
    found = outcomes(f"{name} {runner}")
    assert found.preemptions > 0
    assert found.host_bytes_loaded > 0


@pytest.mark.full
@pytest.mark.parametrize("runner", RUNNERS)
def test_4_our_kernel_read_kv_in_8_bits(outcomes: Outcomes, runner: str) -> None:
    found = outcomes(f"records {runner}")
    assert found.kv_device["read_tokens"] > 0
    assert found.attention["steps"]["own"] > 0
