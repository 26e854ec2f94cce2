"""Tensor-parallel workers under systems that preempt and swap: the tokens are those of stock vLLM's workers.

Seats and KV blocks are few, so that requests are preempted and their KV goes to host memory and comes back, each worker
its share. In 16 bits that is lossless. In 8 bits it is not, and tokens may differ from those of KV that never left; but
heads are quantised each for itself, so that two workers bring back what one would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, Engines, Outcome, conversations, long_then_short

from tests.support.extent import with_full

pytestmark = pytest.mark.e2e

MIB = 1 / 1024
"""In GiB."""
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
ROOM: dict[str, Any] = {"max_model_len": 448, "enable_prefix_caching": False}
PRESSED: dict[str, Any] = {"num_gpu_blocks_override": 12, "max_model_len": 256, "max_num_seqs": 3}
FEW: dict[str, Any] = {"num_gpu_blocks_override": 20, "max_model_len": 448, "max_num_seqs": 4}
LONGS = long_then_short(seed=1, num_long=6, num_short=12)
TURNS = conversations(seed=5)
BY_NAME, BY_VLLM = ["alise-published", "alise-ttft"], ["alise", "auto", "alise+pensieve"]
"""Systems that preempt whom they name, and such that let vLLM do it when KV blocks run out."""
SWAPPING = with_full(BY_NAME[:1], BY_NAME + BY_VLLM)
KEEPING = with_full(["pensieve"], ["pensieve", "auto", "alise+pensieve"])


def swaps(system: str, bits: int) -> dict[str, Any]:
    """Whoever is preempted leaves its KV in host memory."""
    tier: dict[str, Any] = {"gib": 64 * MIB, "bits": bits}
    if "pensieve" not in system:
        tier["store"] = "early"
    ours = {**EAGER["vllm_ext"], "kv_tier": tier, "residency": {"choose": "swap"}}
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": ours}, **PRESSED}


def keeps(system: str) -> dict[str, Any]:
    """Conversations find their KV again."""
    ours = {**EAGER["vllm_ext"], "kv_tier": {"gib": 64 * MIB, "bits": 16}}
    return {"scheduler_cls": system, "additional_config": {"vllm_ext": ours}, **FEW}


def spec(name: str, model: Path, arrivals: list[dict[str, Any]], **engine: Any) -> dict[str, Any]:
    return {"name": name, "engine": {**BASE_ENGINE, "model": str(model), **engine}, "arrivals": arrivals}


@pytest.fixture(scope="module")
def stock(run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    return run_engines([spec("longs", llama, LONGS, **ROOM, **TWO), spec("turns", llama, TURNS, **ROOM, **TWO)])


def assert_cleaned_up(found: Outcome) -> None:
    assert (found.blocks_missing, found.left_running, found.left_waiting, found.fallbacks) == (0, 0, 0, 0)


def assert_swapped(found: Outcome, reason: str = "policy") -> None:
    assert found.preemption_reasons[reason] > 0
    assert found.host_bytes_stored > 0
    assert found.host_bytes_loaded > 0
    assert_cleaned_up(found)


@pytest.mark.parametrize("system", SWAPPING)
def test_4_preempted_requests_go_on_from_what_each_worker_kept(
    run_engines: Engines, llama: Path, stock: dict[str, Outcome], system: str
) -> None:
    (found,) = run_engines([spec("swaps", llama, LONGS, **swaps(system, 16), **TWO)]).values()
    assert_swapped(found, "policy" if system in BY_NAME else "memory")
    assert found.tokens == stock["longs"].tokens


def test_4_in_eight_bits_two_workers_bring_back_what_one_does(
    run_engines: Engines, llama: Path, stock: dict[str, Outcome]
) -> None:
    wanted = [spec("one", llama, LONGS, **swaps("alise-published", 8))]
    wanted += [spec("two", llama, LONGS, **swaps("alise-published", 8), **TWO)]
    found = run_engines(wanted)
    for outcome in found.values():
        assert_swapped(outcome)
        assert {key: len(tokens) for key, tokens in outcome.tokens.items()} == {
            key: len(tokens) for key, tokens in stock["longs"].tokens.items()
        }
    assert found["two"].preemption_reasons == found["one"].preemption_reasons
    assert found["two"].host_bytes_loaded == found["one"].host_bytes_loaded, "shares together are the whole"
    assert found["two"].tokens == found["one"].tokens


@pytest.mark.parametrize("system", KEEPING)
def test_4_conversations_go_on_from_what_each_worker_kept(
    run_engines: Engines, llama: Path, stock: dict[str, Outcome], system: str
) -> None:
    (found,) = run_engines([spec("keeps", llama, TURNS, **keeps(system), **TWO)]).values()
    assert found.host_hit_tokens > 0
    assert found.host_bytes_loaded > 0
    assert_cleaned_up(found)
    assert found.tokens == stock["turns"].tokens


@pytest.mark.full
def test_stock_workers_give_what_one_gives(run_engines: Engines, llama: Path, stock: dict[str, Outcome]) -> None:
    """Else the comparisons above would say less than they seem to."""
    found = run_engines([spec("longs", llama, LONGS, **ROOM), spec("turns", llama, TURNS, **ROOM)])
    assert {name: outcome.tokens for name, outcome in found.items()} == {
        name: outcome.tokens for name, outcome in stock.items()
    }
