"""KV that stays on the device in 8 bits, on the real engine.

float32, and pools so small that conversations and preempted requests push each other out of their blocks. Where records
hold exactly what they were made of, tokens are those of an engine without any cache: whatever is moved too late, read
from a wrong place, or read after it was given away, gives other tokens. What 8 bits change is then shown to be what the
format says, and nothing else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lora_adapter
import pytest
from engines import BASE_ENGINE, Engines, Outcome, arrival, long_then_short
from test_e2e_gaps import NO_CACHE, talks

from tests.support.extent import quick
from tests.support.upstream import needs

pytestmark = [pytest.mark.e2e, needs("kv-arena", "kv-records", "attention-slot")]

SHARE = 0.4
SMALL: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 4, "num_gpu_blocks_override": 44}
TIGHT: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "num_gpu_blocks_override": 22}


def steered(system: str, share: float = SHARE, *, kernel: str = "stock", **tier: Any) -> dict[str, Any]:
    options = {
        "kv_tier": {"device_int8_share": share, **tier},
        "prediction": {"sources": ["hint", "history"]},
        "attention": {"kernel": kernel},
    }
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": options}}


TALKS: dict[str, dict[str, Any]] = {
    "fcfs": {**SMALL, **steered("fcfs")},
    "chunked": {**SMALL, **steered("fcfs"), "max_num_batched_tokens": 40},
    "gaps": {**SMALL, **steered("fcfs", gaps="fused")},
    "pensieve": {**SMALL, **steered("pensieve")},
    "alise+pensieve": {**SMALL, **steered("alise+pensieve"), "max_num_batched_tokens": 40},
}
CROWDS: dict[str, dict[str, Any]] = {
    "memory": {**TIGHT, **steered("fcfs")},
    "preempting": {**TIGHT, **steered("alise-published")},
}


def spec(name: str, model: Path, engine: dict[str, Any], arrivals: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"name": name, "engine": {**BASE_ENGINE, "model": str(model), **engine}, "arrivals": arrivals, **more}


@pytest.fixture(scope="module")
def exact(run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    said, jobs = talks(1), long_then_short(1)
    runs = [spec(name, llama, engine, said, odd_records="exact") for name, engine in TALKS.items()]
    runs += [spec(name, llama, engine, jobs, odd_records="exact") for name, engine in CROWDS.items()]
    runs += [spec("talks", llama, NO_CACHE, said), spec("crowd", llama, NO_CACHE, jobs)]
    return run_engines(runs)


def assert_cleaned_up(outcome: Outcome) -> None:
    assert (outcome.blocks_missing, outcome.left_running, outcome.left_waiting, outcome.fallbacks) == (0, 0, 0, 0)
    assert outcome.kv_device["records"]["held"] == 0


@pytest.mark.parametrize("name", [*TALKS, *CROWDS])
def test_4_the_tokens_are_those_without_a_cache(exact: dict[str, Outcome], name: str) -> None:
    assert_cleaned_up(exact[name])
    assert exact[name].tokens == exact["talks" if name in TALKS else "crowd"].tokens


@pytest.mark.parametrize("name", TALKS)
def test_conversations_are_read_in_place(exact: dict[str, Outcome], name: str) -> None:
    assert exact[name].kv_device["moves"]["demoted"] > 0
    assert exact[name].kv_device["read_tokens"] > 0


@pytest.mark.parametrize("name", CROWDS)
def test_a_preempted_request_goes_on_where_it_was(exact: dict[str, Outcome], name: str) -> None:
    found = exact[name]
    assert found.preemptions > 0
    assert found.kv_device["moves"]["partial"] > 0
    assert found.kv_device["resumed_tokens"] > 0


INT8 = ("fcfs", "pensieve", "preempting")
OWN = {
    "fcfs": {**SMALL, "num_gpu_blocks_override": 33, **steered("fcfs", kernel="own")},
    "pensieve": {**SMALL, "num_gpu_blocks_override": 33, **steered("pensieve", kernel="own")},
    "preempting": {**TIGHT, "num_gpu_blocks_override": 17, **steered("alise-published", kernel="own")},
}
"""Without scratch pages; as many blocks and records as those have that unpack, so that the same moves."""


@pytest.fixture(scope="module")
def quantised(run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    """By run, and whether its records are in the arena, or elsewhere by the definition of the format."""
    runs = []
    asked = {name: (TALKS[name], talks(1)) for name in TALKS}
    asked |= {name: (CROWDS[name], long_then_short(1)) for name in CROWDS}
    for name in INT8:
        engine, arrivals = asked[name]
        runs.append(spec(f"{name}-arena", llama, engine, arrivals, odd_records="poison"))
        runs.append(spec(f"{name}-defined", llama, engine, arrivals, odd_records="reference"))
        runs.append(spec(f"{name}-own", llama, OWN[name], arrivals, odd_records="poison"))
    return run_engines(runs)


@pytest.mark.parametrize("name", INT8)
def test_attending_in_place_is_attending_to_what_was_dequantised(quantised: dict[str, Outcome], name: str) -> None:
    """The blocks that records were made of hold other things by then, and so does memory that holds nothing."""
    arena, defined = quantised[f"{name}-arena"], quantised[f"{name}-defined"]
    assert_cleaned_up(arena)
    assert arena.kv_device == defined.kv_device
    assert arena.kv_device["read_tokens"] + arena.kv_device["resumed_tokens"] > 0
    assert arena.tokens == defined.tokens


@pytest.mark.parametrize("name", OWN)
def test_our_kernel_reads_records_where_they_are(quantised: dict[str, Outcome], name: str) -> None:
    own = quantised[f"{name}-own"]
    assert_cleaned_up(own)
    assert own.kv_device == quantised[f"{name}-defined"].kv_device
    assert own.kv_device["read_tokens"] + own.kv_device["resumed_tokens"] > 0
    assert own.attention["steps"].keys() == {"own"}
    assert own.tokens == quantised[f"{name}-defined"].tokens


def test_a_block_that_is_read_after_it_was_given_away_is_seen(
    exact: dict[str, Outcome], run_engines: Engines, llama: Path
) -> None:
    """Negative control."""
    late = run_engines([spec("late", llama, TALKS["fcfs"], talks(1), odd_records="late")])["late"]
    assert late.tokens != exact["talks"].tokens


BOOTED = quick({"async": ("gaps",)}, full={"v2": ("fcfs", "gaps"), "async": ("fcfs", "gaps", "pensieve")})


@pytest.mark.parametrize("boot", BOOTED)
def test_10_other_runners_give_the_same_tokens(boot: str, run_engines: Engines, llama: Path) -> None:
    """vLLM's V2 model runner, and two steps under way at a time."""
    requests = talks(1, turns=3, num=3) if boot == "v2" else talks(1)  # its kernels run in Triton's interpreter
    wanted = [spec(name, llama, TALKS[name], requests, odd_records="exact") for name in BOOTED[boot]]
    found = run_engines(wanted, boot=boot)
    expected = run_engines([spec("none", llama, NO_CACHE, requests)])["none"].tokens
    for name in BOOTED[boot]:
        assert_cleaned_up(found[name])
        assert found[name].kv_device["moves"]["demoted"] > 0
        assert found[name].tokens == expected


@pytest.mark.full
def test_10_the_backend_for_cuda_reads_records(run_engines: Engines, llama: Path) -> None:
    """vLLM's Triton kernel, interpreted: one prompt, another one that takes all blocks, and the first one again."""
    first, other = ([start + i % 50 for i in range(length)] for start, length in ((40, 70), (60, 150)))
    again = {**arrival("again", 20, [50], 2), "after": "first"}
    requests = [arrival("first", 0, first, 2), arrival("other", 10, other, 2), again]
    engine = {"max_model_len": 160, "max_num_seqs": 2, "num_gpu_blocks_override": 12, **steered("fcfs")}
    run = spec("cuda", llama, engine, requests, odd_records="in-place")
    (found,) = run_engines([run], boot="cuda").values()
    expected = run_engines([spec("none", llama, NO_CACHE, requests)])["none"].tokens
    assert_cleaned_up(found)
    assert found.kv_device["read_tokens"] == 64
    assert found.tokens == expected


def test_preempted_requests_go_on_with_two_steps_under_way(
    exact: dict[str, Outcome], run_engines: Engines, llama: Path
) -> None:
    run = spec("async", llama, CROWDS["preempting"], long_then_short(1), odd_records="exact")
    found = run_engines([run], boot="async")["async"]
    assert_cleaned_up(found)
    assert found.kv_device["resumed_tokens"] > 0
    assert found.tokens == exact["crowd"].tokens


def test_adapters_keep_to_their_own_kv(run_engines: Engines, tmp_path: Path, llama: Path) -> None:
    """With one LoRA adapter each, two have the same; all share a system prompt's tokens, and not its blocks."""
    first, second = (str(lora_adapter.build(llama, tmp_path / f"adapter-{seed}", seed=seed)) for seed in (0, 1))
    arrivals = [{**a, "adapter": first if a["id"].startswith(("c0", "c2")) else second} for a in talks(1)]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": lora_adapter.RANK}
    runs = [
        spec("none", llama, {**NO_CACHE, **lora}, arrivals),
        spec("records", llama, {**TALKS["fcfs"], **lora}, arrivals, odd_records="exact"),
    ]
    found = run_engines(runs)
    assert_cleaned_up(found["records"])
    assert found["records"].kv_device["read_tokens"] > 0
    assert found["records"].tokens == found["none"].tokens


def test_requests_that_are_aborted_leave_nothing(exact: dict[str, Outcome], run_engines: Engines, llama: Path) -> None:
    """Among them one that waits with a partly filled block in a record."""
    names = [each["id"] for each in long_then_short(1)]
    leavers = {"preempted": names, "decoding": [name for name in names if name.startswith("long")]}
    run = spec("aborts", llama, CROWDS["preempting"], long_then_short(1), odd_records="exact", leavers=leavers)
    found = run_engines([run])["aborts"]
    assert_cleaned_up(found)
    assert sorted(found.left.values()) == sorted(leavers)
    assert found.kv_device["moves"]["partial"] > 0
    assert found.tokens == {name: exact["crowd"].tokens[name] for name in found.tokens}
