"""Sweeps with runs that are plain functions: order, interruption, failures, capacity searches, pools."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep import driver
from vllm_ext.simulation.sweep.capacity import CapacitySpec, Found
from vllm_ext.simulation.sweep.grid import RATE, SYSTEM, Point, SweepSpec, expand
from vllm_ext.simulation.sweep.paths import SpecError, with_values
from vllm_ext.simulation.sweep.points import Plan, run_plans, run_points
from vllm_ext.simulation.sweep.pools import InProcessPool, Pool, ProcessPool
from vllm_ext.simulation.sweep.store import NAME, Outcome, PointStore

RATES = (1.0, 2.0, 3.0, 4.0)
SWEEP = SweepSpec(axes={SYSTEM: ("fcfs", "alise"), RATE: RATES})
Evaluate = Callable[[SimulationSpec], dict[str, float]]


def swept(folder: Path, evaluate: Evaluate, sweep: SweepSpec = SWEEP) -> tuple[list[driver.Ran], list[float | None]]:
    """Run a grid here; return what came out, and the rates that were run."""
    ran: list[float | None] = []

    def counted(spec: SimulationSpec) -> dict[str, float]:
        ran.append(spec.workload.rate_per_s)
        return evaluate(spec)

    with InProcessPool(counted) as pool, PointStore(folder) as store:
        return driver.run_grid(sweep, store, pool), ran


def content(folder: Path) -> list[tuple[str, ...]]:
    return sqlite3.connect(folder / NAME).execute("select * from points order by key").fetchall()


def latencies(outcomes: list[driver.Ran]) -> list[float | None]:
    return [None if one.outcome.metrics is None else one.outcome.metrics["latency_ms"] for one in outcomes]


def test_outcomes_come_in_the_order_of_the_points(tmp_path: Path, fakes: Any) -> None:
    outcomes, ran = swept(tmp_path, fakes.latency)
    assert [one.point for one in outcomes] == expand(SWEEP)
    assert latencies(outcomes) == pytest.approx([100 / 3, 200 / 3, 100, 400 / 3, 20, 40, 60, 80])
    assert ran == [*RATES, *RATES]


def test_interrupted_sweep_runs_only_what_is_missing_and_ends_with_the_same_rows(tmp_path: Path, fakes: Any) -> None:
    whole, _ = swept(tmp_path / "whole", fakes.latency)
    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path / "cut", fakes.interrupted_at_three)
    assert len(content(tmp_path / "cut")) == 2
    resumed, ran = swept(tmp_path / "cut", fakes.latency)
    assert ran == [3.0, 4.0, *RATES]
    assert resumed == whole
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert swept(tmp_path / "cut", fakes.latency) == (whole, [])


def test_run_that_raises_is_recorded_and_tried_again_next_time(tmp_path: Path, fakes: Any) -> None:
    outcomes, ran = swept(tmp_path, fakes.fails_at_two)
    assert latencies(outcomes)[:4] == [pytest.approx(100 / 3), None, 100, pytest.approx(400 / 3)]
    assert outcomes[1].outcome.error == "ArithmeticError: two is too many"
    assert len(ran) == 8, "the others went on"
    again, ran = swept(tmp_path, fakes.latency)
    assert ran == [2.0, 2.0]
    assert None not in latencies(again)


def test_equal_points_are_run_once(tmp_path: Path) -> None:
    """Options do not reach vLLM's own scheduler, so an axis of options repeats its point."""
    axes = {"engine.options.prediction.window": (5, 6), SYSTEM: ("upstream-fcfs", "fcfs")}
    outcomes, ran = swept(tmp_path, lambda spec: {"x": 1.0}, SweepSpec(axes=axes))
    assert (len(outcomes), len(ran)) == (4, 3)


def test_progress_is_told_of_every_point_and_whether_it_was_there(tmp_path: Path, fakes: Any) -> None:
    swept(tmp_path, fakes.latency, SweepSpec(axes={RATE: (1.0, 2.0)}))
    told: list[tuple[float | None, bool]] = []

    def note(spec: SimulationSpec, outcome: Outcome, reused: bool) -> None:
        told.append((spec.workload.rate_per_s, reused))

    sweep = SweepSpec(axes={RATE: (1.0, 2.0, 3.0)})
    with InProcessPool(fakes.latency) as pool, PointStore(tmp_path) as store:
        driver.run_grid(sweep, store, pool, note)
    assert told == [(1.0, True), (2.0, True), (3.0, False)]


def searched(folder: Path, pool: Pool, **changes: Any) -> list[driver.Searched]:
    sweep = SweepSpec(
        **{
            "axes": {SYSTEM: ("fcfs", "alise")},
            "constraints": ("latency_ms<=100",),
            "capacity": CapacitySpec(),
            **changes,
        }
    )
    with pool, PointStore(folder) as store:
        return driver.run_capacity(sweep, store, pool)


def test_capacity_of_every_system_lies_in_its_bracket(tmp_path: Path, fakes: Any) -> None:
    found = searched(tmp_path, InProcessPool(fakes.latency))
    for one, true in zip(found, (3.0, 5.0), strict=True):
        assert one.capacity is not None
        assert one.capacity.lower is not None
        assert one.capacity.upper is not None
        assert one.capacity.lower.rate_per_s <= true < one.capacity.upper.rate_per_s
        assert one.capacity.upper.violated == ("latency_ms<=100",)


def test_repeats_search_with_their_own_seeds(tmp_path: Path, fakes: Any) -> None:
    """The fake latency grows by 1 ms per seed, so the 41st repeat carries 60 % of the first one's rate."""
    base = with_values(SimulationSpec(), {"workload.seed": 40})
    sweep = {"axes": {SYSTEM: ("alise",)}, "capacity": CapacitySpec(tolerance=0.002), "base": base}
    ((one,), (other,)) = (
        searched(tmp_path, InProcessPool(fakes.latency), **c) for c in (sweep, {**sweep, "base": SimulationSpec()})
    )
    assert one.capacity is not None
    assert other.capacity is not None
    assert one.capacity.rate_per_s == pytest.approx(3.0, rel=0.01)
    assert other.capacity.rate_per_s == pytest.approx(5.0, rel=0.01)


def test_interrupted_search_repeats_no_run(tmp_path: Path, fakes: Any) -> None:
    runs: list[SimulationSpec] = []

    def stops_after_four(spec: SimulationSpec) -> dict[str, float]:
        if len(runs) == 4:
            raise KeyboardInterrupt
        runs.append(spec)
        metrics: dict[str, float] = fakes.latency(spec)
        return metrics

    def counted(spec: SimulationSpec) -> dict[str, float]:
        runs.append(spec)
        metrics: dict[str, float] = fakes.latency(spec)
        return metrics

    with pytest.raises(KeyboardInterrupt):
        searched(tmp_path / "cut", InProcessPool(stops_after_four))
    resumed = searched(tmp_path / "cut", InProcessPool(counted))
    assert len({spec.digest() for spec in runs}) == len(runs)
    assert resumed == searched(tmp_path / "whole", InProcessPool(fakes.latency))
    assert content(tmp_path / "cut") == content(tmp_path / "whole")


def test_failed_run_ends_its_search_only(tmp_path: Path, fakes: Any) -> None:
    """fcfs and alise both pass 2 on their way up from 1; from 16 down only one of them would."""
    axes = {SYSTEM: ("fcfs", "alise"), "workload.num_requests": (5,)}
    fcfs, alise = searched(tmp_path, InProcessPool(fakes.fails_at_two), axes=axes)
    assert fcfs.error == alise.error == "at 2 requests/s: ArithmeticError: two is too many"
    (fine,) = searched(
        tmp_path, InProcessPool(fakes.fails_at_two), axes={SYSTEM: ("alise",)}, capacity=CapacitySpec(start_per_s=16)
    )
    assert fine.capacity is not None
    assert fine.capacity.found is Found.BRACKET


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"base": with_values(SimulationSpec(), {"workload.arrivals": "closed-loop"})}, SpecError),
        ({"constraints": ("latency_ms=100",)}, ValueError),
        ({"constraints": ("latency<=100",)}, ValueError),
    ],
    ids=["arrivals without a rate", "no comparison", "unknown metric"],
)
def test_senseless_search_is_refused(
    tmp_path: Path, fakes: Any, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"closed-loop|latency"):
        searched(tmp_path, InProcessPool(fakes.latency), **changes)


def test_processes_give_the_same_rows_as_one(tmp_path: Path, fakes: Any) -> None:
    whole, _ = swept(tmp_path / "one", fakes.latency)
    with ProcessPool(fakes.latency, 2) as pool, PointStore(tmp_path / "two") as store:
        assert driver.run_grid(SWEEP, store, pool) == whole
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_worker_that_dies_takes_its_own_point_along_and_no_other(tmp_path: Path, fakes: Any) -> None:
    with ProcessPool(fakes.dies_at_two, 2) as pool, PointStore(tmp_path) as store:
        outcomes = driver.run_grid(SWEEP, store, pool)
    assert [one.outcome.failed for one in outcomes] == [False, True, False, False] * 2
    assert "WorkerDied" in str(outcomes[1].outcome.error)


def test_workers_are_kept_and_are_not_this_process(tmp_path: Path, fakes: Any) -> None:
    sweep = SweepSpec(axes={RATE: RATES})
    with ProcessPool(fakes.process_id, 1) as pool, PointStore(tmp_path) as store:
        outcomes = driver.run_grid(sweep, store, pool)
    pids = {one.outcome.metrics["pid"] for one in outcomes if one.outcome.metrics is not None}
    assert len(pids) == 1
    assert float(os.getpid()) not in pids


def test_what_cannot_be_sent_to_a_worker_fails_its_point(tmp_path: Path) -> None:
    with ProcessPool(lambda spec: {}, 1) as pool, PointStore(tmp_path) as store:
        (one,) = driver.run_grid(SweepSpec(), store, pool)
    assert "pickle" in str(one.outcome.error).lower()


def test_pool_without_places_is_refused(fakes: Any) -> None:
    with pytest.raises(ValueError, match="jobs=0"):
        ProcessPool(fakes.latency, 0)


def test_plan_may_ask_for_a_run_that_another_plan_waits_for(tmp_path: Path) -> None:
    """Both get the outcome of one run."""
    point = Point(values={}, repeat=0, spec=SimulationSpec())
    runs: list[SimulationSpec] = []

    def evaluate(spec: SimulationSpec) -> dict[str, float]:
        runs.append(spec)
        return {"x": 1.0}

    def plan() -> Plan[Outcome]:
        outcome = yield point.spec
        return outcome

    with InProcessPool(evaluate) as pool, PointStore(tmp_path) as store:
        assert run_plans([plan(), plan()], store, pool) == [Outcome(metrics={"x": 1.0})] * 2
    assert len(runs) == 1


def test_points_of_earlier_plans_go_first(tmp_path: Path, fakes: Any) -> None:
    """The second point of the first plan is asked for last of all, and runs before the second plan's."""
    ran: list[float | None] = []

    def noted(spec: SimulationSpec) -> dict[str, float]:
        ran.append(spec.workload.rate_per_s)
        metrics: dict[str, float] = fakes.latency(spec)
        return metrics

    def plan(*rates: float) -> Plan[None]:
        for rate in rates:
            yield with_values(SimulationSpec(), {RATE: rate})

    with InProcessPool(noted) as pool, PointStore(tmp_path) as store:
        run_plans([plan(1.0, 2.0), plan(3.0, 4.0)], store, pool)
    assert ran == [1.0, 2.0, 3.0, 4.0]


def test_failed_point_is_tried_once_though_two_ask_for_it(tmp_path: Path, fakes: Any) -> None:
    bad = with_values(SimulationSpec(), {RATE: 2.0})
    ran: list[SimulationSpec] = []

    def noted(spec: SimulationSpec) -> dict[str, float]:
        ran.append(spec)
        metrics: dict[str, float] = fakes.fails_at_two(spec)
        return metrics

    def second(spec: SimulationSpec) -> Plan[Outcome]:
        yield with_values(SimulationSpec(), {RATE: 1.0})
        return (yield spec)

    with InProcessPool(noted) as pool, PointStore(tmp_path) as store:
        outcomes = run_plans([second(bad), second(bad)], store, pool)
        assert [one.error for one in outcomes] == ["ArithmeticError: two is too many"] * 2
        assert len(ran) == 2
        assert [one.failed for one in run_points([bad, bad], store, pool)] == [True, True]
    assert len(ran) == 3, "a failed point is not stored"
