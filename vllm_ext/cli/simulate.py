"""`vllm-ext simulate`: serve a workload in virtual time, with one system or several side by side."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cli import left_out, spec_flags
from vllm_ext.cli.command import FAILED, Parser, UsageError, guarded, need
from vllm_ext.report import common_flags, page, plots, results
from vllm_ext.report.count_progress import CountProgress
from vllm_ext.report.page import Chart, Page, Section, Verdict
from vllm_ext.report.table import Table
from vllm_ext.routing.routers import ROUTERS
from vllm_ext.simulation.measure import export
from vllm_ext.simulation.measure.metrics import summarise, windows_of
from vllm_ext.simulation.measure.perfetto import write_trace
from vllm_ext.simulation.measure.run_data import RunData
from vllm_ext.simulation.plan import evidence
from vllm_ext.simulation.spec import SimulationSpec, checked, resolve, with_values
from vllm_ext.simulation.workloads.build import build

SHOWN = (
    "requests", "aborted_requests", "unfinished_requests", "rejected_requests", "duration_s",
    "throughput_requests_per_s", "throughput_tokens_per_s", "normalised_latency_mean_ms_per_token",
    "normalised_latency_p90_ms_per_token", "ttft_mean_ms", "ttft_p99_ms", "tbt_p99_ms", "tbt_max_ms", "e2e_mean_ms",
    "e2e_p99_ms", "scheduling_delay_p50_s", "slo_attainment_fraction", "goodput_requests_per_s",
    "mean_running_requests", "mean_waiting_requests", "mean_kv_used_fraction", "moved_turns",
    "steps_of_busiest_replica_fraction", "preemptions", "policy_fallbacks",
)  # fmt: skip
"""Metrics of the printed table, as far as the run has them; the JSON has all."""
WINDOWS = 4
"""Parts of a run, whose differences tell how much of what is seen may be chance."""
TRACE_EVENTS = 1_000_000
"""Events kept for a trace where the description does not say."""
_TABLES = (".csv", ".csv.gz", ".parquet")
_FILES = {
    "requests": ("a row per request", _TABLES),
    "series": ("running, waiting, KV used ... over time", _TABLES),
    "trace": ("a trace for ui.perfetto.dev", (".json", ".json.gz")),
    "cdf": ("distribution of the normalised latency", (".png", ".svg")),
}
"""Files that may be asked for beside the plot, and how their names may end."""

Found = Mapping[str, Mapping[str, float]]
"""Metrics of each system."""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, 2 if a flag, a field or a file is wrong, 3 if requests or rows were left out."""
    return guarded(_parser(), _simulate, argv)


def _simulate(args: argparse.Namespace) -> int:
    if args.replicas > 1:
        for name in ("series", "trace", "plot"):
            if (path := getattr(args, name)) is not None:
                raise UsageError(f"--{name}={path}: must be left out with --replicas, of which it is not kept")
    specs = _specs(args)
    described = {spec.engine.system: spec.model_dump(mode="json") for spec in specs}
    if args.print_spec:
        print(json.dumps([*described.values()] if len(specs) > 1 else described[specs[0].engine.system], indent=1))
        return 0
    need("vllm")
    workload = build(specs[0].workload)
    if not args.quiet:
        print(*(f"{note}\n" for note in workload.source.notes), sep="", end="", file=sys.stderr)
    if args.replicas > 1:
        described["cluster"] = {"replicas": args.replicas, "routers": args.router}
        runs, found = _run_clusters(specs, args)
    else:
        runs = {spec.engine.system: _run(spec, args.quiet) for spec in specs}
        found = {system: summarise(run) for system, run in runs.items()}
    incomplete = left_out.lines(found.values(), specs[0], workload)
    no_difference = _why_no_difference(specs, found) if args.replicas == 1 else []
    tables = [] if args.quiet else [table(found, every=args.all_metrics), *no_difference]
    metrics, baselines = _beside_the_first(found)
    made = spec_flags.result("simulate", args.command_line, specs[0], workload, described, metrics, baselines)
    results.emit(made, [*tables, *incomplete], args.out, as_json=args.json)
    _write_files(args, runs)
    if args.html is not None:
        page.write(_page(made, runs, found, no_difference, incomplete), args.html)
    return FAILED if incomplete else 0


def _specs(args: argparse.Namespace) -> list[SimulationSpec]:
    """One description per system, checked."""
    base = spec_flags.base_spec(args)
    if args.trace is not None and not base.record.events:
        base = with_values(base, {"record.events": TRACE_EVENTS})
    return [checked(with_values(base, {"engine.system": system})) for system in spec_flags.systems_of(args, base)]


def _run(spec: SimulationSpec, quiet: bool) -> RunData:
    """Simulate with a bar on stderr; what depends on the wall clock goes there too. vLLM is imported here."""
    from vllm_ext.simulation.run import simulate

    if quiet:
        return simulate(spec)
    workload = spec.workload
    # Of conversations only the number of first turns is known beforehand.
    total = workload.num_requests if not workload.conversations else None
    limit_s = spec.max_time_s or (workload.duration_s if not total else None)
    unit = "request" if limit_s is None else "simulated second"
    with CountProgress(total if limit_s is None else math.ceil(limit_s), label=spec.engine.system, unit=unit) as bar:
        run = simulate(spec, progress=lambda now_s, ended: bar.update(ended if limit_s is None else int(now_s)))
    speed = f", {run.duration_s / run.wall_s:.0f} times real time" if run.wall_s > 0 else ""
    print(f"{spec.engine.system}: {run.duration_s:.1f} s simulated in {run.wall_s:.1f} s{speed}", file=sys.stderr)
    return run


def _run_clusters(specs: Sequence[SimulationSpec], args: argparse.Namespace) -> tuple[dict[str, RunData], Found]:
    """Simulate each system on replicas behind each router; vLLM is imported here."""
    from vllm_ext.simulation.cluster import simulate_cluster

    runs, found = dict[str, RunData](), dict[str, dict[str, float]]()
    for spec in specs:
        for router in args.router:
            name = f"{spec.engine.system} {router}"
            run = simulate_cluster(spec, replicas=args.replicas, router=router, report_s=args.report_s)
            runs[name] = run.whole
            steps = [one.counters["steps"] for one in run.replicas]
            found[name] = {
                **summarise(run.whole), "moved_turns": float(run.moved),
                "steps_of_busiest_replica_fraction": max(steps) / sum(steps),
            }  # fmt: skip
            if not args.quiet:
                whole = run.whole
                print(f"{name}: {whole.duration_s:.1f} s of {args.replicas} replicas simulated in {whole.wall_s:.1f} s",
                      file=sys.stderr, flush=True)  # fmt: skip
    return runs, found


def _why_no_difference(specs: Sequence[SimulationSpec], found: Found) -> list[str]:
    """Say that no order of requests could matter, and from which load on one would; nothing where somebody waited.

    At the rate that is named, the seats or the KV blocks would be taken on average, if requests stayed no longer than
    they do now.
    """
    if any(metrics["contended_steps"] for metrics in found.values()):
        return []
    metrics = found[specs[0].engine.system]
    seats = metrics.get("mean_running_requests", 0.0) / resolve(specs[0]).limits.max_num_seqs
    taken, rate = max(seats, metrics.get("mean_kv_used_fraction", 0.0)), specs[0].workload.rate_per_s
    remedy = f"raise --rate above {rate / taken:.2g}" if rate is not None and taken else "raise the load"
    return [f"no request waited, so that no system could order them better: {remedy}"]


def _beside_the_first(found: Found) -> tuple[Mapping[str, float], Found]:
    """Metrics and baselines of a result; of several systems the first is the baseline, the others are named."""
    first, *others = found
    if not others:
        return found[first], {}
    metrics = {f"{system}.{name}": value for system in others for name, value in found[system].items()}
    ratios = {f"{system}.{name}_ratio": _ratio(found, system, name) for system in others for name in SHOWN}
    return metrics | {name: ratio for name, ratio in ratios.items() if ratio is not None}, {first: found[first]}


def table(found: Found, *, every: bool = False) -> Table:
    """Return metrics as text, a line each; beside each further system its ratio to the first."""
    first, *others = found
    known = {name for metrics in found.values() for name in metrics}
    names = [*(name for name in SHOWN if name in known), *(sorted(known - set(SHOWN)) if every else ())]
    header = ["metric", first, *(cell for system in others for cell in (system, f"/ {first}"))]
    rows = []
    for name in names:
        beside = (cell for system in others for cell in (found[system].get(name), _ratio(found, system, name)))
        rows.append([name, found[first].get(name), *beside])
    return Table(header, rows)


def _ratio(found: Found, system: str, name: str) -> float | None:
    """A metric of a system in that of the first one."""
    value, base = found[system].get(name), next(iter(found.values())).get(name)
    return value / base if value is not None and base else None


def _write_files(args: argparse.Namespace, runs: Mapping[str, RunData]) -> None:
    """Write what was asked for; with several systems each has files of its own, but one figure shows all."""
    for system, run in runs.items():
        requests, series, trace = (_own_path(path, system, runs) for path in (args.requests, args.series, args.trace))
        if requests is not None:
            export.write(export.requests_frame(run), requests)
        if series is not None:
            export.write(export.series_frame(run), series)
        if trace is not None:
            kept = write_trace(run, trace)
            if kept["dropped_events"] or kept["requests_without_lane"]:
                print(f"--trace of {system} does not hold all: {kept}", file=sys.stderr)
    if args.plot is not None:
        plots.over_time(export.state_panels(runs), args.plot)
    if args.cdf is not None:
        curves = []
        for system, run in runs.items():
            latency_s = export.requests_frame(run).loc[run.finished(), "normalised_latency_s_per_token"]
            with contextlib.suppress(ValueError):  # nothing finished under this system
                curves.append(plots.empirical_cdf(system, latency_s * 1000))
        if curves:
            plots.cdf(curves, args.cdf, xlabel="normalised latency (ms/token)", log_x=True)
        else:
            print(f"--cdf {args.cdf}: no request finished, nothing is drawn", file=sys.stderr)


def _page(
    made: results.Result, runs: Mapping[str, RunData], found: Found, notes: Sequence[str], incomplete: Sequence[str]
) -> Page:
    names = ", ".join(runs)
    state = Chart(
        caption="Running and waiting requests and the KV cache used, over virtual time",
        alt=f"Lines over time of KV cache use, running and waiting requests under {names}",
        draw=lambda path: plots.over_time(export.state_panels(runs), path),
    )
    sections = [
        Section(title="Latency", charts=[*_distributions(runs)]),
        *(
            [Section(title="The server over time", charts=[state])]
            if any(len(run.series) for run in runs.values())
            else []
        ),
        Section(title="Metrics", table=table(found, every=True)),
    ]
    end = f".{evidence.ATTAINMENT}"
    measured = {name for metrics in found.values() for name in metrics if name.endswith(end)}
    if tiers := sorted(name.removeprefix("tier.").removesuffix(end) for name in measured):
        shown = {tier: f"tier.{tier}{end}" for tier in tiers} | {"all": evidence.ATTAINMENT}
        shares = {system: [100 * metrics.get(name, math.nan) for name in shown.values()]
                  for system, metrics in found.items()}  # fmt: skip
        bars = Chart(
            caption="Share of requests that met all their objectives, by class of service",
            alt=f"Bars of the share of met objectives of {', '.join(shown)} under {names}",
            draw=lambda path: plots.bars([*shown], shares, path, ylabel="met all objectives (%)"),
        )
        sections.insert(0, Section(title="Objectives", charts=[bars]))
    return Page(
        title=f"{names} on {made.workload.name}",
        verdicts=[*_verdicts(runs), *(Verdict(text=note, kind="same") for note in notes)],
        sections=sections, left_out=incomplete, command=made.command, facts=page.facts_of(made),
    )  # fmt: skip


def _verdicts(runs: Mapping[str, RunData]) -> Iterator[Verdict]:
    """Compare the mean end-to-end latency of every further system with the first one's, window by window."""
    windows = {system: windows_of(run, WINDOWS) | summarise(run) for system, run in runs.items()}
    first, *others = windows
    for system in others:
        over = evidence.ratio(windows[system], windows[first], evidence.MEAN)
        text = f"{system}: mean end-to-end latency {over} times better than under {first}"
        if math.isfinite(over.value):
            yield Verdict.of_ratio(f"{text}, over windows of one run", over.low, over.high)


def _distributions(runs: Mapping[str, RunData]) -> Iterator[Chart]:
    """Yield distributions of TTFT, normalised latency, and time between tokens, of which single ones are not kept."""

    def per_request(column: str, path: Path, xlabel: str) -> None:
        curves = []
        for system, run in runs.items():
            values = _latency_ms(run, column)
            if len(values):
                curves.append(plots.empirical_cdf(system, values, parts=np.array_split(values, WINDOWS)))
        plots.cdf(curves, path, xlabel=xlabel, log_x=True)

    def gaps(path: Path) -> None:
        shares = np.linspace(0.0, 1.0, 201)
        curves = [plots.Series(label=system, x=[1000 * run.gaps.quantile_s(q) for q in shares], y=shares.tolist())
                  for system, run in runs.items() if run.gaps.count]  # fmt: skip
        plots.cdf(curves, path, xlabel="time between tokens (ms)", log_x=True)

    drawn: dict[str, Callable[[Path], None]] = {
        "time to first token": partial(per_request, "ttft_s", xlabel="time to first token (ms)"),
        "time between tokens": gaps,
        "normalised latency": partial(per_request, "e2e_s", xlabel="normalised latency (ms/token)"),
    }
    for what, draw in drawn.items():
        band = "" if draw is gaps else f" Bands span those of {WINDOWS} parts of the requests, by arrival"
        alt = f"Cumulative distribution of the {what} under {', '.join(runs)}"
        yield Chart(caption=f"Distribution of the {what}.{band}", alt=alt, draw=draw)


def _latency_ms(run: RunData, column: str) -> NDArray[np.float64]:
    """A latency of the requests that finished, by arrival; of the end-to-end latency that per output token."""
    finished, requests = run.finished(), run.requests
    values = 1000 * requests.column(column)[finished]
    if column == "e2e_s":
        values /= requests.column("output_tokens")[finished]
    return values[np.argsort(requests.column("arrival_s")[finished], kind="stable")]


_seconds = common_flags.number(lambda value: value > 0, "seconds, greater than 0")


def _routers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ROUTERS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: must be among {', '.join(ROUTERS)}")
    return list(dict.fromkeys(names))


def _own_path(path: Path | None, system: str, runs: Mapping[str, RunData]) -> Path | None:
    """``requests.csv.gz`` -> ``requests.alise.csv.gz`` if there are several systems."""
    if path is None or len(runs) == 1:
        return path
    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    return path.with_name(f"{path.name.removesuffix(suffix)}.{system.replace(' ', '.')}{suffix}")


def _parser() -> Parser:
    parser = Parser(
        prog="vllm-ext simulate",
        description="Run vLLM's scheduler, or a system of vllm-ext, in virtual time. A cost model stands for the "
        "model's forward pass; the schedulers are the ones that serve. A terminal gets a table; with --json, or into a "
        "pipe, the last line of standard output is the result as JSON.",
    )
    spec_flags.add_arguments(parser)
    cluster = parser.add_argument_group("several replicas; what is described is one of them, and the load of all")
    cluster.add_argument("--replicas", type=common_flags.at_least(1), default=1, metavar="N",
                         help="equal replicas behind a router (default: %(default)s)")  # fmt: skip
    cluster.add_argument("--router", type=_routers, default=["marginal"], metavar="NAME[,NAME]",
                         help=f"who chooses: {', '.join(ROUTERS)} (default: marginal)")  # fmt: skip
    cluster.add_argument("--report-s", type=_seconds, default=0.5, metavar="S",
                         help="seconds between reports of a replica (default: %(default)s)")  # fmt: skip
    output = parser.add_argument_group("output; with several systems, files of single runs get the system's name")
    for name, (what, endings) in _FILES.items():
        text = f"{what} ({', '.join(endings)})"
        output.add_argument(f"--{name}", type=common_flags.output_file(*endings), metavar="FILE", help=text)
    output.add_argument("--all-metrics", action="store_true", help="all metrics in the table, not only the main ones")
    common_flags.add(parser, "out", "json", "quiet", "html", plot="running, waiting and KV used over time (.png, .svg)")
    return parser
