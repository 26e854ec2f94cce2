"""Loads within the step on the real engine: each layer waits for its KV, and what a load did not bring is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engines import Engines, Outcome
from test_e2e_kv_tier import FEW_BLOCKS, FEW_LARGE_BLOCKS, LONGS, PRESSED, ROOM, TURNS, assert_same, spec, tier

pytestmark = pytest.mark.e2e


def turns(name: str, model: Path, odd: str | None = None, **options: Any) -> dict[str, Any]:
    engine = options.pop("engine", {})
    made = spec(name, model, TURNS, **{**tier(**{"load": "in-step", **options}), **FEW_BLOCKS, **engine})
    return made if odd is None else {**made, "odd_loads": odd}


def longs(name: str, model: Path, odd: str | None = None, **options: Any) -> dict[str, Any]:
    made = spec(name, model, LONGS, **tier("alise-published", load="in-step", **options), **PRESSED)
    return made if odd is None else {**made, "odd_loads": odd}


@pytest.fixture(scope="module")
def runs(run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    wanted = [
        spec("turns", llama, TURNS, **ROOM),
        spec("longs", llama, LONGS, **ROOM),
        turns("turns-step", llama),
        turns("turns-64-tokens", llama, engine=FEW_LARGE_BLOCKS),
        turns("turns-ahead", llama, store="ahead"),
        turns("turns-auto", llama, load="auto"),
        turns("turns-compiled", llama, engine={"enforce_eager": False}),
        longs("longs-step", llama),
        turns("turns-tardy", llama, "tardy"),
        turns("turns-nobody-asks", llama, "tardy-nobody-asks"),
        turns("turns-nobody-waits", llama, "tardy-nobody-waits"),
        turns("turns-fail", llama, "fail"),
        longs("longs-fail", llama, "fail", store="ahead"),
    ]
    return run_engines(wanted)


@pytest.fixture(scope="module")
def async_runs(run_engines: Engines, llama: Path) -> dict[str, Outcome]:
    wanted = [
        turns("turns-step", llama),
        longs("longs-step", llama),
        turns("turns-fail", llama, "fail"),
        turns("turns-ahead-fail", llama, "fail", store="ahead"),
        longs("longs-fail", llama, "fail", store="ahead"),
    ]
    return run_engines(wanted, boot="async")


@pytest.mark.parametrize(
    "name",
    ["turns-step", "turns-64-tokens", "turns-ahead", "turns-auto", "turns-compiled", "turns-tardy", "longs-step"],
)
def test_4_requests_compute_in_the_step_that_loads(runs: dict[str, Outcome], name: str) -> None:
    assert_same(runs[name], runs[name.split("-")[0]])
    assert runs[name].host_bytes_loaded > 0
    assert "load" not in runs[name].preemption_reasons, "nothing failed"


def test_the_waits_are_needed(runs: dict[str, Outcome]) -> None:
    """The control: as `turns-tardy`, but nobody waits."""
    assert runs["turns-nobody-waits"].host_hit_tokens == runs["turns-tardy"].host_hit_tokens > 200
    assert runs["turns-nobody-waits"].tokens != runs["turns"].tokens


def test_a_mode_in_which_attention_does_not_ask_is_noticed(runs: dict[str, Outcome]) -> None:
    found = runs["turns-nobody-asks"]
    assert_same(found, runs["turns"])
    assert found.preemption_reasons["load"] == 1, "the first load was computed again, the others waited for"


@pytest.mark.parametrize("name", ["turns-fail", "longs-fail"])
def test_what_a_failed_load_did_not_bring_is_computed(runs: dict[str, Outcome], name: str) -> None:
    assert_same(runs[name], runs[name.split("-")[0]])
    assert runs[name].preemption_reasons["load"] > 0


@pytest.mark.parametrize("name", ["turns-step", "longs-step", "turns-fail", "turns-ahead-fail", "longs-fail"])
def test_10_async_scheduling(runs: dict[str, Outcome], async_runs: dict[str, Outcome], name: str) -> None:
    found = async_runs[name]
    assert found.batch_queue == 2
    assert found.host_bytes_loaded > 0
    assert_same(found, runs[name.split("-")[0]])
    assert ("load" in found.preemption_reasons) == name.endswith("fail")
