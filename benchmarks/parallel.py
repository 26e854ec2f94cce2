"""Simulations of a benchmark, several at a time. A part of the benchmarks that simulate: nothing is run from here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import TypeVar

from vllm_ext.envs import cache_dir
from vllm_ext.observability.count_progress import CountProgress
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.points import run_points
from vllm_ext.simulation.sweep.pools import local_pool
from vllm_ext.simulation.sweep.store import PointStore

_Job = TypeVar("_Job")


def simulated(
    runs: Mapping[_Job, SimulationSpec], at_a_time: int, *, label: str, named: Callable[[_Job], str]
) -> dict[_Job, Mapping[str, float]]:
    """Return the metrics of each run, simulated unless they are kept from before.

    Args:
        runs: Descriptions by what the benchmark calls them.
        at_a_time: Processes.
        label: Of the progress line.
        named: How a failed run is named.

    Raises:
        SystemExit: runs failed, which are named; the others are kept.
    """
    with (
        PointStore(cache_dir() / "points") as store,
        local_pool(at_a_time) as pool,
        CountProgress(len(runs), label=label, unit="run") as progress,
    ):
        done = count(1)
        outcomes = run_points(
            list(runs.values()), store, pool, lambda spec, *_: progress.update(next(done), spec.engine.system)
        )
    ended = dict(zip(runs, outcomes, strict=True))
    errors = [f"{named(run)}: {outcome.error}" for run, outcome in ended.items() if outcome.failed]
    if errors:
        raise SystemExit("\n".join([*errors, f"{len(errors)} runs failed; the same command goes on with them"]))
    return {run: outcome.metrics or {} for run, outcome in ended.items()}
