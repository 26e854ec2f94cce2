"""The verdict of `vllm-ext plan`, from tables of made-up metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from vllm_ext.simulation.metrics import summarise
from vllm_ext.simulation.plan import (
    ATTAINMENT,
    BASELINE,
    CANDIDATES,
    LATENCY,
    Candidate,
    Objective,
    Row,
    compare,
    decide,
    only_orders,
)
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.paths import checked, with_values
from vllm_ext.simulation.sweep.pools import InProcessPool
from vllm_ext.simulation.sweep.store import PointStore

DEFAULT = Candidate(name=BASELINE, system="upstream-fcfs")
OURS = Candidate(name="alise", system="alise", flags=("--scheduler-cls", "alise"))
OTHER = Candidate(name="tuned", system="upstream-fcfs")
LOADS = (0.5, 1.0, 2.0)
NO_SLO = Objective(with_slo=False)
SLO = Objective(with_slo=True, min_attainment=0.9)


def table(metric: str, **values: tuple[float, float, float]) -> dict[tuple[str, float], Mapping[str, float]]:
    names = {"default": BASELINE}
    return {
        (names.get(name, name), load): {metric: value}
        for name, row in values.items()
        for load, value in zip(LOADS, row, strict=True)
    }


def test_lower_latency_wins_and_the_loads_without_gain_are_named() -> None:
    measured = table(LATENCY, default=(40, 50, 400), alise=(40, 45, 100))
    verdict = decide(measured, [DEFAULT, OURS], LOADS, NO_SLO)
    assert verdict.choice is OURS
    assert verdict.helps_at == (1.0, 2.0)
    assert verdict.nothing_helps_at == (0.5,)
    assert "+10 % less mean normalised latency at your load" in verdict.reason
    assert "+75 %" in verdict.reason


def test_defaults_stay_when_nothing_is_worthwhile() -> None:
    measured = table(LATENCY, default=(40, 50, 60), alise=(39, 49, 58))
    verdict = decide(measured, [DEFAULT, OURS], LOADS, NO_SLO)
    assert verdict.choice is DEFAULT
    assert verdict.helps_at == ()
    assert verdict.nothing_helps_at == LOADS


def test_gain_under_overload_does_not_excuse_a_loss_at_the_users_own_load() -> None:
    measured = table(LATENCY, default=(40, 50, 400), alise=(40, 60, 100))
    assert decide(measured, [DEFAULT, OURS], LOADS, NO_SLO).choice is DEFAULT


def test_with_slos_the_candidate_that_carries_the_highest_load_wins() -> None:
    measured = table(ATTAINMENT, default=(1.0, 0.95, 0.2), alise=(1.0, 0.97, 0.5), tuned=(1.0, 0.94, 0.91))
    verdict = decide(measured, [DEFAULT, OURS, OTHER], LOADS, SLO)
    assert verdict.choice is OTHER
    assert verdict.carried_load == {BASELINE: 1.0, "alise": 1.0, "tuned": 2.0}
    assert "SLOs hold up to 2 times your load (1 with the defaults)" in verdict.reason


def test_load_counts_as_carried_only_if_all_lighter_ones_are() -> None:
    measured = table(ATTAINMENT, default=(0.5, 1.0, 1.0), alise=(1.0, 0.9, 0.89))
    verdict = decide(measured, [DEFAULT, OURS], LOADS, Objective(with_slo=True, min_attainment=0.9))
    assert verdict.carried_load == {BASELINE: 0.0, "alise": 1.0}


def test_first_of_equal_candidates_is_chosen_so_that_the_order_is_a_preference() -> None:
    measured = table(LATENCY, default=(40, 50, 400), alise=(40, 40, 100), tuned=(40, 40, 100))
    assert decide(measured, [DEFAULT, OURS, OTHER], LOADS, NO_SLO).choice is OURS
    assert decide(measured, [DEFAULT, OTHER, OURS], LOADS, NO_SLO).choice is OTHER


def test_table_without_the_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="'vLLM default' must be among them"):
        decide({}, [OURS], LOADS, NO_SLO)


SARATHI = Candidate(name="sarathi", system="sarathi")
Ran = tuple[str, float | None]


def compared(
    folder: Path, evaluate: Callable[[SimulationSpec], Mapping[str, float]], loads: tuple[float, ...] = LOADS
) -> tuple[list[Row], list[Ran]]:
    """Compare three candidates at 10 requests/s with a plain function; return the rows as they came, and what ran."""
    ran: list[Ran] = []
    told: list[Row] = []

    def noted(spec: SimulationSpec) -> Mapping[str, float]:
        ran.append((spec.engine.system, spec.workload.rate_per_s))
        return evaluate(spec)

    with PointStore(folder) as store, InProcessPool(noted) as pool:
        rows = compare(SimulationSpec(), 10.0, [OURS, SARATHI, DEFAULT], loads, store, pool, told.append)
    assert sorted(map(str, rows)) == sorted(map(str, told))
    return told, ran


def busy(spec: SimulationSpec) -> Mapping[str, float]:
    """Somebody waits from 10 requests/s on."""
    return {"contended_steps": float((spec.workload.rate_per_s or 0) >= 10)}


def test_own_load_and_the_defaults_run_first_and_what_only_orders_not_where_nobody_waits(tmp_path: Path) -> None:
    told, ran = compared(tmp_path, busy)
    assert ran == [
        ("upstream-fcfs", 10.0),
        ("alise", 10.0),
        ("sarathi", 10.0),
        ("upstream-fcfs", 5.0),
        ("sarathi", 5.0),
        ("upstream-fcfs", 20.0),
        ("alise", 20.0),
        ("sarathi", 20.0),
    ]
    assert (told[0].candidate.name, told[0].load) == (BASELINE, 1.0)
    (skipped,) = (row for row in told if row.skipped)
    assert (skipped.candidate, skipped.load, skipped.outcome.metrics) == (OURS, 0.5, {"contended_steps": 0.0})


def test_failed_run_leaves_the_others_and_runs_again_next_time(tmp_path: Path) -> None:
    def fails(spec: SimulationSpec) -> Mapping[str, float]:
        if spec.engine.system == "alise":
            raise ArithmeticError("not today")
        return busy(spec)

    told, _ = compared(tmp_path, fails, (1.0, 2.0))
    assert [(row.candidate.name, row.outcome.error) for row in told if row.outcome.failed] == [
        ("alise", "ArithmeticError: not today")
    ] * 2
    again, ran = compared(tmp_path, busy, (1.0, 2.0))
    assert ran == [("alise", 10.0), ("alise", 20.0)]
    assert not any(row.outcome.failed for row in again)


def test_interrupted_comparison_goes_on(tmp_path: Path) -> None:
    def stopped(spec: SimulationSpec) -> Mapping[str, float]:
        if spec.engine.system == "sarathi":
            raise KeyboardInterrupt
        return busy(spec)

    with pytest.raises(KeyboardInterrupt):
        compared(tmp_path, stopped, (1.0,))
    assert compared(tmp_path, busy, (1.0,))[1] == [("sarathi", 10.0)]


@pytest.mark.parametrize(
    ("system", "options", "expected"),
    [
        ("alise", {}, True),
        ("upstream-fcfs", {}, False),
        ("sarathi", {}, False),
        ("past-future", {}, False),
        ("auto", {}, False),
        ("alise", {"kv_tier": {"gib": 1.0}}, False),
    ],
)
def test_what_only_orders_has_vllms_budget_no_gates_and_no_tier(
    system: str, options: dict[str, object], expected: bool
) -> None:
    spec = with_values(SimulationSpec(), {"engine.system": system, "engine.options": options})
    assert only_orders(spec) is expected


def served(system: str, rate: float) -> dict[str, float]:
    spec = with_values(
        SimulationSpec(),
        {"engine.system": system, "workload.rate_per_s": rate, "workload.num_requests": 60, "engine.max_num_seqs": 16},
    )
    return summarise(simulate(checked(spec)))


def test_what_only_orders_does_as_the_defaults_where_nobody_waits() -> None:
    """What `compare` relies on, for every candidate that it may skip."""
    systems = {c.system for c in CANDIDATES if only_orders(with_values(SimulationSpec(), {"engine.system": c.system}))}
    assert systems == {"alise"}
    default, crowded = served("upstream-fcfs", 0.5), served("upstream-fcfs", 50.0)
    assert (default["contended_steps"], crowded["contended_steps"] > 0) == (0, True)
    for system in systems:
        ours = served(system, 0.5)
        assert {name: ours[name] for name in default} == default
