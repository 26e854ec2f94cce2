"""Runs of a benchmark in several processes. A part of the benchmarks that simulate: nothing is run from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from vllm_ext.observability.count_progress import CountProgress

_Job = TypeVar("_Job")
_Found = TypeVar("_Found")


def in_processes(
    run: Callable[[_Job], _Found], jobs: Sequence[_Job], at_a_time: int, *, label: str, named: Callable[[_Job], str]
) -> dict[_Job, _Found]:
    """Return what ``run`` returns for each job, so many at a time, and show which is done.

    Args:
        run: A function of a module, which other processes can import.
        jobs: What it is called with; hashable, each once.
        at_a_time: Processes.
        label: Of the progress line.
        named: What the progress line says of a job.
    """
    found: dict[_Job, _Found] = {}
    # Spawned: a fork would inherit the threads that numpy and torch have started.
    with (
        ProcessPoolExecutor(at_a_time, mp_context=get_context("spawn")) as pool,
        CountProgress(len(jobs), label=label, unit="run") as progress,
    ):
        for number, (job, result) in enumerate(zip(jobs, pool.map(run, jobs), strict=True), start=1):
            found[job] = result
            progress.update(number, named(job))
    return found
