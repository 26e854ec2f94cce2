"""Sweeps: every point of a grid, or the capacity of every combination."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_ext.simulation.constraint import Constraint
from vllm_ext.simulation.sweep.capacity import Capacity, Metrics, search
from vllm_ext.simulation.sweep.grid import RATE, Point, SweepSpec, expand
from vllm_ext.simulation.sweep.paths import SpecError, checked, with_values
from vllm_ext.simulation.sweep.points import OnPoint, Plan, run_plans, run_points
from vllm_ext.simulation.sweep.pools import Pool
from vllm_ext.simulation.sweep.store import Outcome, PointStore

_WITHOUT_RATE = ("closed-loop", "at-once")


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A point of a grid and how its run ended."""

    point: Point
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Searched:
    """A combination, and the capacity that was found for it."""

    point: Point
    """With the rate that was tried first."""
    capacity: Capacity | None
    """None if a run failed."""
    error: str | None = None
    """What the failed run raised."""


def run_grid(sweep: SweepSpec, store: PointStore, pool: Pool, on_point: OnPoint | None = None) -> list[Ran]:
    """Run every point that is not stored yet.

    Returns:
        The points in the order of `expand`, failed ones included.

    Raises:
        SpecError: the sweep is not allowed; nothing was run.
    """
    points = expand(sweep)
    outcomes = run_points([point.spec for point in points], store, pool, on_point)
    return [Ran(point=point, outcome=outcome) for point, outcome in zip(points, outcomes, strict=True)]


def run_capacity(sweep: SweepSpec, store: PointStore, pool: Pool, on_point: OnPoint | None = None) -> list[Searched]:
    """Search the capacity of every combination and repeat; searches run side by side.

    Raises:
        SpecError: the sweep is not allowed, or the workload's arrivals do not follow a rate; nothing was run.
        ValueError: a constraint cannot be read, or names a metric that the runs do not have.
    """
    constraints = [Constraint.parse(text) for text in sweep.constraints]
    points = expand(sweep)
    for point in points:
        if (arrivals := point.spec.workload.arrivals) in _WITHOUT_RATE:
            allowed = "a capacity search varies workload.rate_per_s, which these arrivals do not follow"
            raise SpecError("workload.arrivals", arrivals, allowed)

    def violated(metrics: Metrics) -> list[str]:
        return [str(constraint) for constraint in constraints if not constraint.meets(metrics)]

    return run_plans([_search(sweep, point, violated) for point in points], store, pool, on_point)


def _search(sweep: SweepSpec, point: Point, violated: Callable[[Metrics], list[str]]) -> Plan[Searched]:
    """Turn rates into descriptions and outcomes into metrics, until the search or a run ends."""
    if sweep.capacity is None:
        raise SpecError("capacity", None, "must be given for a capacity search")
    rates = search(sweep.capacity, point.spec.workload.rate_per_s or 1.0, violated)
    rate = next(rates)
    while True:
        outcome = yield checked(with_values(point.spec, {RATE: rate}))
        if outcome.metrics is None:
            return Searched(point=point, capacity=None, error=f"at {rate:g} requests/s: {outcome.error}")
        try:
            rate = rates.send(outcome.metrics)
        except StopIteration as stop:
            return Searched(point=point, capacity=stop.value)
