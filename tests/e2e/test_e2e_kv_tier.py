"""The host tier on the real engine: KV that came back gives the tokens that computing it again would (invariant 4)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, Engines, Outcome, conversations, long_then_short

pytestmark = pytest.mark.e2e

FEW_BLOCKS: Mapping[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 448, "max_num_seqs": 4}
FEW_LARGE_BLOCKS: Mapping[str, Any] = {**FEW_BLOCKS, "num_gpu_blocks_override": 9, "block_size": 64}
PRESSED: Mapping[str, Any] = {**FEW_BLOCKS, "num_gpu_blocks_override": 12, "max_model_len": 256, "max_num_seqs": 3}
ROOM: Mapping[str, Any] = {"max_model_len": 448, "enable_prefix_caching": False}
TURNS = conversations(seed=5)
THINKING = conversations(seed=7, num=6, answer_tokens=80, drops=64)
"""Next turns leave out most of what was generated."""
LONGS = long_then_short(seed=1, num_long=8, num_short=30)
"""So many that some of the preempted requests lose their blocks, wherever their KV is stored."""
PAUSES = (5, 130, 131, 220, 330)
"""Steps of the conversations before which the engine sleeps."""
MIB = 1 / 1024
"""In GiB."""


def tier(system: str = "fcfs", **options: Any) -> dict[str, Any]:
    ours = {**EAGER["vllm_ext"], "kv_tier": {"gib": 64 * MIB, "bits": 16, "store": "early", **options}}
    if system != "fcfs":
        ours["residency"] = {"choose": "swap"}
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": ours}}


def spec(name: str, model: Path, arrivals: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    return {"name": name, "engine": {**BASE_ENGINE, "model": str(model), **engine}, "arrivals": arrivals}


def all_runs(llama: Path, opt: Path) -> list[dict[str, Any]]:
    runs = [
        spec("turns", llama, TURNS, **ROOM),
        spec("turns-opt", opt, TURNS, **ROOM),
        spec("longs", llama, LONGS, **ROOM),
        spec("turns-16", llama, TURNS, **tier(), **FEW_BLOCKS),
        spec("turns-16-opt", opt, TURNS, **tier(policy="arc"), **FEW_BLOCKS),
        spec("turns-64-tokens", llama, TURNS, **tier(policy="lru"), **FEW_LARGE_BLOCKS),
        spec("turns-prompts", llama, TURNS, **tier(prompt_only=True), **FEW_BLOCKS),
        spec("turns-tiny", llama, TURNS, **tier(gib=0.4 * MIB), **FEW_BLOCKS),
        spec("longs-16", llama, LONGS, **tier("alise-published"), **PRESSED),
        spec("turns-ahead", llama, TURNS, **tier(store="auto"), **FEW_BLOCKS),
        spec("longs-ahead", llama, LONGS, **tier("alise-published", store="ahead"), **PRESSED),
        spec("turns-8", llama, TURNS, **tier(bits=8), **FEW_BLOCKS),
        spec("thinking", llama, THINKING, **ROOM),
        spec("thinking-all", llama, THINKING, **tier(store="auto", prompt_only=False), **FEW_BLOCKS),
        spec("thinking-auto", llama, THINKING, **tier(store="auto"), **FEW_BLOCKS),
    ]
    naps = [
        {**spec("turns-paused", llama, TURNS, **tier(), **FEW_BLOCKS), "naps": dict.fromkeys(PAUSES, 0)},
        {**spec("turns-slept", llama, TURNS, **tier(), **FEW_BLOCKS), "naps": dict.fromkeys(PAUSES, 1)},
        {
            **spec("longs-slept", llama, LONGS, **tier("alise-published", store="ahead"), **PRESSED),
            "naps": {20: 1, 21: 1, 40: 1},
        },
    ]
    return runs + naps


@pytest.fixture(scope="module")
def runs(run_engines: Engines, llama: Path, opt: Path) -> dict[str, Outcome]:
    return run_engines(all_runs(llama, opt))


@pytest.fixture(scope="module")
def async_runs(run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    wanted = [
        spec("turns", llama, TURNS, **tier(), **FEW_BLOCKS),
        spec("longs", llama, LONGS, **tier("alise-published"), **PRESSED),
        spec("turns-ahead", llama, TURNS, **tier(store="auto"), **FEW_BLOCKS),
        spec("longs-ahead", llama, LONGS, **tier("alise-published", store="ahead"), **PRESSED),
    ]
    return run_engines(wanted, boot="async")


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.tokens == expected.tokens
    assert (found.blocks_missing, found.left_running, found.left_waiting) == (0, 0, 0)


HISTORY_TOKENS = 3 * sum(turn * 110 // 32 * 32 for turn in (1, 2))
"""Of three conversations, before their second and third turn, in whole chunks of 32: what could be found again."""


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("turns-16", "turns"),
        ("turns-16-opt", "turns-opt"),
        ("turns-64-tokens", "turns"),
        ("turns-prompts", "turns"),
        ("turns-ahead", "turns"),
    ],
)
def test_4_conversations_continue_from_host_memory(runs: dict[str, Outcome], name: str, reference: str) -> None:
    assert_same(runs[name], runs[reference])
    assert runs[name].host_hit_tokens > 200


def test_most_of_the_history_is_found(runs: dict[str, Outcome]) -> None:
    found = runs["turns-16"]
    assert HISTORY_TOKENS * 0.5 <= found.host_hit_tokens <= HISTORY_TOKENS, "the rest is still on the device"
    assert runs["turns-prompts"].host_hit_tokens < found.host_hit_tokens, "the answers' share was not kept"


def test_4_what_next_turns_leave_out_is_not_stored_once_that_is_known(runs: dict[str, Outcome]) -> None:
    everything, found = runs["thinking-all"], runs["thinking-auto"]
    assert_same(everything, runs["thinking"])
    assert_same(found, runs["thinking"])
    counted = [run.kv_tier["generated_chunks"] for run in (everything, found)]
    assert [counts["contained"] for counts in counted] == [0, 0]
    assert (counted[0]["left_out"], counted[1]["left_out"] >= 5 * 2) == (0, True)
    assert found.kv_tier["stored_chunks"] < everything.kv_tier["stored_chunks"]
    assert found.host_hit_tokens == everything.host_hit_tokens > 200


def test_a_tier_that_is_much_too_small_costs_hits_only(runs: dict[str, Outcome]) -> None:
    assert_same(runs["turns-tiny"], runs["turns"])
    assert runs["turns-tiny"].host_hit_tokens < runs["turns-16"].host_hit_tokens


def test_4_an_engine_that_was_paused_finds_what_it_kept(runs: dict[str, Outcome]) -> None:
    assert_same(runs["turns-paused"], runs["turns"])
    assert runs["turns-paused"].host_hit_tokens > 200


def test_4_an_engine_that_slept_has_forgotten_all_kv_and_lost_no_request(runs: dict[str, Outcome]) -> None:
    """Level 1 discards the device's KV; what the host keeps goes too, since weights may be replaced meanwhile."""
    assert_same(runs["turns-slept"], runs["turns"])
    assert_same(runs["longs-slept"], runs["longs"])
    assert runs["turns-slept"].host_hit_tokens < runs["turns-paused"].host_hit_tokens


@pytest.mark.parametrize("name", ["longs-16", "longs-ahead"])
def test_4_preempted_requests_continue_from_host_memory(runs: dict[str, Outcome], name: str) -> None:
    found = runs[name]
    assert found.preemption_reasons["policy"] > 0
    assert found.host_bytes_loaded > 0
    assert_same(found, runs["longs"])


def test_eight_bits_find_as_much_with_less(runs: dict[str, Outcome]) -> None:
    """Tokens may differ: the model is random. What comes back is checked in the kernels' tests."""
    found = runs["turns-8"]
    assert found.host_hit_tokens > 200
    assert {key: len(tokens) for key, tokens in found.tokens.items()} == dict.fromkeys(found.tokens, 40)
    assert runs["turns-16"].host_bytes_stored / found.host_bytes_stored > 3.1, "float32 into 8 bits"
    same = sum(found.tokens[key][:8] == tokens[:8] for key, tokens in runs["turns"].tokens.items())
    assert same >= 7, "and the answers begin alike"


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("turns", "turns"),
        ("turns-ahead", "turns"),
        ("longs", "longs"),
        ("longs-ahead", "longs"),
    ],
)
def test_10_async_scheduling(
    runs: dict[str, Outcome], async_runs: dict[str, Outcome], name: str, reference: str
) -> None:
    found = async_runs[name]
    assert found.batch_queue == 2
    assert found.host_bytes_loaded > 0
    assert_same(found, runs[reference])
