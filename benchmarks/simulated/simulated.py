"""How a question is put to the simulator from the command line. A part of the benchmarks that simulate."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from vllm_ext.envs import cache_dir
from vllm_ext.experiments.experiment import Experiment
from vllm_ext.experiments.report import result, tables
from vllm_ext.experiments.runner import RunFailed, Runner
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.report.results import argument_parser, command, emit
from vllm_ext.simulation.cost.spec import HardwareSpec
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
    finish(experiment, argument_parser(module.__doc__, "jobs").parse_args(argv), command(argv, module.__file__ or ""))


def finish(experiment: Experiment, args: argparse.Namespace, said: str) -> None:
    """Simulate, print, write.

    Args:
        experiment: What is run.
        args: Of `argument_parser`.
        said: The command line that repeats it.
    """
    with runner(args, experiment.id) as simulations:
        findings = experiment.run(simulations)
    made = result(experiment, findings, command=said, seed=args.seed, quick=args.quick)
    emit(made, tables(experiment, findings), args.out)


def add_cells(parser: argparse.ArgumentParser, cells: Iterable[str]) -> None:
    """Add the flags of a benchmark that serves recorded workloads on devices."""
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder of recorded workloads")
    parser.add_argument("--cells", help=f"semicolon list of {'; '.join(cells)} (default: all)")


def chosen_cells(
    parser: argparse.ArgumentParser, args: argparse.Namespace, files: Mapping[str, Iterable[str]], quick: Iterable[str]
) -> list[str]:
    """Return the cells that were asked for, of which all files are there.

    Args:
        parser: Tells what is wrong, and ends the process.
        args: What it found.
        files: By cell, what it needs below the folder of data.
        quick: The cells of a quick run.
    """
    asked = [one.strip() for one in args.cells.split(";")] if args.cells else list(quick if args.quick else files)
    for name in asked:
        if name not in files:
            parser.error(f"--cells={name}: must be among {'; '.join(files)}")
        if missing := [file for file in files[name] if not (args.data / file).is_file()]:
            parser.error(f"--data={args.data}: has no {missing[0]}, which {name} needs")
    return asked


def vllm_as_it_comes(hardware: HardwareSpec, max_model_len: int, workload: Mapping[str, Any]) -> SimulationSpec:
    """Return a run of vLLM with its own defaults for the device."""
    engine = {"system": "upstream-fcfs", "max_model_len": max_model_len, "profiled": True}
    return SimulationSpec.model_validate({"engine": engine, "hardware": hardware.model_dump(), "workload": workload})
