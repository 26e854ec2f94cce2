"""`vllm-ext plan`: simulate every system on a trace of one's own and recommend one, with its flags."""

from __future__ import annotations

import argparse
import functools
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vllm_ext.cli import left_out, spec_flags
from vllm_ext.cli.command import FAILED, GOES_ON, Failed, Parser, UsageError, guarded, need
from vllm_ext.report import common_flags, results
from vllm_ext.report.plots import Series, lines
from vllm_ext.report.table import Table
from vllm_ext.simulation import plan
from vllm_ext.simulation.plan import BASELINE, Objective, Obstacle, Row, Verdict
from vllm_ext.simulation.spec import SimulationSpec, checked, resolve, with_values
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
    return guarded(_parser(), _plan, argv, again=GOES_ON)


def _plan(args: argparse.Namespace) -> int:
    base, own_rate = _base(args)
    if args.print_spec:
        print(base.model_dump_json(indent=1))
        return 0
    need("vllm")
    loads = plan.LOADS if args.loads is None else _loads(args.loads)
    base, candidates = plan.with_own_policies(base)
    workload = build(base.workload)
    objective = Objective(with_slo=bool(base.workload.tiers), min_attainment=args.min_attainment)
    what = f"{base.workload.source}: {own_rate:.4g} requests/s; {len(candidates)} candidates at {len(loads)} loads"
    limits = resolve(base).limits._asdict()
    served = ", ".join(f"{name} {value}" for name, value in limits.items())
    print(f"{what}; {served}", *workload.source.notes, sep="\n", file=sys.stderr)
    with PointStore(args.cache) as store, local_pool(args.jobs) as pool:
        tell = functools.partial(_tell, base, quiet=args.quiet)
        rows = plan.compare(base, own_rate, candidates, loads, store, pool, tell)
    verdict = plan.decide(rows, objective)
    if verdict is None:
        raise Failed(f"{BASELINE} failed at every load, there is nothing to compare with")
    made = _result(args, base, own_rate, rows, verdict, workload)
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
    resolve(spec)  # what vLLM would not start with is refused before anything is run
    if spec.workload.arrivals in ("closed-loop", "at-once"):
        raise UsageError(
            f"--arrivals {spec.workload.arrivals}: a plan varies the load, which these arrivals do not follow"
        )
    if spec.workload.rate_per_s is not None:
        return spec, spec.workload.rate_per_s
    times = [request.arrival_s for request in build(spec.workload).start()]
    if len(times) < 2 or times[-1] <= times[0]:
        raise UsageError(
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
        raise UsageError(f"--loads {text}: must be numbers above 0, separated by commas")
    return loads


def _tell(base: SimulationSpec, row: Row, *, quiet: bool) -> None:
    """Say what came of a run."""
    where, metrics = f"{row.load:g} x: {row.candidate.name}", row.outcome.metrics
    if metrics is None:
        print(f"{PROG}: {where}: failed: {row.outcome.error}", file=sys.stderr, flush=True)
    elif not metrics["requests"]:
        raise UsageError(
            f"no request ended under {row.candidate.name} at {row.load:g} x: --max-time {base.max_time_s} is too "
            f"early, or all prompts exceed --max-model-len {resolve(base).limits.max_model_len}"
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
    args: argparse.Namespace, base: SimulationSpec, own_rate: float, rows: Sequence[Row], verdict: Verdict,
    workload: GeneratedWorkload,
) -> results.Result:  # fmt: skip
    metrics: dict[str, float] = {"own_rate_per_s": own_rate}
    baseline: dict[str, float] = {}
    for row in rows:
        into, prefix = (baseline, "") if row.candidate.name == BASELINE else (metrics, f"{row.candidate.name}.")
        found = row.outcome.metrics or {}
        into |= {f"{prefix}load_{row.load:g}.{metric}": value for metric, value in found.items()}
    config = {
        "spec": base.model_dump(mode="json"),
        "loads": sorted({row.load for row in rows}),
        "failed": [f"{row.candidate.name} at {row.load:g}" for row in rows if row.outcome.failed],
        "as_default": [f"{row.candidate.name} at {row.load:g}: {row.skipped}" for row in rows if row.skipped],
        "recommended": verdict.choice.name,
        "flags": [",".join(spec_flags.public(flag.split(","))) for flag in verdict.choice.flags],
        "reason": verdict.reason,
        "helps_at": verdict.helps_at,
        "nothing_helps": {f"{load:g}": obstacle.value for load, obstacle in verdict.nothing_helps.items()},
        "carried_load": verdict.carried_load,
        "carries_every_load": [name for name, load in verdict.carried_load.items() if load == rows[-1].load],
    }
    return spec_flags.result("plan", args.command_line, base, workload, config, metrics, {BASELINE: baseline})


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
        if group := next((group for group in groups if _same_line(points[group[0]], found)), None):
            group.append(name)
        else:
            groups.append([name])
    drawn = [(", ".join(group), points[group[0]]) for group in groups]
    return [Series(label=label, x=list(found), y=list(found.values())) for label, found in drawn]


def _same_line(one: Mapping[float, float], other: Mapping[float, float]) -> bool:
    return one.keys() == other.keys() and all(math.isclose(one[x], other[x], rel_tol=_SAME_LINE) for x in one)


def _parser() -> Parser:
    parser = Parser(
        prog=PROG,
        description="Simulate every system on your trace, from light load to overload; recommend one with its flags.",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="your trace; its recorded arrivals are the load 1")
    parser.add_argument("--loads", metavar="X,Y", help="multiples of the trace's rate (default: 0.25 to 3)")
    parser.add_argument(
        "--min-attainment", type=float, default=0.9, metavar="SHARE",
        help="a load is carried if this share of the requests meets all SLOs (default: 0.9)",
    )  # fmt: skip
    spec_flags.add_arguments(parser, systems=False)
    common_flags.add(
        parser, "jobs", "cache", "out", "json", quiet="no line per simulation",
        plot="draw the objective against the rate (.png or .svg)",
    )  # fmt: skip
    return parser
