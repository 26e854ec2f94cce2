"""The verdict of `vllm-ext plan`, from tables of made-up metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from vllm_ext.simulation.measure.metrics import summarise
from vllm_ext.simulation.plan import (
    BASELINE,
    CANDIDATES,
    Candidate,
    Objective,
    Obstacle,
    Row,
    Verdict,
    compare,
    decide,
    only_orders,
)
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import SimulationSpec, checked, with_values
from vllm_ext.simulation.sweep.pools import InProcessPool
from vllm_ext.simulation.sweep.store import Outcome, PointStore

DEFAULT = Candidate(name=BASELINE, system="upstream-fcfs")
OURS = Candidate(name="alise", system="alise", flags=("--scheduler-cls", "alise"))
OTHER = Candidate(name="tuned", system="upstream-fcfs")
LOADS = (0.5, 1.0, 2.0)
NO_SLO = Objective(with_slo=False)
SLO = Objective(with_slo=True, min_attainment=0.9)
Values = tuple[float | None, ...]


def judged(objective: Objective, default: Values, *others: tuple[Candidate, Values]) -> Verdict:
    """The verdict on candidates whose metric has these values at `LOADS`; None is a run that failed."""
    rows = [
        Row(
            candidate=candidate,
            load=load,
            rate_per_s=load,
            outcome=Outcome(error="x") if values[place] is None else Outcome(metrics={objective.metric: values[place]}),
        )
        for place, load in enumerate(LOADS)
        for candidate, values in ((DEFAULT, default), *others)
    ]
    verdict = decide(rows, objective)
    assert verdict is not None
    return verdict


def test_lower_latency_wins_and_the_loads_without_gain_are_named() -> None:
    verdict = judged(NO_SLO, (40, 50, 400), (OURS, (40, 45, 100)))
    assert (verdict.choice, verdict.helps_at, tuple(verdict.nothing_helps)) == (OURS, (1.0, 2.0), (0.5,))
    assert verdict.reason == "+10 % less mean normalised latency at your load; +75 % at 2 times your load"


def test_with_slos_the_candidate_that_carries_the_highest_load_wins() -> None:
    verdict = judged(SLO, (1.0, 0.95, 0.2), (OURS, (1.0, 0.97, 0.5)), (OTHER, (1.0, 0.94, 0.91)))
    assert verdict.choice is OTHER
    assert verdict.carried_load == {BASELINE: 1.0, "alise": 1.0, "tuned": 2.0}
    assert "SLOs hold up to >= 2 times your load (with the defaults up to 1 times your load)" in verdict.reason, (
        "2 is the highest load tried"
    )


def test_limit_below_the_highest_load_is_printed_as_found() -> None:
    verdict = judged(SLO, (0.8, 0.8, 0.2), (OURS, (1.0, 0.97, 0.5)))
    assert "SLOs hold up to 1 times your load (with the defaults at no simulated load)" in verdict.reason


def test_why_nothing_helps_is_said_per_load() -> None:
    """Nobody waits at half the load, all are late at twice the load, and in between no candidate is better."""
    waits = {0.5: 0.0, 1.0: 7.0, 2.0: 7.0}
    attained = {0.5: 1.0, 1.0: 0.95, 2.0: 0.3}
    rows = [
        Row(
            candidate=candidate,
            load=load,
            rate_per_s=load,
            outcome=Outcome(metrics={"contended_steps": waits[load], SLO.metric: attained[load]}),
        )
        for load in LOADS
        for candidate in (DEFAULT, OURS)
    ]
    verdict = decide(rows, SLO)
    assert verdict is not None
    assert verdict.nothing_helps == {0.5: Obstacle.NO_QUEUE, 1.0: Obstacle.NO_BETTER, 2.0: Obstacle.OVERLOADED}


@pytest.mark.parametrize(
    ("values", "nothing_helps_at"),
    [((39, 49, 390), LOADS), ((40, 60, 100), (0.5, 1.0))],
    ids=["nothing worthwhile", "a loss at the user's own load"],
)
def test_defaults_stay(values: Values, nothing_helps_at: tuple[float, ...]) -> None:
    verdict = judged(NO_SLO, (40, 50, 400), (OURS, values))
    assert (verdict.choice, verdict.helps_at, tuple(verdict.nothing_helps)) == (DEFAULT, (), nothing_helps_at)
    assert verdict.reason.startswith("no candidate improves on vLLM's defaults")


def test_load_counts_as_carried_only_if_all_lighter_ones_are() -> None:
    verdict = judged(SLO, (0.5, 1.0, 1.0), (OURS, (1.0, 0.9, 0.89)))
    assert verdict.carried_load == {BASELINE: 0.0, "alise": 1.0}


def test_first_of_equal_candidates_is_chosen_so_that_the_order_is_a_preference() -> None:
    equal = (40, 40, 100)
    for one, other in ((OURS, OTHER), (OTHER, OURS)):
        assert judged(NO_SLO, (40, 50, 400), (one, equal), (other, equal)).choice is one


def test_what_failed_is_left_out() -> None:
    """At the load 2 there is nothing to compare with, and what is known of tuned is not enough."""
    verdict = judged(NO_SLO, (40, 50, None), (OURS, (40, 45, None)), (OTHER, (40, None, 1)))
    assert (verdict.choice, verdict.helps_at, verdict.left_out) == (OURS, (1.0,), ("tuned",))
    assert decide([], NO_SLO) is None


SARATHI = Candidate(name="sarathi", system="sarathi")
Ran = tuple[str, float | None]


def compared(
    folder: Path, evaluate: Callable[[SimulationSpec], Mapping[str, float]], base: SimulationSpec | None = None
) -> tuple[list[Row], list[Ran]]:
    """Compare three candidates at 10 requests/s with a plain function; return the rows as they came, and what ran."""
    ran: list[Ran] = []
    told: list[Row] = []

    def noted(spec: SimulationSpec) -> Mapping[str, float]:
        ran.append((spec.engine.system, spec.workload.rate_per_s))
        return evaluate(spec)

    with PointStore(folder) as store, InProcessPool(noted) as pool:
        rows = compare(base or SimulationSpec(), 10.0, [OURS, SARATHI, DEFAULT], LOADS, store, pool, told.append)
    assert rows == sorted(told, key=lambda row: (row.load, [OURS, SARATHI, DEFAULT].index(row.candidate)))
    return told, ran


def busy(spec: SimulationSpec) -> Mapping[str, float]:
    """Somebody waits from 10 requests/s on."""
    return {"contended_steps": float((spec.workload.rate_per_s or 0) >= 10)}


def test_defaults_run_first_and_what_only_orders_not_where_nobody_waits(tmp_path: Path) -> None:
    told, ran = compared(tmp_path, busy)
    assert ran == [
        ("upstream-fcfs", 10.0),
        ("upstream-fcfs", 20.0),
        ("upstream-fcfs", 5.0),
        ("alise", 20.0),
        ("alise", 10.0),
        ("sarathi", 20.0),
        ("sarathi", 10.0),
        ("sarathi", 5.0),
    ]
    assert (told[0].candidate.name, told[0].load) == (BASELINE, 1.0)
    (skipped,) = (row for row in told if row.skipped)
    assert (skipped.candidate, skipped.load, skipped.skipped) == (OURS, 0.5, "nobody waited")
    assert skipped.outcome.metrics == {"contended_steps": 0.0}


@pytest.mark.parametrize(("arrivals", "refused"), [("recorded", True), ("poisson", False)])
def test_goodput_above_the_offered_rate_of_a_recording_is_an_error(
    tmp_path: Path, arrivals: str, refused: bool
) -> None:
    """A hundred seconds at 10 requests/s hold 1,001 requests at most: 10.02/s of them can't have been served."""

    def evaluate(spec: SimulationSpec) -> Mapping[str, float]:
        goodput = {5.0: 5.0, 10.0: 10.02, 20.0: 20.01}[spec.workload.rate_per_s or 0]
        return {"contended_steps": 1.0, "goodput_requests_per_s": goodput, "duration_s": 100.0}

    told, _ = compared(tmp_path, evaluate, with_values(SimulationSpec(), {"workload.arrivals": arrivals}))
    failed = {row.load: row.outcome.error for row in told if row.outcome.failed}
    said = "goodput of 10.02 requests/s: must be at most the offered rate of 10"
    assert failed == ({1.0: said} if refused else {})


@pytest.mark.parametrize(
    ("sarathis", "not_run"),
    [
        ((100.9, 100.0, 100.0), [0.5]),
        ((100.0, 99.1, 50.0), [0.5]),
        ((101.1, 100.0, 100.0), []),
        ((100.0, 98.9, 100.0), []),
    ],
    ids=["alike twice", "what is lighter is not looked at", "unlike where all is lost", "unlike at the own load"],
)
def test_who_does_as_vllm_at_two_loads_in_a_row_is_not_run_at_lighter_ones(
    tmp_path: Path, sarathis: tuple[float, float, float], not_run: list[float]
) -> None:
    """Latencies of sarathi from the heaviest load down; vLLM's is 100."""

    def evaluate(spec: SimulationSpec) -> Mapping[str, float]:
        place = [20.0, 10.0, 5.0].index(spec.workload.rate_per_s or 0)
        value = {"sarathi": sarathis[place], "alise": 10.0}.get(spec.engine.system, 100.0)
        same = {"e2e_mean_ms": 7.0, "slo_attainment_fraction": 0.5}
        return {"contended_steps": 1.0, "normalised_latency_mean_ms_per_token": value, **same}

    told, ran = compared(tmp_path, evaluate)
    skipped = [row for row in told if row.skipped]
    assert [(row.candidate, row.load) for row in skipped] == [(SARATHI, load) for load in not_run]
    assert all(row.skipped == "did as vLLM at 2 x" for row in skipped)
    assert len(ran) == 9 - len(not_run)


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
    assert systems == {"alise", "fcfs-tuned"}
    default, crowded = served("upstream-fcfs", 0.5), served("upstream-fcfs", 50.0)
    assert (default["contended_steps"], crowded["contended_steps"] > 0) == (0, True)
    for system in systems:
        ours = served(system, 0.5)
        assert {name: ours[name] for name in default} == default
