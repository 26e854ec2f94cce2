"""What reproductions work with: simulations in parallel, kept on disk, and the rate up to which limits hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from vllm_ext.experiments.data import Files, with_files
from vllm_ext.experiments.grid import Grid, Metrics
from vllm_ext.simulation.measure.run_data import RunData
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.capacity import CapacitySpec, search
from vllm_ext.simulation.sweep.points import OnPoint, Plan, run_plans
from vllm_ext.simulation.sweep.pools import Pool
from vllm_ext.simulation.sweep.sources import loaded_modules
from vllm_ext.simulation.sweep.store import Outcome, PointStore

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Limits = Mapping[str, float]
"""Metric -> the value it must not exceed."""
_LOWEST_PER_S, _HIGHEST_PER_S = 1e-3, 1e4


class RunFailed(RuntimeError):
    """A simulation that a reproduction needs did not end well."""


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """Up to which rate a system keeps limits."""

    rate_per_s: float
    """The highest rate tried at which all hold."""
    limited_by: tuple[str, ...]
    """Metrics beyond their limits at the next rate tried above it."""
    crossing_per_s: float
    """Where the first of these crosses its limit, interpolated between the two rates: its logarithm over the rate."""
    trials: tuple[tuple[float, Metrics], ...]
    """Every rate that was simulated, increasing, with its metrics: the curve."""


class Runner:
    """Runs simulations for one reproduction; whatever ran before is not run again.

    Args:
        quick: Whether short traces are asked for.
        seed: Of every random generator.
        pool: Where simulations run; entered by the caller.
        store: Where their metrics are kept; opened by the caller.
        on_point: Told of every simulation.
        files: Of data sets that are served in place of presets; it tells afterwards which were.
        judged_only: Whether only what claims compare is asked for: curves and rows beside it are of the first seed.
    """

    def __init__(
        self, *, quick: bool, seed: int, pool: Pool, store: PointStore, on_point: OnPoint | None = None,
        files: Files | None = None, judged_only: bool = False,
    ) -> None:  # fmt: skip
        self.quick = quick
        self.judged_only = judged_only
        self.seed = seed
        self.pool = pool
        self.store = store
        self._on_point = on_point
        self.files = files or Files({})

    def metrics(self, specs: Mapping[K, SimulationSpec]) -> dict[K, Metrics]:
        """Simulate, and return the metrics under the same keys.

        Raises:
            RunFailed: simulations raised, which the message names; the others have run and are kept.
        """
        return self._all({key: _one(self._served(spec), str(key)) for key, spec in specs.items()})

    def seeds(self, number: int) -> list[int]:
        """Return so many seeds, one where it must be quick."""
        return [self.seed + at for at in range(1 if self.quick else number)]

    def grid(self, specs: Mapping[tuple[str, str], Callable[[int], SimulationSpec]], seeds: Sequence[int]) -> Grid:
        """Simulate scenes x variants x seeds to their ends.

        Args:
            specs: Scene and variant -> from a seed to the description of the run.
            seeds: The same of all.

        Raises:
            RunFailed: as `metrics`, or requests of a run did not end.
        """
        runs = {f"{', '.join(key)}, seed {seed}": make(seed) for key, make in specs.items() for seed in seeds}
        found = self.metrics(runs)
        if cut := [f"{name}: {number:.0f} requests did not end" for name, one in found.items()
                   if (number := one["unfinished_requests"])]:  # fmt: skip
            raise RunFailed("; ".join(cut))
        return Grid({key: [found[f"{', '.join(key)}, seed {seed}"] for seed in seeds] for key in specs})

    def sustained(
        self,
        specs: Mapping[K, Callable[[float], SimulationSpec]],
        limits: Limits | Callable[[K], Limits],
        *,
        start_per_s: Callable[[K], float],
        tolerance: float,
    ) -> dict[K, Sustained]:
        """Find the rate up to which each system keeps the limits; all searches go on side by side.

        Args:
            specs: From a rate to the description of the run, per system.
            limits: What must hold, of all systems or of each.
            start_per_s: First guess for a system; its search multiplies or divides by 1.6 from there, then bisects.
            tolerance: Relative width of the last bracket.

        Raises:
            RunFailed: a simulation raised, or limits are never met, or always; the other searches have ended.
        """
        plans = {}
        for key, make in specs.items():
            settings = CapacitySpec(
                start_per_s=start_per_s(key),
                min_per_s=_LOWEST_PER_S,
                max_per_s=_HIGHEST_PER_S,
                growth=1.6,
                tolerance=tolerance,
            )
            name = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            plans[key] = _searched(self._serving(make), limits(key) if callable(limits) else limits, settings, name)
        return self._all(plans)

    def run(self, spec: SimulationSpec) -> RunData:
        """Simulate in this process and return all data; not kept on disk."""
        from vllm_ext.simulation.run import simulate

        run = simulate(spec := self._served(spec))
        if self._on_point is not None:
            self._on_point(spec, Outcome(modules=loaded_modules()), False)
        return run

    def _served(self, spec: SimulationSpec) -> SimulationSpec:
        return with_files(spec, self.files)

    def _serving(self, make: Callable[[float], SimulationSpec]) -> Callable[[float], SimulationSpec]:
        return lambda rate: self._served(make(rate))

    def _all(self, plans: Mapping[K, Plan[T]]) -> dict[K, T]:
        """Run plans to their ends, also those beside one that failed; what failed is raised then."""
        ended = run_plans([_to_the_end(plan) for plan in plans.values()], self.store, self.pool, self._on_point)
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


def _searched(
    make: Callable[[float], SimulationSpec], limits: Limits, settings: CapacitySpec, name: str
) -> Plan[Sustained]:
    def violated(metrics: Metrics) -> list[str]:
        return [metric for metric, most in limits.items() if metrics[metric] > most]

    found = yield from search(settings, 1.0, violated, lambda rate: _one(make(rate), f"{name} at {rate:g} requests/s"))
    low, high = found.lower, found.upper
    if low is None or high is None:
        said = " and ".join(f"{metric}<={most:g}" for metric, most in limits.items())
        raise RunFailed(f"{name}: {said} is {found.found.value} between "
                        f"{settings.min_per_s:g} and {settings.max_per_s:g} requests/s")  # fmt: skip
    metric = high.violated[0]
    below, above, limit = (
        math.log(max(one, 1e-9)) for one in (low.metrics[metric], high.metrics[metric], limits[metric])
    )
    share = (limit - below) / (above - below) if above > below else 0.5
    return Sustained(
        rate_per_s=low.rate_per_s,
        limited_by=high.violated,
        crossing_per_s=low.rate_per_s + share * (high.rate_per_s - low.rate_per_s),
        trials=tuple(sorted(((one.rate_per_s, one.metrics) for one in found.trials), key=lambda point: point[0])),
    )


def _checked(outcome: Outcome, name: str) -> Metrics:
    if outcome.metrics is None:
        raise RunFailed(f"{name}: {outcome.error}")
    if failed := outcome.metrics.get("policy_fallbacks"):  # those steps were first come, first served
        raise RunFailed(f"{name}: its policies failed {failed:g} times, so these are not its numbers")
    return outcome.metrics
