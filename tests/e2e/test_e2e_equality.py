"""Invariant 4: greedy output under alise equals upstream's, token for token, whatever was preempted on the way.

Every reference run is vLLM's own scheduler with room for everything, so that it preempts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, SEATS, TIGHT, Engines, Outcome, long_then_short

pytestmark = pytest.mark.e2e

STEERED: Mapping[str, Any] = {"scheduler_cls": "alise-published", "additional_config": EAGER}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
JSON_SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 9, "maxItems": 12}},
    "required": ["words"],
    "additionalProperties": False,
}
REGEX = "([a-f]{3} ){12,18}"
FEW = long_then_short(seed=4, num_long=2, num_short=2, long_tokens=24, short_tokens=3)
"""For the V2 runner: CUDA's default, but here every kernel runs in Triton's interpreter."""

SETTINGS = {"seats": SEATS, "tight": TIGHT}


def spec(name: str, model: Path, arrivals: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    return {"name": name, "engine": {**BASE_ENGINE, "model": str(model), **engine}, "arrivals": arrivals}


def structured(arrivals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same requests, constrained in turn by a regular expression and by a JSON schema."""
    kinds = ({"regex": REGEX}, {"json": JSON_SCHEMA})
    result = []
    for i, request in enumerate(arrivals):
        sampling = {**request["sampling"], "structured_outputs": kinds[i % 2], "ignore_eos": False, "max_tokens": 120}
        result.append({**request, "sampling": sampling})
    return result


def repetitive(arrivals: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same requests with prompts that repeat themselves, for n-gram drafts to find something."""
    return [{**request, "prompt_token_ids": request["prompt_token_ids"][:12] * 5} for request in arrivals]


@pytest.fixture(scope="module")
def plain_runs(run_engines: Engines, llama: Path, opt: Path) -> dict[str, Outcome]:
    runs = []
    for style, model in {"llama": llama, "opt": opt}.items():
        arrivals = long_then_short(seed=1)
        runs.append(spec(f"{style}-upstream", model, arrivals))
        for setting, engine in SETTINGS.items():
            runs.append(spec(f"{style}-{setting}", model, arrivals, **STEERED, **engine))
    plain = long_then_short(seed=1)
    constrained = structured(plain)
    mixed = [c if c["id"].startswith("long") else p for c, p in zip(constrained, plain, strict=True)]
    compact = {"structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True}}
    runs.append(spec("structured-upstream", llama, constrained, **compact))
    runs.append(spec("structured-seats", llama, constrained, **STEERED, **SEATS, **compact))
    runs.append(spec("mixed-seats", llama, mixed, **STEERED, **SEATS, **compact))
    runs.append(spec("v1-upstream", llama, FEW))
    arrivals = repetitive(long_then_short(seed=2))
    runs.append(spec("ngram-upstream", llama, arrivals))
    runs.append(spec("ngram-seats", llama, arrivals, **STEERED, **SEATS, speculative_config=NGRAM))
    return run_engines(runs)


@pytest.fixture(scope="module")
def async_runs(run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    arrivals = long_then_short(seed=3)
    runs = [spec("upstream", llama, arrivals)]
    runs += [spec(setting, llama, arrivals, **STEERED, **engine) for setting, engine in SETTINGS.items()]
    return run_engines(runs, boot="async")


def assert_same_output(steered: Outcome, upstream: Outcome) -> None:
    assert upstream.preemptions == 0, "the reference must be an undisturbed run"
    assert steered.preemptions > 0, "nothing was preempted, so this run shows nothing"
    assert steered.scheduler == "SteeredScheduler"
    assert steered.tokens == upstream.tokens
    assert steered.finish_reasons == upstream.finish_reasons
    assert (steered.blocks_missing, steered.left_running, steered.left_waiting) == (0, 0, 0)


@pytest.mark.parametrize("style", ["llama", "opt"])
def test_4_requests_preempted_by_policy_give_upstreams_tokens(plain_runs: dict[str, Outcome], style: str) -> None:
    assert plain_runs[f"{style}-seats"].preemption_reasons["policy"] > 0
    assert_same_output(plain_runs[f"{style}-seats"], plain_runs[f"{style}-upstream"])


@pytest.mark.parametrize("style", ["llama", "opt"])
def test_4_requests_preempted_for_memory_give_upstreams_tokens(plain_runs: dict[str, Outcome], style: str) -> None:
    assert plain_runs[f"{style}-tight"].preemption_reasons["memory"] > 0
    assert_same_output(plain_runs[f"{style}-tight"], plain_runs[f"{style}-upstream"])


@pytest.mark.parametrize("style", ["llama", "opt"])
def test_the_prompts_lead_to_different_outputs(plain_runs: dict[str, Outcome], style: str) -> None:
    """Equality would mean little if the model said the same whatever its KV holds."""
    outputs = [tuple(tokens[:6]) for tokens in plain_runs[f"{style}-upstream"].tokens.values()]
    assert len(set(outputs)) > len(outputs) / 2


def test_10_structured_output_survives_preemption(plain_runs: dict[str, Outcome]) -> None:
    """Long constrained requests that short free ones preempt end as they do when nobody disturbs them."""
    mixed, constrained, free = (plain_runs[name] for name in ("mixed-seats", "structured-upstream", "llama-upstream"))
    assert mixed.preemptions > 0
    expected = {i: (constrained if i.startswith("long") else free).tokens[i] for i in mixed.tokens}
    assert mixed.tokens == expected
    documents = [text for i, text in mixed.texts.items() if i.startswith("long") and text.startswith("{")]
    assert documents
    assert all(set(json.loads(text)) == {"words"} for text in documents)


def test_10_short_structured_requests_preempt_long_ones(plain_runs: dict[str, Outcome]) -> None:
    """vLLM looks whether a grammar has been compiled only when a seat is free; a waiting request must not need one."""
    assert_same_output(plain_runs["structured-seats"], plain_runs["structured-upstream"])


def test_10_speculative_decoding_survives_preemption(plain_runs: dict[str, Outcome]) -> None:
    """The reference runs without drafts: they change how fast tokens come, not which."""
    steered = plain_runs["ngram-seats"]
    assert steered.drafts > 0
    assert_same_output(steered, plain_runs["ngram-upstream"])


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_10_async_scheduling_gives_upstreams_tokens(async_runs: dict[str, Outcome], setting: str) -> None:
    assert async_runs["upstream"].scheduler == "AsyncScheduler"
    assert async_runs[setting].batch_queue == 2, "async scheduling was not on"
    assert_same_output(async_runs[setting], async_runs["upstream"])


def test_10_v2_model_runner_gives_the_tokens_of_v1(
    plain_runs: dict[str, Outcome], run_engines: Engines, llama: Path
) -> None:
    v1 = plain_runs["v1-upstream"]
    v2 = run_engines([spec("v2", llama, FEW, **STEERED, max_num_seqs=2)], boot="v2")["v2"]
    assert (v1.runner, v2.runner) == ("vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu.model_runner")
    assert_same_output(v2, v1)
