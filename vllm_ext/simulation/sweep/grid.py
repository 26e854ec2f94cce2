"""Sweeps: every point of a grid, or the capacity of every combination of its values."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_ext.simulation.spec import SimulationSpec, checked, refused, with_values
from vllm_ext.simulation.sweep.capacity import Capacity, CapacitySpec, Constraint, Metrics, search
from vllm_ext.simulation.sweep.points import OnPoint, Plan, run_plans
from vllm_ext.simulation.sweep.pools import Pool
from vllm_ext.simulation.sweep.store import Outcome, PointStore

RATE = "workload.rate_per_s"
SEED = "workload.seed"
SYSTEM = "engine.system"


class SweepSpec(BaseModel):
    """Every combination of the axes' values, each repeated with other seeds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: SimulationSpec = SimulationSpec()
    """What the axes do not set."""
    axes: dict[str, tuple[Any, ...]] = Field(default_factory=dict)
    """Dotted path -> values, as ``{"engine.system": ["fcfs", "alise"]}``; the last axis varies fastest."""
    repeats: int = Field(default=1, ge=1)
    """Runs of every combination; run k has ``workload.seed`` + k, the same for all combinations."""
    constraints: tuple[str, ...] = ()
    """What a point should meet, as ``tbt_p99_ms<=100``; a capacity search finds the highest rate that meets them."""
    capacity: CapacitySpec | None = None
    """Search the highest rate per combination instead of running one rate."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One combination of the axes' values and one repeat, and what came of it."""

    values: Mapping[str, Any]
    """Dotted path -> value, in the order of the axes."""
    spec: SimulationSpec
    """What is run; of a capacity search, with the rate that is tried first."""
    outcome: Outcome = field(default_factory=Outcome)
    """Of the run; of a capacity search, of its last run."""
    capacity: Capacity | None = None
    """What was searched; None if a run failed."""


def expand(sweep: SweepSpec) -> list[Point]:
    """Return the points of a sweep: the last axis varies fastest but for the repeats.

    Raises:
        ConfigError: an axis is unknown, empty, names a value twice, or clashes with the repeats or the capacity search;
            or a combination is not allowed. The message names the path, the value and what is allowed.
        ValueError: a constraint cannot be read.
    """
    _check(sweep)
    points = []
    for combination in itertools.product(*sweep.axes.values()):
        values = dict(zip(sweep.axes, combination, strict=True))
        spec = with_values(sweep.base, values)
        for repeat in range(sweep.repeats):
            seeded = with_values(spec, {SEED: spec.workload.seed + repeat}) if repeat else spec
            points.append(Point(values=values, spec=checked(seeded)))
    return points


def run(sweep: SweepSpec, store: PointStore, pool: Pool, on_point: OnPoint | None = None) -> list[Point]:
    """Run every point that is not stored yet, or search the capacity of every one; searches run side by side.

    Returns:
        The points in the order of `expand`, failed ones included.

    Raises:
        ConfigError: the sweep is not allowed, or a search's arrivals do not follow a rate; nothing was run.
        ValueError: a constraint cannot be read, or names a metric that the runs do not have.
    """
    constraints = [Constraint.parse(text) for text in sweep.constraints]
    points = expand(sweep)
    if sweep.capacity is None:
        return run_plans([_run(point) for point in points], store, pool, on_point)
    for point in points:
        if (arrivals := point.spec.workload.arrivals) in ("closed-loop", "at-once"):
            allowed = "a capacity search varies workload.rate_per_s, which these arrivals do not follow"
            raise refused("workload.arrivals", arrivals, allowed)

    def violated(metrics: Metrics) -> list[str]:
        return [str(constraint) for constraint in constraints if not constraint.meets(metrics)]

    return run_plans([_search(sweep.capacity, point, violated) for point in points], store, pool, on_point)


def _check(sweep: SweepSpec) -> None:
    for text in sweep.constraints:
        Constraint.parse(text)
    for path, values in sweep.axes.items():
        if not values:
            raise refused(path, list(values), "an axis needs at least one value")
        if twice := [value for index, value in enumerate(values) if value in values[:index]]:
            raise refused(path, twice[0], "is given twice; name every value once")
        for value in values:
            with_values(sweep.base, {path: value})
        if outer := [other for other in sweep.axes if path.startswith(f"{other}.")]:
            raise refused(path, list(values), f"lies within the axis {outer[0]}; use one of the two")
    if SEED in sweep.axes and sweep.repeats > 1:
        raise refused("repeats", sweep.repeats, f"must be 1 where {SEED} is an axis")
    if sweep.capacity is not None and RATE in sweep.axes:
        raise refused(RATE, list(sweep.axes[RATE]), "can't be an axis of a capacity search, which varies it itself")
    if sweep.capacity is not None and not sweep.constraints:
        raise refused("constraints", [], "a capacity search needs at least one, such as tbt_p99_ms<=100")


def _run(point: Point) -> Plan[Point]:
    return replace(point, outcome=(yield point.spec))


def _search(settings: CapacitySpec, point: Point, violated: Callable[[Metrics], list[str]]) -> Plan[Point]:
    def at(rate: float) -> Plan[Metrics]:
        outcome = yield checked(with_values(point.spec, {RATE: rate}))
        if outcome.metrics is None:
            raise _Failed(f"at {rate:g} requests/s: {outcome.error}")
        return outcome.metrics

    try:
        found = yield from search(settings, point.spec.workload.rate_per_s or 1.0, violated, at)
    except _Failed as failed:
        return replace(point, outcome=Outcome(error=str(failed)))
    return replace(point, outcome=Outcome(metrics=found.trials[-1].metrics), capacity=found)


class _Failed(Exception):
    """A run of a search failed."""
