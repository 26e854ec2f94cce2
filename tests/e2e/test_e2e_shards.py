"""Several tensor-parallel workers: each keeps its share of every chunk and brings it back, and is told of gaps."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, Engines, Outcome, conversations
from test_e2e_gaps import NO_CACHE, RUNS, talks

from tests.support.extent import FULL, quick
from tests.support.upstream import lacking, needs

pytestmark = pytest.mark.e2e

TURNS = conversations(seed=5)
SHARDED: Mapping[str, Any] = {"tensor_parallel_size": 2}
FEW: Mapping[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 448, "max_num_seqs": 4}
GIB = 1 / 16


def spec(name: str, model: Path, arrivals: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    return {"name": name, "engine": {**BASE_ENGINE, **SHARDED, "model": str(model), **engine}, "arrivals": arrivals}


def tier(**options: Any) -> dict[str, Any]:
    ours = {"kv_tier": {"gib": GIB, "bits": 16, "store": "early", **options}}
    return {"scheduler_cls": "fcfs", "additional_config": {"vllm_ext": ours}, **FEW}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    disk = {"disk_dir": str(tmp_path_factory.mktemp("disk")), "disk_gib": 1}
    wanted = [
        spec("alone", llama, TURNS, max_model_len=448, enable_prefix_caching=False),
        spec("in-step", llama, TURNS, **tier(load="in-step")) | ({"spawn": True} if FULL else {}),
        *([] if lacking("kv-disk") else [spec("disk", llama, TURNS, **tier(**disk))]),
        spec("eight-bits", llama, TURNS, **tier(bits=8)),
    ]
    return run_engines(wanted)


@pytest.mark.parametrize("name", ["in-step", pytest.param("disk", marks=needs("kv-disk"))])
def test_4_every_worker_brings_its_share_back(runs: dict[str, Outcome], name: str) -> None:
    found = runs[name]
    assert found.tokens == runs["alone"].tokens
    assert found.host_hit_tokens > 200
    assert (found.blocks_missing, found.left_running, found.left_waiting) == (0, 0, 0)


def test_shares_together_are_as_large_as_the_whole(runs: dict[str, Outcome]) -> None:
    """8 bits of float32, with a scale and a minimum of 4 bytes per channel and block of 32 tokens."""
    assert runs["eight-bits"].host_hit_tokens > 200
    per_token = [runs[name].host_bytes_loaded / runs[name].host_hit_tokens for name in ("in-step", "eight-bits")]
    assert per_token[0] / per_token[1] == pytest.approx(4 * 32 / (32 + 2 * 4))


@pytest.mark.full
def test_workers_compute_across_gaps(run_engines: Engines, llama: Path) -> None:
    """They are processes of their own, which are told of gaps with each step."""
    modes = ("device", "pensieve")
    cases = [(name, seed) for seed in quick((1,), full=(1, 2)) for name in modes]
    references = [spec(f"none-{seed}", llama, talks(seed), **NO_CACHE) for seed in sorted({seed for _, seed in cases})]
    found = run_engines(references + [spec(f"{name}-{seed}", llama, talks(seed), **RUNS[name]) for name, seed in cases])
    for name, seed in cases:
        outcome = found[f"{name}-{seed}"]
        assert (outcome.blocks_missing, outcome.left_running, outcome.left_waiting, outcome.fallbacks) == (0, 0, 0, 0)
        assert outcome.tokens == found[f"none-{seed}"].tokens
    assert sum(found[f"{name}-{seed}"].gaps["requests"] for name, seed in cases) > 0, "no gap was crossed"
