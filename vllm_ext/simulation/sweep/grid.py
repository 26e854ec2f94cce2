"""A sweep, as data: a base description, the fields that vary, and the order of the points."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.capacity import CapacitySpec
from vllm_ext.simulation.sweep.paths import SpecError, checked, with_values

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
    """One combination of the axes' values and one repeat."""

    values: Mapping[str, Any]
    """Dotted path -> value, in the order of the axes."""
    repeat: int
    """Counted from 0."""
    spec: SimulationSpec
    """What is run."""


def expand(sweep: SweepSpec) -> list[Point]:
    """Return the points of a sweep: the last axis varies fastest but for the repeats.

    Raises:
        SpecError: an axis is unknown, empty, names a value twice, or clashes with the repeats or the capacity search;
            or a combination is not allowed. The message names the path, the value and what is allowed.
    """
    _check_axes(sweep)
    points = []
    for combination in itertools.product(*sweep.axes.values()):
        values = dict(zip(sweep.axes, combination, strict=True))
        spec = with_values(sweep.base, values)
        for repeat in range(sweep.repeats):
            seeded = with_values(spec, {SEED: spec.workload.seed + repeat}) if repeat else spec
            points.append(Point(values=values, repeat=repeat, spec=checked(seeded)))
    return points


def _check_axes(sweep: SweepSpec) -> None:
    for path, values in sweep.axes.items():
        if not values:
            raise SpecError(path, list(values), "an axis needs at least one value")
        if twice := [value for index, value in enumerate(values) if value in values[:index]]:
            raise SpecError(path, twice[0], "is given twice; name every value once")
        for value in values:
            with_values(sweep.base, {path: value})
    nested = [(a, b) for a, b in itertools.permutations(sweep.axes, 2) if b.startswith(f"{a}.")]
    for outer, inner in nested:
        raise SpecError(inner, list(sweep.axes[inner]), f"lies within the axis {outer}; use one of the two")
    if SEED in sweep.axes and sweep.repeats > 1:
        raise SpecError("repeats", sweep.repeats, f"must be 1 where {SEED} is an axis")
    if sweep.capacity is not None and RATE in sweep.axes:
        raise SpecError(RATE, list(sweep.axes[RATE]), "can't be an axis of a capacity search, which varies it itself")
    if sweep.capacity is not None and not sweep.constraints:
        raise SpecError("constraints", [], "a capacity search needs at least one, such as tbt_p99_ms<=100")
