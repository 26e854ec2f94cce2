"""Sweeps with runs that are plain functions: order, interruption, failures, capacity searches, pools."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.config import ConfigError
from vllm_ext.simulation.spec import SimulationSpec, with_values
from vllm_ext.simulation.sweep import grid
from vllm_ext.simulation.sweep.capacity import CapacitySpec, Found
from vllm_ext.simulation.sweep.grid import RATE, SYSTEM, Point, SweepSpec, expand
from vllm_ext.simulation.sweep.points import Plan, run_plans, run_points
from vllm_ext.simulation.sweep.pools import InProcessPool, Pool, ProcessPool
from vllm_ext.simulation.sweep.store import NAME, Outcome, PointStore

RATES = (1.0, 2.0, 3.0, 4.0)
SWEEP = SweepSpec(axes={SYSTEM: ("fcfs", "alise"), RATE: RATES})
SEARCH = {"axes": {SYSTEM: ("fcfs", "alise")}, "constraints": ("latency_ms<=100",), "capacity": CapacitySpec()}
Evaluate = Callable[[SimulationSpec], dict[str, float]]


def swept(folder: Path, pool: Pool | Evaluate, sweep: SweepSpec = SWEEP) -> tuple[list[Point], list[Any]]:
    """Sweep, in this process with a plain function; return what came out, and system and rate of what was run."""
    ran: list[Any] = []

    def noted(spec: SimulationSpec) -> dict[str, float]:
        metrics = pool(spec)  # type: ignore[operator]
        ran.append((spec.engine.system, spec.workload.rate_per_s))
        return metrics

    with InProcessPool(noted) if callable(pool) else pool as entered, PointStore(folder) as store:
        return grid.run(sweep, store, entered), ran


def content(folder: Path) -> list[tuple[str, ...]]:
    return sqlite3.connect(folder / NAME).execute("select key, spec, metrics from points order by key").fetchall()


def latencies(ran: list[Point]) -> list[float | None]:
    return [None if one.outcome.metrics is None else one.outcome.metrics["latency_ms"] for one in ran]


def at_rates(*rates: float) -> Plan[Outcome]:
    """One run after the other, of which the last counts."""
    for rate in rates:
        outcome = yield with_values(SimulationSpec(), {RATE: rate})
    return outcome


def test_outcomes_come_in_the_order_of_the_points(tmp_path: Path, fakes: Any) -> None:
    outcomes, ran = swept(tmp_path, fakes.latency)
    assert [one.spec for one in outcomes] == [one.spec for one in expand(SWEEP)]
    assert latencies(outcomes) == pytest.approx([100 / 3, 200 / 3, 100, 400 / 3, 20, 40, 60, 80])
    assert ran == [(system, rate) for system in ("fcfs", "alise") for rate in RATES]


@pytest.mark.parametrize("sweep", [SWEEP, SweepSpec(**SEARCH)], ids=["grid", "search"])  # type: ignore[arg-type]
def test_interrupted_sweep_runs_only_what_is_missing_and_ends_with_the_same_rows(
    tmp_path: Path, fakes: Any, sweep: SweepSpec
) -> None:
    whole, all_runs = swept(tmp_path / "whole", fakes.latency, sweep)
    done: list[SimulationSpec] = []

    def interrupted(spec: SimulationSpec) -> dict[str, float]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(spec)
        metrics: dict[str, float] = fakes.latency(spec)
        return metrics

    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path / "cut", interrupted, sweep)
    assert len(content(tmp_path / "cut")) == 3
    resumed, ran = swept(tmp_path / "cut", fakes.latency, sweep)
    assert sorted(ran) == sorted(all_runs[3:])
    assert resumed == whole
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert swept(tmp_path / "cut", fakes.latency, sweep) == (whole, [])


def test_run_that_raises_is_recorded_and_tried_again_next_time(tmp_path: Path, fakes: Any) -> None:
    outcomes, ran = swept(tmp_path, fakes.fails_at_two)
    assert latencies(outcomes)[:4] == [pytest.approx(100 / 3), None, 100, pytest.approx(400 / 3)]
    assert outcomes[1].outcome.error == "ArithmeticError: two is too many"
    assert len(ran) == 6, "the others went on"
    again, ran = swept(tmp_path, fakes.latency)
    assert ran == [("fcfs", 2.0), ("alise", 2.0)]
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

    with InProcessPool(fakes.latency) as pool, PointStore(tmp_path) as store:
        grid.run(SweepSpec(axes={RATE: (1.0, 2.0, 3.0)}), store, pool, note)
    assert told == [(1.0, True), (2.0, True), (3.0, False)]


def test_capacity_of_every_system_and_seed_lies_in_its_bracket(tmp_path: Path, fakes: Any) -> None:
    """The fake latency grows by 1 ms per seed, so that seed 40 carries 60 % of the rate of seed 0."""
    for seed, capacities in ((0, (3.0, 5.0)), (40, (1.8, 3.0))):
        base = with_values(SimulationSpec(), {"workload.seed": seed})
        found, _ = swept(tmp_path, fakes.latency, SweepSpec(**SEARCH, base=base))  # type: ignore[arg-type]
        for one, true in zip(found, capacities, strict=True):
            assert one.capacity is not None
            assert one.capacity.lower is not None
            assert one.capacity.upper is not None
            assert one.capacity.lower.rate_per_s <= true < one.capacity.upper.rate_per_s
            assert one.capacity.upper.violated == ("latency_ms<=100",)


def test_failed_run_ends_its_search_only(tmp_path: Path, fakes: Any) -> None:
    """fcfs passes 2 on its way up from 1; alise starts at 16 and does not."""
    fcfs, alise = (
        swept(tmp_path, fakes.fails_at_two, SweepSpec(**{**SEARCH, "axes": {SYSTEM: (name,)}, "capacity": capacity}))[
            0
        ][0]
        for name, capacity in (("fcfs", CapacitySpec()), ("alise", CapacitySpec(start_per_s=16)))
    )
    assert (fcfs.capacity, fcfs.outcome.error) == (None, "at 2 requests/s: ArithmeticError: two is too many")
    assert alise.capacity is not None
    assert alise.capacity.found is Found.BRACKET


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"base": with_values(SimulationSpec(), {"workload.arrivals": "closed-loop"})}, ConfigError),
        ({"constraints": ("latency_ms=100",)}, ValueError),
        ({"constraints": ("latency<=100",)}, ValueError),
    ],
    ids=["arrivals without a rate", "no comparison", "unknown metric"],
)
def test_senseless_search_is_refused(
    tmp_path: Path, fakes: Any, changes: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"closed-loop|latency"):
        swept(tmp_path, fakes.latency, SweepSpec(**{**SEARCH, **changes}))


def test_processes_give_the_same_rows_as_one_and_are_kept(tmp_path: Path, fakes: Any) -> None:
    whole, _ = swept(tmp_path / "one", fakes.latency)
    assert swept(tmp_path / "two", ProcessPool(fakes.latency, 2))[0] == whole
    assert content(tmp_path / "one") == content(tmp_path / "two")
    outcomes, _ = swept(tmp_path / "pids", ProcessPool(fakes.process_id, 1))
    pids = {one.outcome.metrics["pid"] for one in outcomes if one.outcome.metrics is not None}
    assert len(pids) == 1
    assert float(os.getpid()) not in pids


def test_worker_that_dies_takes_its_own_point_along_and_no_other(tmp_path: Path, fakes: Any) -> None:
    outcomes, _ = swept(tmp_path, ProcessPool(fakes.dies_at_two, 2))
    assert [one.outcome.failed for one in outcomes] == [False, True, False, False] * 2
    assert "WorkerDied" in str(outcomes[1].outcome.error)


def test_what_cannot_be_sent_to_a_worker_fails_its_point(tmp_path: Path) -> None:
    ((one,), _) = swept(tmp_path, ProcessPool(lambda spec: {}, 1), SweepSpec())
    assert "pickle" in str(one.outcome.error).lower()


def test_pool_without_places_is_refused(fakes: Any) -> None:
    with pytest.raises(ValueError, match="jobs=0"):
        ProcessPool(fakes.latency, 0)


def test_points_of_earlier_plans_go_first_and_a_point_of_two_plans_is_run_once(tmp_path: Path, fakes: Any) -> None:
    """The second point of the first plan is asked for last of all, and runs before the second plan's."""
    ran: list[float | None] = []

    def noted(spec: SimulationSpec) -> dict[str, float]:
        ran.append(spec.workload.rate_per_s)
        metrics: dict[str, float] = fakes.latency(spec)
        return metrics

    with InProcessPool(noted) as pool, PointStore(tmp_path) as store:
        first, second, third = run_plans([at_rates(1.0, 2.0), at_rates(3.0, 4.0), at_rates(1.0, 2.0)], store, pool)
    assert ran == [1.0, 2.0, 3.0, 4.0]
    assert first == third != second


def test_failed_point_is_tried_once_though_two_ask_for_it(tmp_path: Path, fakes: Any) -> None:
    bad = with_values(SimulationSpec(), {RATE: 2.0})
    ran: list[SimulationSpec] = []

    def noted(spec: SimulationSpec) -> dict[str, float]:
        ran.append(spec)
        metrics: dict[str, float] = fakes.fails_at_two(spec)
        return metrics

    with InProcessPool(noted) as pool, PointStore(tmp_path) as store:
        for outcome in run_plans([at_rates(1.0, 2.0), at_rates(1.0, 2.0)], store, pool):
            assert outcome.error == "ArithmeticError: two is too many"
        assert len(ran) == 2
        assert [one.failed for one in run_points([bad, bad], store, pool)] == [True, True]
    assert len(ran) == 3, "a failed point is not stored"
