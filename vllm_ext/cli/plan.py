"""`vllm-ext plan`: simulate every system on a trace of one's own and recommend one, with its flags."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_ext.cli import kept_runs, left_out, spec_flags
from vllm_ext.cli.exit_status import FAILED
from vllm_ext.cli.missing import need
from vllm_ext.report import json_output, results
from vllm_ext.report.plots import Series, lines
from vllm_ext.report.provenance import result_path
from vllm_ext.report.table import Table
from vllm_ext.simulation.plan import (
    BASELINE,
    LOADS,
    Objective,
    Obstacle,
    Row,
    Verdict,
    compare,
    decide,
    with_own_policies,
)
from vllm_ext.simulation.spec import SimulationSpec, check_context, checked, engine_blocks, limits_of, with_values
from vllm_ext.simulation.sweep.pools import local_pool
from vllm_ext.simulation.sweep.store import PointStore
from vllm_ext.simulation.workloads.build import GeneratedWorkload, build, mean_rate

PROG = "vllm-ext plan"
_SAME_LINE = 0.02
"""Candidates whose values differ by less at every load can't be told apart in the plot."""
_SLO_COLUMNS = {"SLO met": "slo_attainment_fraction", "goodput req/s": "goodput_requests_per_s"}
_COLUMNS = {
    "ms/token": "normalised_latency_mean_ms_per_token",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "TBT p99 ms": "tbt_p99_ms",
    "e2e mean ms": "e2e_mean_ms",
    "preemptions": "preemptions",
    "unfinished": "unfinished_requests",
    "rejected": "rejected_requests",
}


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, 2 if a flag or the trace is wrong, 3 if a run failed or left something out, 130 on Ctrl-C."""
    args = _parser().parse_args(list(argv))
    again = "what is done is kept, the same command goes on with the rest"
    return spec_flags.guarded(PROG, lambda: _plan(args, argv), again=again)


def _plan(args: argparse.Namespace, argv: Sequence[str]) -> int:
    base, own_rate = _base(args)
    if args.print_spec:
        print(base.model_dump_json(indent=1))
        return 0
    need("vllm")
    loads = LOADS if args.loads is None else _loads(args.loads)
    base, candidates = with_own_policies(base)
    workload = build(base.workload)
    objective = Objective(with_slo=bool(base.workload.tiers), min_attainment=args.min_attainment)
    limits = limits_of(base.engine, base.hardware)._asdict()
    what = f"{base.workload.source}: {own_rate:.4g} requests/s; {len(candidates)} candidates at {len(loads)} loads"
    served = ", ".join(f"{name} {value}" for name, value in limits.items())
    print(f"{what}; {served}", *workload.source.notes, sep="\n", file=sys.stderr)
    with PointStore(args.cache) as store, local_pool(args.jobs) as pool:
        rows = compare(base, own_rate, candidates, loads, store, pool, lambda row: _tell(row, base, quiet=args.quiet))
    verdict = decide(rows, objective)
    if verdict is None:
        print(f"{PROG}: {BASELINE} failed at every load, there is nothing to compare with", file=sys.stderr)
        return FAILED
    made = _result(argv, base, own_rate, rows, verdict, workload)
    if args.plot is not None:
        _draw(rows, objective, base, args.plot)
    incomplete = left_out.lines((row.outcome.metrics or {} for row in rows), base, workload)
    said: list[object] = [_table(rows, objective), *incomplete, "", _advice(verdict, base, own_rate)]
    results.emit(made, said, args.out, as_json=args.json)
    if failed := sum(row.outcome.failed for row in rows):
        print(
            f"{PROG}: {failed} runs failed; candidates left out of the advice: {', '.join(verdict.left_out) or 'none'}."
            " What is done is kept, the same command tries the rest again",
            file=sys.stderr,
        )
    return FAILED if failed or incomplete else 0


def _base(args: argparse.Namespace) -> tuple[SimulationSpec, float]:
    """The run at the trace's own load, and that load in requests/s."""
    if args.trace is not None:
        flags = vars(args)
        flags[f"{spec_flags.SPEC}workload.source"] = str(args.trace)
        flags.setdefault(f"{spec_flags.SPEC}workload.arrivals", "recorded")
    spec = checked(spec_flags.base_spec(args))
    check_context(limits_of(spec.engine, spec.hardware), engine_blocks(spec), spec.engine.block_size)
    if spec.workload.arrivals in ("closed-loop", "at-once"):
        raise spec_flags.UsageError(
            f"--arrivals {spec.workload.arrivals}: a plan varies the load, which these arrivals do not follow"
        )
    if spec.workload.rate_per_s is not None:
        return spec, spec.workload.rate_per_s
    times = [request.arrival_s for request in build(spec.workload).start()]
    if len(times) < 2 or times[-1] <= times[0]:
        raise spec_flags.UsageError(
            f"--trace {spec.workload.source}: {len(times)} requests with recorded arrivals; a plan needs at least two "
            "at different times, or --rate with --arrivals poisson"
        )
    own_rate = mean_rate(times)
    return with_values(spec, {"workload.rate_per_s": own_rate}), own_rate


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        loads = ()
    if not loads or loads[0] <= 0:
        raise spec_flags.UsageError(f"--loads {text}: must be numbers above 0, separated by commas")
    return loads


def _tell(row: Row, base: SimulationSpec, *, quiet: bool) -> None:
    """Say what came of a run."""
    where, metrics = f"{row.load:g} x: {row.candidate.name}", row.outcome.metrics
    if metrics is None:
        print(f"{PROG}: {where}: failed: {row.outcome.error}", file=sys.stderr, flush=True)
    elif not metrics["requests"]:
        raise spec_flags.UsageError(
            f"no request ended under {row.candidate.name} at {row.load:g} x: --max-time {base.max_time_s} is too "
            f"early, or all prompts exceed --max-model-len {limits_of(base.engine, base.hardware).max_model_len}"
        )
    elif not quiet:
        shown = [f"{label} {metrics[name]:.4g}" for label, name in _COLUMNS.items() if name in metrics]
        said = f"as {BASELINE}, not run: {row.skipped}" if row.skipped else ", ".join(shown)
        print(f"{where}: {said}", file=sys.stderr, flush=True)


def _table(rows: Sequence[Row], objective: Objective) -> Table:
    columns = {**(_SLO_COLUMNS if objective.with_slo else {}), **_COLUMNS}
    cells = []
    for row in rows:
        metrics = row.outcome.metrics or {}
        cells.append((row.load, row.rate_per_s, row.candidate.name, *(metrics.get(name) for name in columns.values())))
    return Table(("x load", "req/s", "candidate", *columns), cells)


def _advice(verdict: Verdict, base: SimulationSpec, own_rate: float) -> str:
    command = ["vllm", "serve", base.hardware.model, *verdict.choice.flags]
    if base.hardware.tensor_parallel > 1:
        command += ["--tensor-parallel-size", str(base.hardware.tensor_parallel)]
    lines = [f"recommended: {verdict.choice.name}: {verdict.reason}", f"  {shlex.join(command)}"]
    if verdict.choice.note:
        lines.append(f"  ({verdict.choice.note})")
    for obstacle in Obstacle:
        if hopeless := [load for load, found in verdict.nothing_helps.items() if found is obstacle]:
            loads = ", ".join(f"{load:g}" for load in hopeless)
            rates = ", ".join(f"{load * own_rate:.3g}" for load in hopeless)
            lines.append(f"nothing helps at {loads} times your load ({rates} requests/s): {obstacle.value}")
    lines.append(
        "simulated on a model of the hardware: check the cost model with `vllm-ext validate` before relying on it"
    )
    return "\n".join(lines)


def _result(
    argv: Sequence[str],
    base: SimulationSpec,
    own_rate: float,
    rows: Sequence[Row],
    verdict: Verdict,
    workload: GeneratedWorkload,
) -> results.Result:
    metrics: dict[str, float] = {"own_rate_per_s": own_rate}
    baseline: dict[str, float] = {}
    for row in rows:
        of_baseline = row.candidate.name == BASELINE
        into, prefix = (baseline, "") if of_baseline else (metrics, f"{row.candidate.name}.")
        found = row.outcome.metrics or {}
        into |= {f"{prefix}load_{row.load:g}.{metric}": value for metric, value in found.items()}
    return results.Result(
        name="plan",
        command=spec_flags.command_line(PROG, argv),
        config={
            "spec": spec_flags.public(base.model_dump(mode="json")),
            "loads": sorted({row.load for row in rows}),
            "failed": [f"{row.candidate.name} at {row.load:g}" for row in rows if row.outcome.failed],
            "as_default": [f"{row.candidate.name} at {row.load:g}: {row.skipped}" for row in rows if row.skipped],
            "recommended": verdict.choice.name,
            "flags": [",".join(spec_flags.public(flag.split(","))) for flag in verdict.choice.flags],
            "reason": verdict.reason,
            "helps_at": list(verdict.helps_at),
            "nothing_helps": {f"{load:g}": obstacle.value for load, obstacle in verdict.nothing_helps.items()},
            "carried_load": dict(verdict.carried_load),
            "carries_every_load": [name for name, load in verdict.carried_load.items() if load == rows[-1].load],
        },
        seed=base.workload.seed,
        workload=spec_flags.workload_of(workload),
        metrics=metrics,
        baselines={BASELINE: baseline},
    )


def _draw(rows: Sequence[Row], objective: Objective, base: SimulationSpec, path: Path) -> None:
    hardware = base.hardware
    devices = f"{hardware.tensor_parallel} x {hardware.device}" if hardware.tensor_parallel > 1 else hardware.device
    lines(
        _told_apart(rows, objective.metric),
        path,
        title=f"{Path(base.workload.source).name}\n{Path(hardware.model).name} on {devices}",
        xlabel="request rate (requests/s)",
        ylabel="share of requests that meet all SLOs" if objective.with_slo else "mean normalised latency (ms/token)",
        limit=objective.min_attainment if objective.with_slo else None,
        log_y=not objective.with_slo,
    )


def _told_apart(rows: Sequence[Row], metric: str) -> list[Series]:
    """Return a line per candidate; those that would lie on one another share one, named after all of them."""
    points: dict[str, dict[float, float]] = {}
    for row in rows:
        if row.outcome.metrics is not None and metric in row.outcome.metrics:
            points.setdefault(row.candidate.name, {})[row.rate_per_s] = row.outcome.metrics[metric]
    groups: list[list[str]] = []
    for name, found in points.items():
        alike = (group for group in groups if _same_line(points[group[0]], found))
        if (group := next(alike, None)) is None:
            groups.append([name])
        else:
            group.append(name)
    return [
        Series(label=", ".join(group), x=list(points[group[0]]), y=list(points[group[0]].values())) for group in groups
    ]


def _same_line(one: Mapping[float, float], other: Mapping[float, float]) -> bool:
    return one.keys() == other.keys() and all(math.isclose(one[x], other[x], rel_tol=_SAME_LINE) for x in one)


def _parser() -> argparse.ArgumentParser:
    parser = spec_flags.Parser(
        prog=PROG,
        description=(
            "Simulate every system on your trace, from light load to overload, and recommend one with its flags."
        ),
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="your trace; its recorded arrivals are the load 1")
    parser.add_argument("--loads", metavar="X,Y", help="multiples of the trace's rate (default: 0.25 to 3)")
    parser.add_argument(
        "--min-attainment",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="a load is carried if this share of the requests meets all SLOs (default: 0.9)",
    )
    kept_runs.add_arguments(parser)
    parser.add_argument("--out", type=result_path, metavar="FILE", help="write the JSON result to FILE")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the objective against the rate (.png or .svg)")
    json_output.add_argument(parser)
    parser.add_argument("--quiet", action="store_true", help="no line per simulation")
    spec_flags.add_arguments(parser, systems=False)
    return parser
