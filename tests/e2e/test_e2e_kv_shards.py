"""The host tier with several tensor-parallel workers: each keeps and brings back its share of every chunk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, Outcome, conversations, run_engines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

TURNS = conversations(seed=5)
SHARDED: Mapping[str, Any] = {"tensor_parallel_size": 2}
FEW: Mapping[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 448, "max_num_seqs": 4}
GIB = 1 / 16


def spec(name: str, model: Path, **engine: Any) -> dict[str, Any]:
    return {"name": name, "engine": {**BASE_ENGINE, **SHARDED, "model": str(model), **engine}, "arrivals": TURNS}


def tier(**options: Any) -> dict[str, Any]:
    ours = {"kv_tier": {"gib": GIB, "bits": 16, "store": "early", **options}}
    return {"scheduler_cls": "fcfs", "additional_config": {"vllm_ext": ours}, **FEW}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> dict[str, Outcome]:
    disk = {"disk_dir": str(tmp_path_factory.mktemp("disk")), "disk_gib": 1}
    wanted = [
        spec("alone", llama, max_model_len=448, enable_prefix_caching=False),
        spec("in-step", llama, **tier(load="in-step", store="late")),
        spec("disk", llama, **tier(**disk)),
        spec("eight-bits", llama, **tier(bits=8)),
    ]
    return run_engines(tmp_path_factory.mktemp("shards"), wanted)


@pytest.mark.parametrize("name", ["in-step", "disk"])
def test_4_every_worker_brings_its_share_back(runs: dict[str, Outcome], name: str) -> None:
    found = runs[name]
    assert found.tokens == runs["alone"].tokens
    assert found.host_hit_tokens > 200
    assert (found.blocks_missing, found.left_running, found.left_waiting) == (0, 0, 0)


def test_shares_together_are_as_large_as_the_whole(runs: dict[str, Outcome]) -> None:
    """8 bits of float32, with a scale and a minimum per channel and 64 tokens."""
    assert runs["eight-bits"].host_hit_tokens > 200
    per_token = [runs[name].host_bytes_loaded / runs[name].host_hit_tokens for name in ("in-step", "eight-bits")]
    assert 3.5 < per_token[0] / per_token[1] < 4.0
