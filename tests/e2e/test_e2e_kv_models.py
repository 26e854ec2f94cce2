"""The host tier with models whose KV is not all of one kind: served with equal tokens, or refused at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hybrid_models
import pytest
from engines import BASE_ENGINE, Engines, Outcome, conversations

pytestmark = pytest.mark.e2e

TURNS = conversations(seed=5)
ALONE = {"max_model_len": 448, "enable_prefix_caching": False}
CROWDED = {"max_model_len": 448, "max_num_seqs": 4, "num_gpu_blocks_override": 40}
TIER = {"gib": 0.06}


def spec(name: str, model: Path, engine: dict[str, Any], tier: dict[str, Any] | None = None) -> dict[str, Any]:
    ours = {"scheduler_cls": "fcfs", "additional_config": {"vllm_ext": {"kv_tier": {**TIER, **tier}}}} if tier else {}
    return {"name": name, "engine": {**BASE_ENGINE, "model": str(model), **engine, **ours}, "arrivals": TURNS}


@pytest.fixture(scope="module")
def models(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {kind: hybrid_models.build(kind, llama, folder) for kind in ("sliding", "hybrid", "mla")}


@pytest.fixture(scope="module")
def runs(models: dict[str, Path], run_engines: Engines) -> dict[str, Outcome]:
    hybrid, sliding = models["hybrid"], models["sliding"]
    wanted = [
        spec("hybrid", hybrid, ALONE),
        spec("hybrid-16", hybrid, CROWDED, {"bits": 16}),
        spec("hybrid-8", hybrid, CROWDED, {"bits": 8}),
        spec("sliding", sliding, ALONE),
        spec("sliding-16", sliding, {**CROWDED, "num_gpu_blocks_override": 16}, {"bits": 16}),
    ]
    return run_engines(wanted)


def test_4_hybrid_models_continue_from_host_memory(runs: dict[str, Outcome]) -> None:
    assert runs["hybrid-16"].tokens == runs["hybrid"].tokens
    assert runs["hybrid-16"].blocks_missing == 0
    assert runs["hybrid-16"].host_hit_tokens > 0


def test_hybrid_models_are_kept_in_8_bits_as_well(runs: dict[str, Outcome]) -> None:
    found = runs["hybrid-8"]
    assert found.host_hit_tokens > 0
    assert found.blocks_missing == 0
    assert found.host_bytes_stored < runs["hybrid-16"].host_bytes_stored / 2
    assert {key: len(tokens) for key, tokens in found.tokens.items()} == dict.fromkeys(runs["hybrid"].tokens, 40)


def test_4_sliding_windows_are_stored_and_outputs_stay(runs: dict[str, Outcome]) -> None:
    assert runs["sliding-16"].tokens == runs["sliding"].tokens
    assert runs["sliding-16"].host_bytes_stored > 0
    assert runs["sliding-16"].blocks_missing == 0


def test_mla_is_refused_at_start(models: dict[str, Path], run_engines: Engines) -> None:
    with pytest.raises(RuntimeError, match=r"kv_tier\.gib=0\.06: must be 0 for MLA"):
        run_engines([spec("mla", models["mla"], CROWDED, {"bits": 16})])


@pytest.mark.parametrize(
    ("options", "said"),
    [({"store": "ahead"}, "kv_tier.store=.*ahead.*full attention"), ({"load": "in-step"}, "kv_tier.load=.*in-step")],
)
def test_what_needs_full_attention_is_refused_for_hybrid_models(
    models: dict[str, Path], run_engines: Engines, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(RuntimeError, match=said):
        run_engines([spec("hybrid", models["hybrid"], CROWDED, {"bits": 16, **options})])
