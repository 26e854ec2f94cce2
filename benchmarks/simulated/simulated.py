"""How a question is put to the simulator from the command line. A part of the benchmarks that simulate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from vllm_ext.envs import cache_dir
from vllm_ext.experiments.experiment import Experiment
from vllm_ext.experiments.report import result, tables
from vllm_ext.experiments.runner import RunFailed, Runner
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.report.results import argument_parser, command, emit
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.pools import local_pool
from vllm_ext.simulation.sweep.store import PointStore


@contextmanager
def runner(args: argparse.Namespace, label: str) -> Iterator[Runner]:
    """Run what is not kept from before, and tell how far that is.

    Raises:
        SystemExit: runs failed, or were not of the system that was asked for; all are named, the others are kept.
    """
    with (
        PointStore(cache_dir() / "points") as store,
        local_pool(args.jobs) as pool,
        CountProgress(None, label=label, unit="run") as progress,
    ):
        done = count(1)

        def on_point(spec: SimulationSpec, *_: object) -> None:
            progress.update(next(done), spec.engine.system)

        try:
            yield Runner(quick=args.quick, seed=args.seed, pool=pool, store=store, on_point=on_point)
        except RunFailed as failed:
            raise SystemExit(f"{failed}; the same command goes on with what failed") from failed


def main(experiment: Experiment, argv: Sequence[str]) -> None:
    """Simulate, print, write: what a benchmark does that has no options of its own."""
    module = sys.modules[experiment.run.__module__]
    args = argument_parser(module.__doc__, "jobs").parse_args(argv)
    with runner(args, experiment.id) as simulations:
        findings = experiment.run(simulations)
    said = command(argv, module.__file__ or "")
    emit(
        result(experiment, findings, command=said, seed=args.seed, quick=args.quick),
        tables(experiment, findings),
        args.out,
    )
