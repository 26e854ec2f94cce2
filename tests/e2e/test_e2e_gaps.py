"""Conversations whose leading KV was dropped, on the real engine: the tokens are those of an engine without any cache.

float32: a block that is reused although it holds something else, a position or a row of attention that is wrong would
give other tokens. Pools are so small that the conversations push each other's leading ends out.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from engines import BASE_ENGINE, Outcome, arrival, conversations, run_engines

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SMALL: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 24}
NO_CACHE: dict[str, Any] = {"max_model_len": 512, "enable_prefix_caching": False}


def steered(system: str, **tier: Any) -> dict[str, Any]:
    options = {"kv_tier": tier, "prediction": {"sources": ["hint", "history"]}}
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": options}}


def talks(seed: int, *, turns: int = 4, num: int = 4) -> list[dict[str, Any]]:
    """Conversations with a system prompt that all share, in turns, and now and then two at a time."""
    rng = random.Random(seed)
    shared = [rng.randrange(32, 127) for _ in range(40)]
    made = conversations(seed, num=num, turns=turns, user_tokens=50, answer_tokens=30)
    for request in made:
        if "after" not in request:
            request["prompt_token_ids"] = [*shared, *request["prompt_token_ids"]]
        request["step"] -= rng.choice([0, 0, 30])
    return [*made, arrival("other", 95, shared + [40] * 120, 20)]


RUNS = {
    "device": {**SMALL, **steered("fcfs", gaps="fused")},
    "chunked": {**SMALL, **steered("fcfs", gaps="fused"), "max_num_batched_tokens": 40},
    "pensieve": {**SMALL, **steered("pensieve", gib=0.004)},
    "pensieve-chunked": {**SMALL, **steered("pensieve", gib=0.004), "max_num_batched_tokens": 40},
    "alise+pensieve": {**SMALL, "max_num_seqs": 2, **steered("alise+pensieve", gib=0.004, bits=16)},
    "off": {**SMALL, **steered("fcfs", gaps="off")},
}


@pytest.fixture(scope="module", params=["llama", "opt"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Outcome]]:
    """By run and seed; rotary positions, and learned ones."""
    model = str(request.getfixturevalue(request.param))
    runs = []
    for seed in (1, 2):
        for name, engine in {"none": NO_CACHE, **RUNS}.items():
            whole = {**BASE_ENGINE, "model": model, **engine}
            runs.append({"name": f"{name}-{seed}", "engine": whole, "arrivals": talks(seed)})
    return run_engines(tmp_path_factory.mktemp("run"), runs, timeout_s=800)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_4_the_tokens_are_those_without_a_cache(outcomes: dict[str, Outcome], name: str, seed: int) -> None:
    found = outcomes[f"{name}-{seed}"]
    assert found.tokens == outcomes[f"none-{seed}"].tokens
    assert (found.blocks_missing, found.left_running, found.left_waiting, found.fallbacks) == (0, 0, 0, 0)
    if name == "off":
        assert found.gaps == {}
    else:
        assert found.gaps["requests"] > 0, "no gap was crossed, so nothing was shown"
        assert found.gaps["tokens_kept"] + found.gaps["tokens_loaded"] > 0


def test_host_memory_fills_gaps(outcomes: dict[str, Outcome]) -> None:
    assert sum(outcomes[f"pensieve-{seed}"].gaps["tokens_loaded"] for seed in (1, 2)) > 0
