"""`vllm-ext sweep`: a grid of simulations, or the capacity of every combination; resumable, over processes or Ray."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_ext.cli import left_out, spec_flags
from vllm_ext.cli.command import FAILED, Parser, UsageError, guarded, need
from vllm_ext.files import replaced
from vllm_ext.report import common_flags, page, results
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.report.page import Chart, Page, Section, Verdict
from vllm_ext.simulation.spec import SimulationSpec, parse, with_values
from vllm_ext.simulation.sweep import grid, pools, summary
from vllm_ext.simulation.sweep.capacity import CapacitySpec, Constraint, expected_runs
from vllm_ext.simulation.sweep.grid import SYSTEM, SweepSpec
from vllm_ext.simulation.sweep.store import Outcome, PointStore
from vllm_ext.simulation.workloads.build import GeneratedWorkload, build

PROG = "vllm-ext sweep"
DESCRIPTION = "sweep.json"
"""In the sweep's folder: what is swept, so that ``--dir`` alone goes on with it."""
_CAPACITY = "capacity."
_AGAIN = f"what is done is kept, `{PROG} --dir {{dir}}` goes on with the rest"


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, 2 if a flag or a file is wrong, 3 if a run failed or left something out, 130 after Ctrl-C."""
    return guarded(_parser(), _main, argv, again=_AGAIN)


def make_pool(args: argparse.Namespace) -> pools.Pool:
    """Return the pool that the flags ask for."""
    if args.ray is not None:
        from vllm_ext.cluster.ray_pool import RayPool

        return RayPool(pools.simulate_point, address=args.ray, jobs=args.jobs)
    return pools.local_pool(1 if args.jobs is None else args.jobs)


def _main(args: argparse.Namespace) -> int:
    sweep = _sweep(args)
    described = sweep.model_dump_json(indent=1, exclude_unset=True)
    if args.print_spec:
        print(described)
        return 0
    spec_flags.say_costs(sweep.base)
    need("vllm")
    num_points = len(grid.expand(sweep))  # a wrong sweep is refused before anything is written, as is a missing file:
    workload = build(sweep.base.workload)
    expected = num_points * (1 if sweep.capacity is None else expected_runs(sweep.capacity))
    progress = CountProgress(expected, label="sweep", unit="run", quiet=args.quiet)
    counts = {True: 0, False: 0}  # whether a run was there already, which does not count for the time left

    def count(spec: SimulationSpec, outcome: Outcome, reused: bool) -> None:  # noqa: ARG001 - what a sweep tells
        counts[reused] += 1
        progress.update(counts[False], total=expected - counts[True])

    store = PointStore(args.dir)
    with store.locked(), store:
        with replaced(args.dir / DESCRIPTION) as file:
            file.write(described.encode() + b"\n")
        with make_pool(args) as pool, progress:
            ran = grid.run(sweep, store, pool, count)
        rows = summary.rows_of(sweep, ran)
        summary.write_csv(rows, args.dir / "summary.csv")
        _plot(args, sweep, ran)
        # The same for a sweep that was interrupted as for one that was not: its command names the description kept.
        words = [*PROG.split(), "--sweep", f"{args.dir.name}/{DESCRIPTION}", "--dir", args.dir.name]
        merged = [{key: value for key, value in (row.plain | row.metrics).items() if value is not None} for row in rows]
        config = {"sweep": sweep.model_dump(mode="json"), "rows": merged}
        made = spec_flags.result("sweep", words, sweep.base, workload, config, _metrics(sweep, rows, num_points))
        said = ([] if args.quiet else [summary.table(rows)]) + (incomplete := _left_out(ran, workload))
        results.emit(made, said, args.dir / "summary.json", as_json=args.json)
    if not args.quiet:
        print(f"{counts[False]} runs computed, {counts[True]} found in {args.dir}", file=sys.stderr)
    failed = [f"failed: {dict(one.values)}: {' '.join(str(one.outcome.error).split())}"
              for one in ran if one.outcome.failed]  # fmt: skip
    if args.html is not None:
        page.write(_page(args, sweep, ran, made, [*failed, *incomplete]), args.html)
    for line in failed:
        print(f"{PROG}: {line}", file=sys.stderr)
    if failed:
        print(f"{PROG}: {len(failed)} failed; {_AGAIN.format(dir=args.dir)}", file=sys.stderr)
    return FAILED if failed or incomplete else 0


def _left_out(ran: Sequence[grid.Point], workload: GeneratedWorkload) -> list[str]:
    """Lines on what the points left out, each once."""
    finished = ((one.outcome.metrics, one.spec) for one in ran if one.outcome.metrics is not None)
    said = (line for metrics, spec in finished for line in left_out.lines([metrics], spec, workload))
    return list(dict.fromkeys(said))


def _plot(args: argparse.Namespace, sweep: SweepSpec, ran: Sequence[grid.Point]) -> None:
    """Draw the metric asked for; else the one of the first constraint in a capacity search, else the latency."""
    metric = _plotted(args, sweep)
    try:
        drawn = summary.plot(sweep, ran, metric, args.plot or args.dir / "plot.png")
    except ImportError as error:
        print(f"no plot: {error}; pip install 'vllm-ext[lab]'", file=sys.stderr)
        return
    if not drawn and (args.metric or args.plot):
        print(f"no plot: no axis of numbers, or no run has the metric {metric}", file=sys.stderr)


def _plotted(args: argparse.Namespace, sweep: SweepSpec) -> str:
    usual = summary.METRIC if sweep.capacity is None else Constraint.parse(sweep.constraints[0]).metric
    return args.metric or usual


def _page(
    args: argparse.Namespace, sweep: SweepSpec, ran: Sequence[grid.Point], made: results.Result, left_out: Sequence[str]
) -> Page:
    rows, metric = summary.rows_of(sweep, ran), _plotted(args, sweep)

    def draw(path: Path) -> None:
        if not summary.plot(sweep, ran, metric, path):
            raise ValueError(f"no axis of numbers, or no run has the metric {metric}")

    chart = Chart(
        caption=f"{metric} by the first axis of numbers; the mean of repeats",
        alt=f"Lines of {metric}, one for each combination of the other axes in the table below", draw=draw,
    )  # fmt: skip
    return Page(
        title=f"Sweep of {', '.join(sweep.axes) or 'the capacity'} on {made.workload.name}",
        verdicts=[*_verdicts(sweep, rows)],
        sections=[Section(title="Every combination", charts=[chart], table=summary.table(rows))],
        left_out=left_out, command=made.command, facts=page.facts_of(made),
    )  # fmt: skip


def _verdicts(sweep: SweepSpec, rows: Sequence[summary.Row]) -> Iterator[Verdict]:
    """What each combination carries, or how many keep to the constraints."""
    if sweep.capacity is not None:
        for row in rows:
            name = ", ".join(f"{path}={row.plain[path]}" for path in sweep.axes) or sweep.base.engine.system
            rate = row.plain.get(summary.CAPACITY)
            told = f"{name}: {row.plain['found']}" if rate is None else f"{name}: carries {rate:.4g} requests/s"
            yield Verdict(text=told, kind="missed" if rate is None else "met")
    elif sweep.constraints:
        met = sum(row.plain["meets"] for row in rows)
        text = f"{met} of {len(rows)} combinations keep to {', '.join(sweep.constraints)}"
        yield Verdict(text=text, kind="met" if met else "missed")


def _metrics(sweep: SweepSpec, rows: Sequence[summary.Row], num_points: int) -> dict[str, float]:
    metrics = {"points": float(num_points), "failed_points": float(sum(row.plain["failed"] for row in rows))}
    for row in rows:
        if summary.CAPACITY in row.plain:
            named = ",".join(f"{path}={row.plain[path]}" for path in sweep.axes)
            metrics[f"{named}.{summary.CAPACITY}" if named else summary.CAPACITY] = row.plain[summary.CAPACITY]
    return metrics


def _sweep(args: argparse.Namespace) -> SweepSpec:
    """Return what to sweep: that of ``--sweep``, the flags, or the folder's if there are neither."""

    def read(path: Path, flag: str) -> SweepSpec:
        return parse(SweepSpec, spec_flags.read_json(path, flag))

    flags = spec_flags.changes(args)
    described = args.spec or args.sweep or args.systems or args.axis or args.repeats or args.constraint or args.capacity
    if not described and not flags and (kept := args.dir / DESCRIPTION).is_file():
        return read(kept, "--dir")
    if args.sweep is not None and args.spec is not None:
        raise UsageError(f"--spec {args.spec}: must not be used with --sweep, which has a base of its own")
    start = SweepSpec() if args.sweep is None else read(args.sweep, "--sweep")
    base = spec_flags.described(args) if args.sweep is None else with_values(start.base, flags)
    axes = {**start.axes, **_axes(args.axis)}
    if args.systems is not None:
        systems = spec_flags.systems_of(args, base)
        if len(systems) == 1:
            base = with_values(base, {SYSTEM: systems[0]})
        else:
            axes = {SYSTEM: systems, **{path: values for path, values in axes.items() if path != SYSTEM}}
    data = start.model_dump(mode="json", exclude_unset=True)
    capacity = _capacity(args, data.get("capacity"))
    given = {"repeats": args.repeats, "constraints": args.constraint or None, "capacity": capacity}
    data |= {"base": base.model_dump(mode="json", exclude_unset=True), "axes": axes}
    sweep = parse(SweepSpec, data | {name: value for name, value in given.items() if value is not None})
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


def _capacity(args: argparse.Namespace, before: dict[str, Any] | None) -> dict[str, Any] | None:
    """The capacity search of the flags over that of the file."""
    found = spec_flags.given(args, _CAPACITY)
    if not args.capacity and before is None:
        if found:
            raise UsageError(f"{args.parser.flag_of[_CAPACITY + next(iter(found))]}: needs --capacity")
        return None
    return {**(before or {}), **found}


def _parser() -> Parser:
    parser = Parser(
        prog=PROG,
        description="Run every combination of some settings, or search the capacity of each. Every run is kept in the "
        "folder when it ends; an interrupted sweep goes on with `vllm-ext sweep --dir DIR`. A terminal gets a table; "
        "with --json, or into a pipe, the last line of standard output is the result as JSON.",
    )
    what = parser.add_argument_group("what varies")
    what.add_argument("--sweep", type=Path, metavar="FILE", help="JSON description of a sweep; flags win over it")
    what.add_argument("--axis", action="append", default=[], metavar="PATH=A,B", help="values of a field; repeatable")
    what.add_argument(
        "--repeats", type=common_flags.at_least(1), metavar="N", help="runs of each combination with seeds of their own"
    )
    what.add_argument(
        "--constraint", action="append", default=[], metavar="METRIC<=X", help="what runs should meet; repeatable"
    )
    what.add_argument("--capacity", action="store_true", help="search the highest rate of every combination")
    spec_flags.add_flags(parser, CapacitySpec, _CAPACITY, "capacity: the highest rate at which all constraints hold")
    where = parser.add_argument_group("where it runs, and what is written")
    where.add_argument(
        "--dir", type=Path, required=True, help="folder of the runs, summary.csv, summary.json, plot.png"
    )
    where.add_argument(
        "--ray", nargs="?", const="local", metavar="ADDRESS", help="run on a Ray cluster (default: one of this machine)"
    )
    where.add_argument("--metric", metavar="NAME", help="metric to plot")
    spec_flags.add_arguments(parser)
    common_flags.add(
        parser, "json", "quiet", "html", jobs="processes (default: 1); with --ray, most runs at a time",
        plot="plot, .png or .svg (default: plot.png in --dir)",
    )  # fmt: skip
    parser.set_defaults(jobs=None)
    return parser
