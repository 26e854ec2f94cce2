"""Conversations whose leading KV was dropped, on the real engine: the tokens are those of an engine without any cache.

float32: a block that is reused although it holds something else, a position or a row of attention that is wrong would
give other tokens. Pools are so small that the conversations push each other's leading ends out.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lora_adapter
import pytest
from engines import BASE_ENGINE, Engines, Outcome, arrival, conversations

from tests.support.extent import quick
from tests.support.upstream import WITH_GAPS

pytestmark = [pytest.mark.e2e, WITH_GAPS]

SMALL: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 24}
NO_CACHE: dict[str, Any] = {"max_model_len": 512, "enable_prefix_caching": False}


MIB = 1 / 1024


def steered(system: str, **tier: Any) -> dict[str, Any]:
    options = {"kv_tier": tier, "prediction": {"sources": ["hint", "history"]}}
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": options}}


def talks(seed: int, *, turns: int = 4, num: int = 4) -> list[dict[str, Any]]:
    """Conversations with a system prompt that all share, two or three of them at a time."""
    rng = random.Random(seed)
    shared = [rng.randrange(32, 127) for _ in range(40)]
    made = conversations(seed, num=num, turns=turns, user_tokens=50, answer_tokens=30)
    for request in made:
        if "after" not in request:
            request["prompt_token_ids"] = [*shared, *request["prompt_token_ids"]]
        request["step"] = request["step"] // 3 - rng.choice([0, 0, 10])
    return [*made, arrival("other", 95, shared + [40] * 120, 20)]


RUNS: dict[str, dict[str, Any]] = {
    "device": {**SMALL, **steered("fcfs", gaps="fused")},
    "chunked": {**SMALL, **steered("fcfs", gaps="fused"), "max_num_batched_tokens": 40},
    "pensieve": {**SMALL, **steered("pensieve-published", gib=0.7 * MIB)},
    "pensieve-chunked": {**SMALL, **steered("pensieve-published", gib=0.7 * MIB), "max_num_batched_tokens": 40},
    "alise+pensieve": {
        **SMALL,
        "num_gpu_blocks_override": 20,
        **steered("alise+pensieve", gib=0.7 * MIB, bits=16, gaps="fused", policy="leading"),
    },
}
POISONED = ("device", "chunked", "pensieve")
"""Runs in which what holds nothing is overwritten before each step."""
SPOILT = ("whole-rows", "first-positions", "garbage")
FAILING = ("pensieve",)
"""Runs with loads that fail, behind gaps too."""
SEEDS = quick({"llama": (1,), "opt": (1,)}, full={"llama": (1, 2), "opt": (1,)})
CASES = [(model, seed, name) for model, seeds in SEEDS.items() for seed in seeds for name in RUNS]


def spec(name: str, model: Path, seed: int, engine: dict[str, Any], **more: Any) -> dict[str, Any]:
    whole = {**BASE_ENGINE, "model": str(model), **engine}
    return {"name": f"{name}-{seed}", "engine": whole, "arrivals": talks(seed), **more}


@pytest.fixture(scope="module")
def outcomes(run_engines: Engines, llama: Path, opt: Path) -> dict[tuple[str, str], Outcome]:
    """By model and run: rotary positions, and learned ones."""
    found: dict[tuple[str, str], Outcome] = {}
    for model, folder in (("llama", llama), ("opt", opt)):
        runs = []
        for seed in SEEDS[model]:
            runs.append(spec("none", folder, seed, NO_CACHE))
            for name, engine in RUNS.items():
                odd = {"odd_gaps": "poison"} if name in POISONED else {}
                runs.append(spec(name, folder, seed, engine, **odd))
        if model == "llama":
            failing = ((name, seed) for name in FAILING for seed in SEEDS[model])
            runs += [spec(f"fails-{name}", folder, seed, RUNS[name], odd_loads="fail") for name, seed in failing]
            runs.append(spec("off", folder, 1, {**SMALL, **steered("fcfs", gaps="off")}))
        found |= {(model, name): run for name, run in run_engines(runs).items()}
    return found


def assert_cleaned_up(outcome: Outcome) -> None:
    assert (outcome.blocks_missing, outcome.left_running, outcome.left_waiting, outcome.fallbacks) == (0, 0, 0, 0)


@pytest.mark.parametrize(("model", "seed", "name"), CASES)
def test_4_the_tokens_are_those_without_a_cache(
    outcomes: dict[tuple[str, str], Outcome], model: str, seed: int, name: str
) -> None:
    found = outcomes[model, f"{name}-{seed}"]
    assert_cleaned_up(found)
    assert found.tokens == outcomes[model, f"none-{seed}"].tokens


@pytest.mark.parametrize("name", RUNS)
def test_each_kind_of_engine_crossed_gaps(outcomes: dict[tuple[str, str], Outcome], name: str) -> None:
    found = [outcomes[model, f"{run}-{seed}"].gaps for model, seed, run in CASES if run == name]
    assert sum(gaps["requests"] for gaps in found) > 0
    assert sum(gaps["tokens_kept"] + gaps["tokens_loaded"] for gaps in found) > 0


def test_host_memory_fills_gaps(outcomes: dict[tuple[str, str], Outcome]) -> None:
    assert sum(outcomes["llama", f"pensieve-{seed}"].gaps["tokens_loaded"] for seed in SEEDS["llama"]) > 0


@pytest.mark.parametrize("name", FAILING)
def test_loads_that_fail_behind_gaps_are_computed(outcomes: dict[tuple[str, str], Outcome], name: str) -> None:
    """Every second load spoils the blocks it was to fill; what had read them is computed again."""
    loaded = 0
    for seed in SEEDS["llama"]:
        found = outcomes["llama", f"fails-{name}-{seed}"]
        assert_cleaned_up(found)
        assert found.tokens == outcomes["llama", f"none-{seed}"].tokens
        loaded += found.gaps["tokens_loaded"]
    assert loaded > 0


def test_without_it_there_are_no_gaps(outcomes: dict[tuple[str, str], Outcome]) -> None:
    assert outcomes["llama", "off-1"].gaps == {}
    assert outcomes["llama", "off-1"].tokens == outcomes["llama", "none-1"].tokens


@pytest.mark.parametrize("kind", SPOILT)
def test_what_would_be_wrong_is_seen(
    outcomes: dict[tuple[str, str], Outcome], kind: str, run_engines: Engines, llama: Path
) -> None:
    """Negative controls: half of what a worker does about gaps left out, and a kept block overwritten."""
    runs = [spec("spoilt", llama, seed, RUNS["device"], odd_gaps=kind) for seed in SEEDS["llama"]]
    spoilt = run_engines(runs)
    assert sum(run.gaps["requests"] for run in spoilt.values()) > 0
    assert any(spoilt[f"spoilt-{seed}"].tokens != outcomes["llama", f"none-{seed}"].tokens for seed in SEEDS["llama"])


BOOTED = quick(
    {"async": ("device", "pensieve")},
    full={"v2": ("device",), "async": ("device", "chunked", "pensieve")},
)


@pytest.mark.parametrize("boot", BOOTED)
def test_10_other_runners_give_the_same_tokens(boot: str, run_engines: Engines, llama: Path) -> None:
    """vLLM's V2 model runner, and two steps under way at a time."""
    requests = talks(1, turns=3, num=3) if boot == "v2" else talks(1)  # its kernels run in Triton's interpreter
    wanted = [spec(name, llama, 1, RUNS[name]) | {"arrivals": requests} for name in BOOTED[boot]]
    found = run_engines(wanted, boot=boot)
    expected = run_engines([spec("none", llama, 1, NO_CACHE) | {"arrivals": requests}])["none-1"].tokens
    for name in BOOTED[boot]:
        assert_cleaned_up(found[f"{name}-1"])
        assert found[f"{name}-1"].tokens == expected
    assert sum(run.gaps["requests"] for run in found.values()) > 0, "no gap was crossed, so nothing was shown"
    if boot == "v2":
        assert found["device-1"].runner == "vllm.v1.worker.cpu.model_runner"
    else:
        assert found["device-1"].batch_queue == 2


def test_conversations_with_an_adapter_keep_to_their_own_kv(run_engines: Engines, tmp_path: Path, llama: Path) -> None:
    """With one LoRA adapter each, two have the same; all share the system prompt's tokens, and not its blocks.

    All have one: on CPU, a request without one in a batch with others that have gives other tokens under vLLM alone.
    """
    first, second = (str(lora_adapter.build(llama, tmp_path / f"adapter-{seed}", seed=seed)) for seed in (0, 1))
    arrivals = [{**a, "adapter": first if a["id"].startswith(("c0", "c2")) else second} for a in talks(1)]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": lora_adapter.RANK}
    few = {"num_gpu_blocks_override": 28}
    wanted = {"none": NO_CACHE, "device": {**RUNS["device"], **few}}
    runs = [
        {**spec(name, llama, 1, {**engine, **lora}), "arrivals": arrivals, "odd_gaps": "poison"}
        for name, engine in wanted.items()
    ]
    found = run_engines(runs)
    assert_cleaned_up(found["device-1"])
    assert found["device-1"].tokens == found["none-1"].tokens
    assert found["device-1"].gaps["requests"] > 0
