"""What reproductions work with: simulations in parallel, kept on disk, and the rate at which a limit is crossed."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from vllm_ext.simulation.run_data import RunData
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.capacity import Capacity, CapacitySpec, Found, search
from vllm_ext.simulation.sweep.points import OnPoint, Plan, run_plans
from vllm_ext.simulation.sweep.pools import Pool
from vllm_ext.simulation.sweep.store import Outcome, PointStore

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Metrics = Mapping[str, float]


class RunFailed(RuntimeError):
    """A simulation that a reproduction needs did not end well."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A metric and the value it must not exceed."""

    metric: str
    value: float


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """Where a metric crosses its limit as the rate grows."""

    rate_per_s: float
    """Interpolated between the two rates next to it: logarithm of the metric over the rate."""
    trials: tuple[tuple[float, Metrics], ...]
    """Every rate that was simulated, increasing, with its metrics: the curve."""


class Bench:
    """Runs simulations for one reproduction; whatever ran before is not run again.

    Args:
        quick: Whether short traces are asked for.
        seed: Of every random generator.
        pool: Where simulations run; entered by the caller.
        store: Where their metrics are kept; opened by the caller.
        on_point: Told of every simulation.
    """

    def __init__(
        self, *, quick: bool, seed: int, pool: Pool, store: PointStore, on_point: OnPoint | None = None
    ) -> None:
        self.quick = quick
        self.seed = seed
        self._pool = pool
        self._store = store
        self._on_point = on_point

    def metrics(self, specs: Mapping[K, SimulationSpec]) -> dict[K, Metrics]:
        """Simulate, and return the metrics under the same keys.

        Raises:
            RunFailed: simulations raised, which the message names; the others have run and are kept.
        """
        return self._all({key: _one(spec, str(key)) for key, spec in specs.items()})

    def crossings(
        self,
        specs: Mapping[K, Callable[[float], SimulationSpec]],
        limit: Limit,
        *,
        start_per_s: Mapping[K, float],
        tolerance: float,
        min_per_s: float = 1e-3,
        max_per_s: float = 1e4,
    ) -> dict[K, Crossing]:
        """Find the rate at which each system's metric reaches the limit.

        Args:
            specs: From a rate to the description of the run, per system.
            limit: What must hold.
            start_per_s: First guess per system; each search doubles or halves from there, then bisects.
            tolerance: Relative width of the last bracket.
            min_per_s: A limit not met even at this rate is an error.
            max_per_s: A limit met even at this rate is an error.

        Raises:
            RunFailed: a simulation raised, or no rate within the bounds crosses the limit; the others have run.
        """
        plans = {}
        for key, make in specs.items():
            settings = CapacitySpec(
                start_per_s=start_per_s[key],
                min_per_s=min_per_s,
                max_per_s=max_per_s,
                growth=1.6,
                tolerance=tolerance,
            )
            plans[key] = _cross(make, limit, settings, str(key))
        return self._all(plans)

    def run(self, spec: SimulationSpec) -> RunData:
        """Simulate in this process and return all data; not kept on disk."""
        from vllm_ext.simulation.run import simulate

        return simulate(spec)

    def _all(self, plans: Mapping[K, Plan[T]]) -> dict[K, T]:
        """Run plans to their ends, also those beside one that failed; what failed is raised then."""
        ended = run_plans([_to_the_end(plan) for plan in plans.values()], self._store, self._pool, self._on_point)
        if failed := [str(one) for one in ended if isinstance(one, RunFailed)]:
            raise RunFailed("; ".join(failed))
        return {key: one for key, one in zip(plans, ended, strict=True) if not isinstance(one, RunFailed)}


def _to_the_end(plan: Plan[T]) -> Plan[T | RunFailed]:
    try:
        return (yield from plan)
    except RunFailed as failed:
        return failed


def _one(spec: SimulationSpec, name: str) -> Plan[Metrics]:
    return _checked((yield spec), name)


def _cross(make: Callable[[float], SimulationSpec], limit: Limit, settings: CapacitySpec, name: str) -> Plan[Crossing]:
    rates = search(settings, 1.0, lambda m: [limit.metric] if m[limit.metric] > limit.value else [])
    found = yield from _searched(rates, make, name)
    if found.found is not Found.BRACKET or found.lower is None or found.upper is None:
        raise RunFailed(f"{name}: {limit.metric}<={limit.value:g} is {found.found.value} between "
                        f"{settings.min_per_s:g} and {settings.max_per_s:g} requests/s")  # fmt: skip
    low, high = found.lower, found.upper
    below, above = (math.log(end.metrics[limit.metric]) for end in (low, high))
    share = (math.log(limit.value) - below) / (above - below) if above > below else 0.5
    curve = sorted(((trial.rate_per_s, trial.metrics) for trial in found.trials), key=lambda point: point[0])
    return Crossing(rate_per_s=low.rate_per_s + share * (high.rate_per_s - low.rate_per_s), trials=tuple(curve))


def _searched(
    rates: Generator[float, Metrics, Capacity], make: Callable[[float], SimulationSpec], name: str
) -> Generator[SimulationSpec, Outcome, Capacity]:
    rate = next(rates)
    while True:
        metrics = _checked((yield make(rate)), f"{name} at {rate:g} requests/s")
        try:
            rate = rates.send(metrics)
        except StopIteration as stop:
            found: Capacity = stop.value
            return found


def _checked(outcome: Outcome, name: str) -> Metrics:
    if outcome.metrics is None:
        raise RunFailed(f"{name}: {outcome.error}")
    if failed := outcome.metrics.get("policy_fallbacks"):  # those steps were first come, first served
        raise RunFailed(f"{name}: its policies failed {failed:g} times, so these are not its numbers")
    return outcome.metrics
