"""Our attention kernel serves everything on a real engine, and the tokens are vLLM's.

In fp32, so that the same tokens mean the same attention. The references are of vLLM's own backend, without preemptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lora_adapter
import pytest
from engines import BASE_ENGINE, SEATS, TIGHT, Engines, Outcome, conversations, long_then_short
from test_e2e_equality import FEW, NGRAM, repetitive
from test_e2e_gaps import NO_CACHE, RUNS, talks

from tests.support.upstream import WITH_GAPS, needs

pytestmark = [pytest.mark.e2e, needs("attention-slot")]

Arrivals = list[dict[str, Any]]


def steered(system: str, kernel: str = "own", **options: Any) -> dict[str, Any]:
    ours = {"attention": {"kernel": kernel}, "prediction": {"sources": ["hint", "history"]}, **options}
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": ours}}


def under_own(engine: Mapping[str, Any]) -> dict[str, Any]:
    """An engine of another test, with our kernel."""
    return {**engine, **steered(engine["scheduler_cls"], **engine["additional_config"]["vllm_ext"])}


def spec(name: str, model: Path, arrivals: Arrivals, engine: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "engine": {**BASE_ENGINE, "model": str(model), **engine}, "arrivals": arrivals, **more}


def assert_served_by(outcome: Outcome, kernel: str) -> None:
    """Check that every step was served by one kernel, and that nothing was left."""
    assert outcome.attention["steps"][kernel] > 10
    assert list(outcome.attention["steps"]) == [kernel]
    assert list(outcome.attention["tokens"]) == [f"{kernel} float32"]
    assert (outcome.blocks_missing, outcome.left_running, outcome.left_waiting, outcome.fallbacks) == (0, 0, 0, 0)


@pytest.mark.parametrize("style", ["llama", "opt"])
def test_4_all_steps_by_our_kernel_give_vllms_tokens(
    run_engines: Engines, request: pytest.FixtureRequest, style: str
) -> None:
    """Decode and prefill, in chunks, preempted by policy and for memory."""
    model = request.getfixturevalue(style)
    arrivals = long_then_short(seed=1)
    chunks = {"max_num_batched_tokens": 24}
    found = run_engines(
        [
            spec(f"{style}-upstream", model, arrivals, {}),
            spec(f"{style}-seats", model, arrivals, {**steered("alise-published"), **SEATS}),
            spec(f"{style}-tight", model, arrivals, {**steered("alise-published"), **TIGHT, **chunks}),
        ]
    )
    for setting in ("seats", "tight"):
        outcome = found[f"{style}-{setting}"]
        assert outcome.preemptions > 0
        assert outcome.tokens == found[f"{style}-upstream"].tokens
        assert_served_by(outcome, "own")


def test_4_prefixes_found_in_the_cache(run_engines: Engines, llama: Path) -> None:
    arrivals = conversations(seed=5)
    found = run_engines(
        [
            spec("none", llama, arrivals, {"max_model_len": 448, "enable_prefix_caching": False}),
            spec("cached", llama, arrivals, {"max_model_len": 448, **steered("fcfs")}),
        ]
    )
    assert found["cached"].tokens == found["none"].tokens
    assert_served_by(found["cached"], "own")


@WITH_GAPS
@pytest.mark.parametrize("name", ["device", "chunked"])
def test_4_gaps_are_ranges(run_engines: Engines, llama: Path, name: str) -> None:
    """What holds nothing is overwritten before each step."""
    found = run_engines(
        [
            spec("none", llama, talks(1), NO_CACHE),
            spec(name, llama, talks(1), under_own(RUNS[name]), odd_gaps="poison"),
        ]
    )
    assert found[name].gaps["requests"] > 0
    assert found[name].tokens == found["none"].tokens
    assert_served_by(found[name], "own")


def test_4_kv_that_comes_back_from_host_memory(run_engines: Engines, llama: Path) -> None:
    """Pages are copied as they are, whoever wrote them."""
    tier = {"kv_tier": {"gib": 1 / 16, "bits": 16, "store": "early"}}
    few = {"num_gpu_blocks_override": 16, "max_model_len": 448, "max_num_seqs": 4}
    arrivals = conversations(seed=5)
    found = run_engines(
        [
            spec("none", llama, arrivals, {"max_model_len": 448, "enable_prefix_caching": False}),
            spec("tier", llama, arrivals, {**few, **steered("fcfs", **tier)}),
        ]
    )
    assert found["tier"].host_hit_tokens > 200
    assert found["tier"].tokens == found["none"].tokens
    assert_served_by(found["tier"], "own")


def test_10_adapters(run_engines: Engines, tmp_path: Path, llama: Path) -> None:
    first, second = (str(lora_adapter.build(llama, tmp_path / f"adapter-{seed}", seed=seed)) for seed in (0, 1))
    arrivals = [{**a, "adapter": first if a["id"].startswith(("c0", "c2")) else second} for a in talks(1)]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": lora_adapter.RANK}
    found = run_engines(
        [
            spec("none", llama, arrivals, {**NO_CACHE, **lora}),
            spec("own", llama, arrivals, {**under_own(RUNS["device"]), **lora, "num_gpu_blocks_override": 28}),
        ]
    )
    assert found["own"].tokens == found["none"].tokens
    assert_served_by(found["own"], "own")


def test_10_speculative_decoding(run_engines: Engines, llama: Path) -> None:
    """Drafts make queries of several tokens out of decode; the reference runs without."""
    arrivals = repetitive(long_then_short(seed=2))
    found = run_engines(
        [
            spec("upstream", llama, arrivals, {}),
            spec("ngram", llama, arrivals, {**steered("fcfs"), "speculative_config": NGRAM}),
        ]
    )
    assert found["ngram"].drafts > 0
    assert found["ngram"].tokens == found["upstream"].tokens
    assert_served_by(found["ngram"], "own")


@pytest.mark.parametrize("boot", ["async", "v2"])
def test_10_other_runners(run_engines: Engines, llama: Path, boot: str) -> None:
    arrivals = FEW if boot == "v2" else long_then_short(seed=3)
    (own,) = run_engines([spec("own", llama, arrivals, {**steered("fcfs")})], boot=boot).values()
    upstream = run_engines([spec("upstream", llama, arrivals, {})])["upstream"]
    assert own.tokens == upstream.tokens
    assert own.batch_queue == 2 if boot == "async" else own.runner == "vllm.v1.worker.cpu.model_runner"
    assert_served_by(own, "own")


def test_10_backend_for_cuda(run_engines: Engines, llama: Path) -> None:
    """Its Triton kernel, interpreted, beside vLLM's Triton backend, which writes the KV; two short requests."""
    arrivals = [{**a, "sampling": {**a["sampling"], "max_tokens": 3}} for a in FEW[:2]]
    (own,) = run_engines([spec("own", llama, arrivals, steered("fcfs"))], boot="cuda").values()
    upstream = run_engines([spec("upstream", llama, arrivals, {})])["upstream"]
    assert own.tokens == upstream.tokens
    assert list(own.attention["steps"]) == ["own"]
    said = "TRITON_ATTN serves prefill, vllm-ext serves decode and short queries (attention.kernel=own"
    assert said in Path(own.log).read_text()


def test_10_tensor_parallel_workers_serve_their_heads_and_tell_of_it(run_engines: Engines, llama: Path) -> None:
    """They are processes of their own, whose counts come when somebody asks again."""
    arrivals = long_then_short(seed=1)
    found = run_engines(
        [
            spec("alone", llama, arrivals, {}),
            spec("shards", llama, arrivals, {**steered("fcfs"), "tensor_parallel_size": 2}),
        ]
    )
    assert found["shards"].tokens == found["alone"].tokens
    assert "vllm-ext serves all steps" in Path(found["shards"].log).read_text()


def test_auto_serves_and_says_what_it_measured(run_engines: Engines, llama: Path) -> None:
    """Both kernels read the same pages, so that each step may be served by either."""
    arrivals = long_then_short(seed=1)
    found = run_engines(
        [
            spec("upstream", llama, arrivals, {}),
            spec("auto", llama, arrivals, steered("fcfs", "auto")),
            spec("stock", llama, arrivals, steered("fcfs", "stock")),
        ]
    )
    assert found["auto"].tokens == found["upstream"].tokens
    assert set(found["auto"].attention["steps"]) <= {"own", "stock"}
    assert "measured at start, our time over vLLM's: decode" in Path(found["auto"].log).read_text()
    assert found["stock"].attention == {}
