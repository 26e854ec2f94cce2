"""Simulations of a benchmark, several at a time. A part of the benchmarks that simulate: nothing is run from here."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from vllm_ext.envs import cache_dir
from vllm_ext.experiments.runner import Metrics, RunFailed, Runner
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.pools import local_pool
from vllm_ext.simulation.sweep.store import PointStore


def finished(runs: Mapping[str, SimulationSpec], at_a_time: int, *, label: str) -> dict[str, Metrics]:
    """Return what `simulated` does, of runs that all requests came through.

    Raises:
        SystemExit: as `simulated`.
        RuntimeError: requests of a run did not end.
    """
    metrics = simulated(runs, at_a_time, label=label)
    for name, found in metrics.items():
        if found["unfinished_requests"]:
            raise RuntimeError(f"{name}: {found['unfinished_requests']:.0f} requests did not end")
    return metrics


def simulated(runs: Mapping[str, SimulationSpec], at_a_time: int, *, label: str) -> dict[str, Metrics]:
    """Return the metrics of each run by its name, simulated unless they are kept from before.

    Raises:
        SystemExit: runs failed, or were not of the system that was asked for; all are named, the others are kept.
    """
    with (
        PointStore(cache_dir() / "points") as store,
        local_pool(at_a_time) as pool,
        CountProgress(len(runs), label=label, unit="run") as progress,
    ):
        done = count(1)

        def on_point(spec: SimulationSpec, *_: object) -> None:
            progress.update(next(done), spec.engine.system)

        try:
            return Runner(quick=False, seed=0, pool=pool, store=store, on_point=on_point).metrics(runs)
        except RunFailed as failed:
            raise SystemExit(f"{failed}; the same command goes on with what failed") from failed
