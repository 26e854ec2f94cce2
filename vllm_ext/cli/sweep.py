"""`vllm-ext sweep`: a grid of simulations, or the capacity of every combination; resumable, over processes or Ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ext.cli import simulate, spec_flags
from vllm_ext.cli.spec_flags import UsageError
from vllm_ext.observability import json_output

if TYPE_CHECKING:
    from vllm_ext.observability.count_progress import CountProgress
    from vllm_ext.observability.results import Result
    from vllm_ext.simulation.constraint import Constraint
    from vllm_ext.simulation.requests import Workload as Described
    from vllm_ext.simulation.spec import SimulationSpec
    from vllm_ext.simulation.sweep.driver import Ran, Searched
    from vllm_ext.simulation.sweep.grid import SweepSpec
    from vllm_ext.simulation.sweep.pools import Pool
    from vllm_ext.simulation.sweep.store import Outcome

PROG = "vllm-ext sweep"
DESCRIPTION = "sweep.json"
"""In the sweep's folder: what is swept, so that ``--dir`` alone goes on with it."""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, 1 if a run failed, 2 if a flag, a field or a file is wrong, 130 after Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        sweep = _sweep(args)
        if args.print_spec:
            print(sweep.model_dump_json(indent=1, exclude_unset=True))
            return 0
        return _run(args, sweep)
    except (ValueError, OSError, ImportError) as error:
        return spec_flags.complain(PROG, error)
    except KeyboardInterrupt:
        print(f"\n{PROG}: interrupted; {_again(args.dir)}", file=sys.stderr)
        return 130


def make_pool(args: argparse.Namespace) -> Pool:
    """Return the pool that the flags ask for."""
    if args.ray is not None:
        from vllm_ext.cluster.ray_pool import RayPool
        from vllm_ext.simulation.sweep.evaluate import simulate_point

        return RayPool(simulate_point, address=args.ray, jobs=args.jobs)
    from vllm_ext.simulation.sweep.pools import local_pool

    return local_pool(1 if args.jobs is None else args.jobs)


def _run(args: argparse.Namespace, sweep: SweepSpec) -> int:
    from vllm_ext.observability import results
    from vllm_ext.observability.count_progress import CountProgress
    from vllm_ext.observability.files import replaced
    from vllm_ext.simulation.constraint import Constraint
    from vllm_ext.simulation.sweep import driver, summary
    from vllm_ext.simulation.sweep.grid import expand
    from vllm_ext.simulation.sweep.store import PointStore

    constraints = [Constraint.parse(text) for text in sweep.constraints]
    num_points = len(expand(sweep))  # a wrong sweep is refused before anything is written, as is a missing file:
    workload = simulate.describe(sweep.base)
    store = PointStore(args.dir)
    with store.locked(), store:
        with replaced(args.dir / DESCRIPTION) as file:
            file.write(sweep.model_dump_json(indent=1, exclude_unset=True).encode() + b"\n")
        expected = _expected_runs(sweep, num_points)
        progress = CountProgress(expected, label="sweep", unit="run", quiet=args.quiet)
        with make_pool(args) as pool, progress:
            counts = _Counts(expected, progress)
            run = driver.run_grid if sweep.capacity is None else driver.run_capacity
            outcomes: Any = run(sweep, store, pool, counts.update)
        is_grid = sweep.capacity is None
        rows = summary.grid_rows(outcomes, constraints) if is_grid else summary.capacity_rows(outcomes)
        summary.write_csv(rows, args.dir / "summary.csv")
        _plot(args, outcomes, constraints, is_grid)
        result = _result(args.dir, sweep, rows, workload, num_points)
        tables = [] if args.quiet else [summary.table(rows)]
        results.emit(result, tables, args.dir / "summary.json", as_json=args.json)
    if not args.quiet:
        print(f"{counts.computed} runs computed, {counts.reused} found in {args.dir}", file=sys.stderr)
    return _report_failures(args.dir, outcomes)


def _plot(
    args: argparse.Namespace,
    outcomes: Sequence[Ran] | Sequence[Searched],
    constraints: Sequence[Constraint],
    grid: bool,
) -> None:
    """Draw the metric asked for; else the one of the first constraint in a capacity search, else the latency."""
    from vllm_ext.simulation.sweep import summary

    metric = args.metric or (summary.METRIC if grid else constraints[0].metric)
    path = args.plot or args.dir / "plot.png"
    try:
        drawn = summary.plot(outcomes, constraints, metric, path)
    except ImportError as error:
        print(f"no plot: {error}; pip install 'vllm-ext[bench]'", file=sys.stderr)
        return
    if not drawn and (args.metric or args.plot):
        print(f"no plot: no axis of numbers, or no run has the metric {metric}", file=sys.stderr)


def _result(
    folder: Path, sweep: SweepSpec, rows: Sequence[dict[str, Any]], workload: Described, num_points: int
) -> Result:
    """The same for a sweep that was interrupted as for one that was not: its command names the description kept."""
    from vllm_ext.observability.results import Result, Workload
    from vllm_ext.simulation.sweep.summary import CAPACITY

    metrics = {"points": float(num_points), "failed_points": float(sum(row["failed"] for row in rows))}
    for row in rows:
        if CAPACITY in row:
            named = ",".join(f"{path}={row[path]}" for path in sweep.axes)
            metrics[f"{named}.{CAPACITY}" if named else CAPACITY] = row[CAPACITY]
    return Result(
        name="sweep",
        command=spec_flags.command_line(PROG, ["--sweep", f"{folder.name}/{DESCRIPTION}", "--dir", folder.name]),
        config={
            "sweep": spec_flags.public(sweep.model_dump(mode="json")),
            "rows": spec_flags.public(
                [{key: value for key, value in row.items() if value is not None} for row in rows]
            ),
        },
        seed=sweep.base.workload.seed,
        workload=Workload(name=Path(workload.name).name, rows=workload.rows, sha256=workload.sha256),
        metrics=metrics,
    )


def _report_failures(folder: Path, outcomes: Sequence[Ran] | Sequence[Searched]) -> int:
    """Say what failed; return the exit status."""
    errors = [(one.point.values, error) for one in outcomes if (error := _error(one)) is not None]
    for values, error in errors:
        print(f"{PROG}: failed: {dict(values)}: {' '.join(error.split())}", file=sys.stderr)
    if errors:
        print(f"{PROG}: {len(errors)} failed; {_again(folder)}", file=sys.stderr)
    return 1 if errors else 0


def _error(one: Ran | Searched) -> str | None:
    from vllm_ext.simulation.sweep.driver import Ran

    return one.outcome.error if isinstance(one, Ran) else one.error


def _again(folder: Path) -> str:
    return f"what is done is kept, `{PROG} --dir {folder}` goes on with the rest"


def _expected_runs(sweep: SweepSpec, num_points: int) -> int:
    from vllm_ext.simulation.sweep.capacity import expected_runs

    return num_points * (1 if sweep.capacity is None else expected_runs(sweep.capacity))


class _Counts:
    """Runs computed and found, told to a progress line; what was there already does not count for the time left."""

    def __init__(self, expected: int, progress: CountProgress) -> None:
        self.computed = self.reused = 0
        self._expected = expected
        self._progress = progress

    def update(self, spec: SimulationSpec, outcome: Outcome, reused: bool) -> None:  # noqa: ARG002 - what a sweep tells
        self.reused += reused
        self.computed += not reused
        self._progress.update(self.computed, total=self._expected - self.reused)


def _sweep(args: argparse.Namespace) -> SweepSpec:
    """Return what to sweep: that of ``--sweep``, the flags, or the folder's if there are neither."""
    from vllm_ext.simulation.sweep import paths
    from vllm_ext.simulation.sweep.grid import SYSTEM, SweepSpec

    flags = spec_flags.given(args)
    described = args.spec or args.sweep or args.systems or args.axis or args.repeats or args.constraint or args.capacity
    if not described and not flags and (kept := args.dir / DESCRIPTION).is_file():
        return paths.parse(SweepSpec, spec_flags.read_json(kept, "--dir"))
    if args.sweep is not None and args.spec is not None:
        raise UsageError(f"--spec {args.spec}: must not be used with --sweep, which has a base of its own")
    start = SweepSpec() if args.sweep is None else paths.parse(SweepSpec, spec_flags.read_json(args.sweep, "--sweep"))
    base = spec_flags.base_spec(args) if args.sweep is None else paths.with_values(start.base, flags)
    axes = {**start.axes, **_axes(args.axis)}
    if args.systems is not None:
        systems = spec_flags.systems_of(args, base)
        if len(systems) == 1:
            base = paths.with_values(base, {SYSTEM: systems[0]})
        else:
            axes = {SYSTEM: systems, **{path: values for path, values in axes.items() if path != SYSTEM}}
    data = start.model_dump(mode="json", exclude_unset=True)
    data |= {"base": base.model_dump(mode="json", exclude_unset=True), "axes": axes}
    if args.repeats is not None:
        data["repeats"] = args.repeats
    if args.constraint:
        data["constraints"] = args.constraint
    data |= _capacity(args, data)
    sweep = paths.parse(SweepSpec, data)
    if not sweep.axes and sweep.capacity is None and sweep.repeats == 1:
        raise UsageError("nothing to sweep: give --axis PATH=A,B, several systems, --repeats or --capacity")
    return sweep


def _axes(texts: Sequence[str]) -> dict[str, list[Any]]:
    axes: dict[str, list[Any]] = {}
    for text in texts:
        path, equals, values = text.partition("=")
        if not path or not equals or not values or path in axes:
            raise UsageError(f"--axis {text}: must be PATH=A,B,... or PATH=[JSON, ...], every path once")
        whole = spec_flags.json_or_text(values) if values.startswith("[") else None
        axes[path] = whole if isinstance(whole, list) else [spec_flags.json_or_text(v) for v in values.split(",")]
    return axes


def _capacity(args: argparse.Namespace, data: dict[str, Any]) -> dict[str, Any]:
    """The capacity search of the flags over that of the file."""
    given = [(flag, value) for flag in _capacity_flags() if (value := getattr(args, flag.dest)) is not None]
    found = {flag.path: value for flag, value in given}
    before = data.get("capacity")
    if found and not args.capacity and before is None:
        raise UsageError(f"{given[0][0].names[0]}: needs --capacity")
    return {"capacity": {**(before or {}), **found}} if args.capacity or before is not None else {}


def _capacity_flags() -> list[spec_flags.SpecFlag]:
    from vllm_ext.simulation.sweep.capacity import CapacitySpec

    return list(spec_flags.flags_of(CapacitySpec, ""))


def _parser() -> argparse.ArgumentParser:
    parser = spec_flags.Parser(
        prog=PROG,
        description="Run every combination of some settings, or search the capacity of each. Every run is kept in the "
        "folder when it ends;\nan interrupted sweep goes on with `vllm-ext sweep --dir DIR`. A terminal gets a table;\n"
        "with --json, or into a pipe, the last line of standard output is the result as JSON.",
    )
    what = parser.add_argument_group("what varies")
    what.add_argument("--sweep", type=Path, metavar="FILE", help="JSON description of a sweep; flags win over it")
    what.add_argument("--axis", action="append", default=[], metavar="PATH=A,B", help="values of a field; repeatable")
    what.add_argument("--repeats", type=int, metavar="N", help="runs of each combination with seeds of their own")
    what.add_argument(
        "--constraint", action="append", default=[], metavar="METRIC<=X", help="what runs should meet; repeatable"
    )
    search = parser.add_argument_group("capacity: the highest rate at which all constraints hold")
    search.add_argument("--capacity", action="store_true", help="search it for every combination")
    for flag in _capacity_flags():
        spec_flags.add_flag(search, flag)
    where = parser.add_argument_group("where it runs, and what is written")
    where.add_argument(
        "--dir", type=Path, required=True, help="folder of the runs, summary.csv, summary.json, plot.png"
    )
    where.add_argument("--jobs", type=int, metavar="N", help="processes (default: 1); with --ray, most runs at a time")
    where.add_argument(
        "--ray", nargs="?", const="local", metavar="ADDRESS", help="run on a Ray cluster (default: one of this machine)"
    )
    where.add_argument("--metric", metavar="NAME", help="metric to plot")
    where.add_argument("--plot", type=Path, metavar="FILE", help="plot, .png or .svg (default: plot.png in --dir)")
    json_output.add_argument(where)
    where.add_argument("--quiet", action="store_true", help="no progress and no table")
    spec_flags.add_arguments(parser)
    return parser
