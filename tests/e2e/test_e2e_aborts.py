"""Clients that leave in every phase of their request's life: nothing is left, and nobody else's tokens change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, Engines, Outcome, long_then_short

from tests.support.extent import quick

pytestmark = pytest.mark.e2e

ARRIVALS = long_then_short(seed=1, num_long=8, num_short=30)
LONG, SHORT = ([each["id"] for each in ARRIVALS if each["id"].startswith(kind)] for kind in ("long", "short"))
LEAVERS = {"waiting": SHORT, "prefilling": SHORT, "decoding": SHORT, "preempted": LONG, "loading": LONG}
ROOM: dict[str, Any] = {"max_model_len": 448, "enable_prefix_caching": False}
FULL_POOL: dict[str, Any] = {"num_gpu_blocks_override": 12, "max_num_seqs": 3, "max_num_batched_tokens": 48}
"""So few blocks that they are all in use, and so few tokens in a step that prompts are computed in pieces."""
STORES = quick(("early",), full=("early", "auto"))


def under_alise(store: str) -> dict[str, Any]:
    tier = {"gib": 64 / 1024, "bits": 16, "store": store}
    ours = {**EAGER["vllm_ext"], "kv_tier": tier, "residency": {"choose": "swap"}}
    return {"scheduler_cls": "alise-published", "additional_config": {"vllm_ext": ours}, **FULL_POOL}


@pytest.fixture(scope="module")
def runs(run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    def spec(name: str, engine: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"name": name, "engine": {**BASE_ENGINE, "model": str(llama), **engine}, "arrivals": ARRIVALS, **more}

    return run_engines([spec("all", ROOM), *(spec(s, under_alise(s), leavers=LEAVERS) for s in STORES)])


@pytest.mark.parametrize("store", STORES)
def test_3_aborts_in_every_phase_leave_nothing_behind(runs: dict[str, Outcome], store: str) -> None:
    found = runs[store]
    assert sorted(found.left.values()) == sorted(LEAVERS)
    assert found.tokens.keys() == runs["all"].tokens.keys() - found.left.keys()
    assert (found.blocks_missing, found.left_running, found.left_waiting, found.fallbacks) == (0, 0, 0, 0)


@pytest.mark.parametrize("store", STORES)
def test_4_those_who_stay_get_their_tokens_while_every_block_is_in_use(runs: dict[str, Outcome], store: str) -> None:
    found = runs[store]
    assert found.fullest == 1.0
    assert found.tokens == {name: runs["all"].tokens[name] for name in found.tokens}
