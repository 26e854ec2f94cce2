"""Runs a sweep: hands points to a pool, keeps what is done, and lets searches ask for more."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vllm_ext.simulation.constraint import Constraint
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.capacity import Capacity, Metrics, search
from vllm_ext.simulation.sweep.grid import RATE, Point, SweepSpec, expand
from vllm_ext.simulation.sweep.paths import SpecError, checked, with_values
from vllm_ext.simulation.sweep.pools import Pool
from vllm_ext.simulation.sweep.store import Outcome, PointStore

T = TypeVar("T")
Plan = Generator[SimulationSpec, Outcome, T]
"""Asks for one run after the other, and returns what it makes of them. Equal outcomes give equal requests."""
OnPoint = Callable[[SimulationSpec, Outcome, bool], None]
"""Called for every outcome that a plan gets; the last argument says whether it was there already."""

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


@dataclass
class _State(Generic[T]):
    plans: Sequence[Plan[T]]
    results: list[T | None]
    ready: deque[tuple[int, Outcome | None]]
    """Plans that can go on, with the outcome they asked for."""
    waiting: dict[str, list[int]] = field(default_factory=dict)
    """Key of a point -> plans that asked for it."""
    queue: deque[tuple[str, SimulationSpec]] = field(default_factory=deque)
    """Points that no worker has yet."""


def run_grid(sweep: SweepSpec, pool: Pool, store: PointStore, on_point: OnPoint | None = None) -> list[Ran]:
    """Run every point that is not stored yet.

    Returns:
        The points in the order of `expand`, failed ones included.

    Raises:
        SpecError: the sweep is not allowed; nothing was run.
    """
    return drive([_single(point) for point in expand(sweep)], pool, store, on_point)


def run_capacity(sweep: SweepSpec, pool: Pool, store: PointStore, on_point: OnPoint | None = None) -> list[Searched]:
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

    return drive([_search(sweep, point, violated) for point in points], pool, store, on_point)


def drive(plans: Sequence[Plan[T]], pool: Pool, store: PointStore, on_point: OnPoint | None = None) -> list[T]:
    """Run plans side by side on a pool; a point that two plans ask for at a time is run once.

    Stored points are not run again unless they failed. An exception, Ctrl-C included, leaves what is done in the store.

    Returns:
        What the plans returned, in their order.
    """
    state: _State[T] = _State(plans, [None] * len(plans), deque((index, None) for index in range(len(plans))))
    running: dict[Future[Outcome], tuple[str, SimulationSpec]] = {}
    retried: dict[str, Outcome] = {}
    while state.ready or state.queue or running:
        while state.ready:
            index, outcome = state.ready.popleft()
            _advance(state, index, outcome, store, retried, on_point)
        while state.queue and len(running) < pool.places:
            key, spec = state.queue.popleft()
            running[pool.submit(spec)] = (key, spec)
        for future in wait(running, return_when=FIRST_COMPLETED).done if running else ():
            key, spec = running.pop(future)
            outcome = future.result()
            store.save(key, spec, outcome)
            if outcome.failed:
                retried[key] = outcome
            for place, index in enumerate(state.waiting.pop(key)):
                state.ready.append((index, outcome))
                if on_point is not None:
                    on_point(spec, outcome, place > 0)
    return [result for result in state.results if result is not None]


def _advance(
    state: _State[T],
    index: int,
    outcome: Outcome | None,
    store: PointStore,
    retried: dict[str, Outcome],
    on_point: OnPoint | None,
) -> None:
    """Let a plan go on until it wants a run that is not stored, or ends."""
    while True:
        try:
            plan = state.plans[index]
            spec = next(plan) if outcome is None else plan.send(outcome)
        except StopIteration as stop:
            state.results[index] = stop.value
            return
        key = store.key(spec)
        if key in state.waiting:
            state.waiting[key].append(index)
            return
        outcome = retried.get(key) or store.load(key)
        if outcome is None or (outcome.failed and key not in retried):
            state.waiting[key] = [index]
            state.queue.append((key, spec))
            return
        if on_point is not None:
            on_point(spec, outcome, True)


def _single(point: Point) -> Plan[Ran]:
    outcome = yield point.spec
    return Ran(point=point, outcome=outcome)


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
