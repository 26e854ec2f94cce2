"""public_measurements.py: what is reproduced of each measurement, and what is not, as docs/results says."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_ext.simulation.measure.metrics import summarise
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import SimulationSpec


@pytest.fixture
def public() -> ModuleType:
    return importlib.import_module("public_measurements")


def metrics(specs: Mapping[Any, SimulationSpec]) -> dict[Any, Mapping[str, float]]:
    return {key: summarise(simulate(spec)) for key, spec in specs.items()}


def missed(rows: Iterable[Any]) -> set[str]:
    return {row.name.split(", ", 1)[1] for row in rows if row.held and not row.reproduced}


def by_name(rows: Iterable[Any]) -> dict[str, Any]:
    return {row.name.split(", ", 1)[1]: row for row in rows}


@pytest.mark.parametrize(
    ("simulated", "reproduced"), [(1.36, True), (1.17, True), (1.15, False), (1.57, False), (0.99, False)]
)
def test_a_ratio_is_reproduced_in_the_same_direction_and_within_15_percent(
    public: ModuleType, simulated: float, reproduced: bool
) -> None:
    row = public.Row(name="gain", published=1.365, simulated=simulated)
    assert row.reproduced is reproduced
    assert all(claim.met for claim in public.claims([row])) is reproduced


def test_a_published_ratio_of_1_has_no_direction(public: ModuleType) -> None:
    (claim,) = public.claims([public.Row(name="none", published=1.0003, simulated=0.9)])
    assert claim.met


def test_a_small_change_in_the_wrong_direction_is_missed(public: ModuleType) -> None:
    row = public.Row(name="loss", published=0.98, simulated=1.02)
    assert abs(row.over - 1) < public.WITHIN
    assert not row.reproduced


def test_a100_rates_come_out_where_memory_is_known(public: ModuleType) -> None:
    """The rate that does not is that of two devices before, whose KV the sampler of that version took."""
    rows = public.a100_rows(SimpleNamespace(metrics=metrics), (0,))
    found = by_name(rows)
    for name in ("TP 2, today's memory: after", "TP 4, today's memory: before", "TP 4, today's memory: after"):
        assert found[f"{name}, tokens/s"].over == pytest.approx(1, abs=public.WITHIN)
    assert found["TP 2, today's memory: before, tokens/s"].over > 1.2
    signs = {f"TP 4, {memory}: after over before" for memory in (public.MEMORY_OF_TODAY, public.SAMPLER_OF_2025)}
    assert missed(rows) == {"TP 2, today's memory: after over before", *signs}
    assert found["TP 2, today's memory: after over before"].effect > 0
    assert all(abs(found[name].simulated - 1) < 0.05 for name in signs)


def test_gb10_caps_come_out_with_one_constant_but_not_over_decode_alone(public: ModuleType) -> None:
    rows = public.gb10_rows(700.0, (public.ONE_CONSTANT,))
    caps = ("off", "1024", "512", "256")
    assert missed(rows) == {f"one constant: cap {cap}, TPOT over decode alone" for cap in caps}
    assert all(row.effect > 0 for row in rows if row.held)
    found = by_name(rows)
    assert found["one constant: cap off, prefill, prompts/min"].over == pytest.approx(1, abs=0.03)
    assert found["one constant: decode alone, ms"].over < 1 - public.WITHIN


def test_gb10_by_the_data_sheet_has_the_direction_and_too_small_a_gain(public: ModuleType) -> None:
    rows = public.gb10_rows(700.0, (public.BY_DATA_SHEET,))
    assert all(row.effect > 0 for row in rows if row.held)
    found = by_name(rows)
    for cap in (1024, 512, 256):
        assert found[f"by the data sheet: cap {cap}, TPOT over off"].over > 1 + public.WITHIN


def test_shortest_first_gains_as_published_and_the_budget_alone_changes_nothing(public: ModuleType) -> None:
    rows = public.liveness_rows((0,))
    assert missed(rows) == {
        "lengths as stated: 65536 tokens, SJF over FCFS",
        "lengths as stated: FCFS, 65536 tokens over 2048",
    }
    found = by_name(rows)
    assert found["lengths as stated: FCFS, 65536 tokens over 2048"].simulated == 1
    assert found["lengths as stated: 2048 tokens, FCFS, s"].over == pytest.approx(1, abs=public.WITHIN)
    assert found["default lengths: 65536 tokens, FCFS, s"].over == pytest.approx(1, abs=public.WITHIN)
