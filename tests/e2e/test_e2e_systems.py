"""Invariants 4 and 10 under every system: structured output and speculative decoding on the real engine.

An engine for each system but ablations (those differ from others by what they leave out, and have the simulated
conformance tests), with few seats and few KV blocks, chunked prefills and objectives. Tokens are drafted by n-grams and
some requests have a grammar: greedy outputs must be those of vLLM's own scheduler with room for everything, nothing
drafted and nobody preempted. `test_e2e_drafts` has drafts that are accepted, `test_e2e_lora` adapters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, TIGHT, Engines, Outcome, long_then_short

from vllm_ext.experiments import ablations
from vllm_ext.systems import compose

ROWS = [row for row in (*compose._papers().values(), *ablations.ROWS) if "-published" not in row.name]
"""Without what other tests register."""

pytestmark = pytest.mark.e2e

COMPOSED = ("sarathi+past-future", "alise+sarathi")
WHOLE = [system for system in ROWS if not system.oracle and not system.summary.startswith("ablation:")]
SYSTEMS = [system.name for system in WHOLE if system.name != "fcfs"] + list(COMPOSED)
PATIENT = ("past-future", "sarathi+past-future", "orca", "conservative")
"""Of these, those that let in only whom they have room for to the end."""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
GRAMMAR = {"structured_outputs": {"regex": "([a-f]{3} ){12,18}"}, "ignore_eos": False, "max_tokens": 90}
SLOS = {"tbt_ms": 60.0, "ttft_ms": 4000.0}


def requests() -> list[dict[str, Any]]:
    """Long and short ones that repeat themselves, for drafts to be found; every third is constrained."""
    found = []
    for number, request in enumerate(long_then_short(seed=5)):
        sampling = {**request["sampling"], **(GRAMMAR if number % 3 == 2 else {})}
        found.append({**request, "prompt_token_ids": request["prompt_token_ids"][:12] * 5, "sampling": sampling})
    return found


@pytest.fixture(scope="module")
def outcomes(run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    engine = {**BASE_ENGINE, "model": str(llama)}
    runs = [{"name": "upstream", "engine": engine, "arrivals": requests()}]
    for name in SYSTEMS:
        options = {"slo": SLOS, "prediction": {"sources": ["hint", "history"]}}
        steered = {"scheduler_cls": name, "additional_config": {"vllm_ext": options}}
        crowded = {**engine, **TIGHT, **steered, "speculative_config": NGRAM}
        runs.append({"name": name, "engine": crowded, "arrivals": requests()})
    return run_engines(runs)


def assert_decided_and_cleaned_up(outcome: Outcome) -> None:
    assert outcome.scheduler == "SteeredScheduler"
    assert outcome.fallbacks == 0, "a policy failed, so these were not its decisions"
    assert (outcome.blocks_missing, outcome.left_running, outcome.left_waiting) == (0, 0, 0)


@pytest.mark.parametrize("system", SYSTEMS)
def test_4_and_10_drafts_and_grammars_give_upstreams_tokens(outcomes: dict[str, Outcome], system: str) -> None:
    steered, upstream = outcomes[system], outcomes["upstream"]
    assert_decided_and_cleaned_up(steered)
    assert steered.drafts > 0
    assert steered.tokens == upstream.tokens
    assert steered.finish_reasons == upstream.finish_reasons


def test_requests_got_in_each_others_way(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["upstream"].preemptions == 0
    assert sum(outcomes[name].preemptions > 0 for name in SYSTEMS) >= len(SYSTEMS) / 2
