"""`vllm-ext plan`: simulate every system on a trace of one's own and recommend one, with its flags."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_ext.cli import kept_runs, spec_flags
from vllm_ext.observability import json_output
from vllm_ext.observability.provenance import result_path

if TYPE_CHECKING:
    from vllm_ext.simulation.plan import Candidate, Objective, Row, Verdict
    from vllm_ext.simulation.spec import SimulationSpec

PROG = "vllm-ext plan"
Table = Mapping[tuple[str, float], Mapping[str, float]]
"""Candidate and load -> metrics; what failed is not there."""
_SLO_COLUMNS = {"SLO met": "slo_attainment_fraction", "goodput req/s": "goodput_requests_per_s"}
_COLUMNS = {
    "ms/token": "normalised_latency_mean_ms_per_token",
    "TTFT p50 ms": "ttft_p50_ms",
    "TTFT p99 ms": "ttft_p99_ms",
    "TBT p99 ms": "tbt_p99_ms",
    "e2e mean ms": "e2e_mean_ms",
    "preemptions": "preemptions",
}


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, 1 if a run failed, 2 if a flag, a field or the trace is wrong, 130 after Ctrl-C."""
    args = _parser().parse_args(list(argv))
    try:
        return _plan(args, argv)
    except KeyboardInterrupt:
        print(f"\n{PROG}: interrupted; what is done is kept, the same command goes on with the rest", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:
        return spec_flags.complain(PROG, error)


def _plan(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from vllm_ext.observability import results
    from vllm_ext.simulation.plan import BASELINE, LOADS, Objective, decide, with_own_policies

    base, own_rate = _base(args)
    if args.print_spec:
        print(base.model_dump_json(indent=1))
        return 0
    loads = LOADS if args.loads is None else _loads(args.loads)
    base, candidates = with_own_policies(base)
    objective = Objective(with_slo=bool(base.workload.tiers), min_attainment=args.min_attainment)
    print(
        f"{base.workload.source}: {own_rate:.4g} requests/s; {len(candidates)} candidates at {len(loads)} loads",
        file=sys.stderr,
    )
    rows = _rows(base, own_rate, candidates, loads, args)
    table = {(r.candidate.name, r.load): r.outcome.metrics for r in rows if r.outcome.metrics is not None}
    # A load without the defaults has nothing to compare with, and half a candidate is no candidate.
    judged = [load for load in loads if (BASELINE, load) in table]
    whole = [c for c in candidates if all((c.name, load) in table for load in judged)]
    failed = len(rows) - len(table)
    if not judged:
        print(f"{PROG}: {BASELINE} failed at every load, there is nothing to compare with", file=sys.stderr)
        return 1
    verdict = decide(table, whole, judged, objective)
    advice = _advice(verdict, base, own_rate)
    made = _result(argv, base, own_rate, rows, verdict)
    if args.plot is not None:
        _draw(table, candidates, loads, own_rate, objective, args.plot)
    results.emit(made, [_table(table, candidates, loads, own_rate, objective), "", advice], args.out, as_json=args.json)
    if failed:
        left_out = ", ".join(c.name for c in candidates if c not in whole) or "none"
        print(
            f"{PROG}: {failed} runs failed; candidates left out of the advice: {left_out}. What is done is kept, the "
            "same command tries the rest again",
            file=sys.stderr,
        )
    return 1 if failed else 0


def _base(args: argparse.Namespace) -> tuple[SimulationSpec, float]:
    """The run at the trace's own load, and that load in requests/s."""
    from vllm_ext.simulation.sweep.paths import checked, with_values
    from vllm_ext.simulation.workloads.build import build

    if args.systems is not None:
        raise spec_flags.UsageError(f"{spec_flags.SYSTEMS}: plan compares its own candidates; use `vllm-ext simulate`")
    if args.trace is not None:
        args.spec_workload_source = str(args.trace)
        if args.spec_workload_arrivals is None:
            args.spec_workload_arrivals = "recorded"
    spec = checked(spec_flags.base_spec(args))
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
    own_rate = (len(times) - 1) / (times[-1] - times[0])
    return with_values(spec, {"workload.rate_per_s": own_rate}), own_rate


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        loads = ()
    if not loads or loads[0] <= 0:
        raise spec_flags.UsageError(f"--loads {text}: must be numbers above 0, separated by commas")
    return loads


def _rows(
    base: SimulationSpec,
    own_rate: float,
    candidates: Sequence[Candidate],
    loads: Sequence[float],
    args: argparse.Namespace,
) -> list[Row]:
    """Run all candidates at all loads, and say what comes."""
    from vllm_ext.simulation.plan import compare
    from vllm_ext.simulation.sweep.pools import local_pool
    from vllm_ext.simulation.sweep.store import PointStore

    def tell(row: Row) -> None:
        where, metrics = f"{row.load:g} x: {row.candidate.name}", row.outcome.metrics
        if metrics is None:
            print(f"{PROG}: {where}: failed: {row.outcome.error}", file=sys.stderr, flush=True)
        elif not metrics["requests"]:
            raise spec_flags.UsageError(
                f"no request ended under {row.candidate.name} at {row.load:g} x: --max-time {base.max_time_s} is too "
                f"early, or all prompts exceed --max-model-len {base.engine.max_model_len}"
            )
        elif not args.quiet:
            shown = [f"{label} {metrics[name]:.4g}" for label, name in _COLUMNS.items() if name in metrics]
            said = "as vLLM default, nobody waited" if row.skipped else ", ".join(shown)
            print(f"{where}: {said}", file=sys.stderr, flush=True)

    with PointStore(args.cache) as store, local_pool(args.jobs) as pool:
        return compare(base, own_rate, candidates, loads, store, pool, tell)


def _table(
    table: Table, candidates: Sequence[Candidate], loads: Sequence[float], own_rate: float, objective: Objective
) -> str:
    from vllm_ext.observability.results import format_table

    columns = {**(_SLO_COLUMNS if objective.with_slo else {}), **_COLUMNS}
    rows = []
    for load in loads:
        for candidate in candidates:
            metrics = table.get((candidate.name, load), {})
            rows.append((load, load * own_rate, candidate.name, *(metrics.get(name) for name in columns.values())))
    return format_table(("x load", "req/s", "candidate", *columns), rows)


def _advice(verdict: Verdict, base: SimulationSpec, own_rate: float) -> str:
    command = ["vllm", "serve", base.hardware.model, *verdict.choice.flags]
    if base.hardware.tensor_parallel > 1:
        command += ["--tensor-parallel-size", str(base.hardware.tensor_parallel)]
    lines = [f"recommended: {verdict.choice.name}: {verdict.reason}", f"  {shlex.join(command)}"]
    if verdict.choice.note:
        lines.append(f"  ({verdict.choice.note})")
    if verdict.nothing_helps_at:
        loads = ", ".join(f"{load:g}" for load in verdict.nothing_helps_at)
        rates = ", ".join(f"{load * own_rate:.3g}" for load in verdict.nothing_helps_at)
        lines.append(
            f"nothing helps at {loads} times your load ({rates} requests/s): no queue forms, or all is lost there"
        )
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
) -> Any:
    from vllm_ext.observability.results import Result, Workload
    from vllm_ext.simulation.plan import BASELINE
    from vllm_ext.simulation.workloads.build import build

    workload = build(base.workload)
    metrics: dict[str, float] = {"own_rate_per_s": own_rate}
    baseline: dict[str, float] = {}
    for row in rows:
        for metric, value in (row.outcome.metrics or {}).items():
            if row.candidate.name == BASELINE:
                baseline[f"load_{row.load:g}.{metric}"] = value
            else:
                metrics[f"{row.candidate.name}.load_{row.load:g}.{metric}"] = value
    return Result(
        name="plan",
        command=spec_flags.command_line(PROG, argv),
        config={
            "spec": spec_flags.public(base.model_dump(mode="json")),
            "loads": sorted({row.load for row in rows}),
            "failed": [f"{row.candidate.name} at {row.load:g}" for row in rows if row.outcome.failed],
            "as_default": [f"{row.candidate.name} at {row.load:g}" for row in rows if row.skipped],
            "recommended": verdict.choice.name,
            "flags": [",".join(spec_flags.public(flag.split(","))) for flag in verdict.choice.flags],
            "reason": verdict.reason,
            "helps_at": list(verdict.helps_at),
            "nothing_helps_at": list(verdict.nothing_helps_at),
            "carried_load": dict(verdict.carried_load),
        },
        seed=base.workload.seed,
        workload=Workload(name=workload.name, rows=workload.rows, sha256=workload.sha256),
        metrics=metrics,
        baselines={BASELINE: baseline},
    )


def _draw(
    table: Table,
    candidates: Sequence[Candidate],
    loads: Sequence[float],
    own_rate: float,
    objective: Objective,
    path: Path,
) -> None:
    from vllm_ext.observability.plots import Series, lines

    series = []
    for candidate in candidates:
        there = [load for load in loads if (candidate.name, load) in table]
        y = [table[candidate.name, load][objective.metric] for load in there]
        series.append(Series(label=candidate.name, x=[load * own_rate for load in there], y=y))
    ylabel = "share of requests that meet all SLOs" if objective.with_slo else "mean normalised latency (ms/token)"
    limit = objective.min_attainment if objective.with_slo else None
    lines(series, path, xlabel="request rate (requests/s)", ylabel=ylabel, limit=limit, log_y=not objective.with_slo)


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
    spec_flags.add_arguments(parser)
    return parser
