"""`vllm-ext plan`: what to change on a vLLM that serves this trace, and what it would bring."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import vllm_ext
from vllm_ext.cli import left_out, spec_flags
from vllm_ext.cli.command import FAILED, GOES_ON, Failed, Parser, UsageError, guarded, need
from vllm_ext.cli.plan_base import server_as_it_is
from vllm_ext.config import tuned
from vllm_ext.report import common_flags, results
from vllm_ext.report.page import Chart, Page, Section, Verdict, facts_of, write
from vllm_ext.report.plots import Series, lines
from vllm_ext.report.results import without_folder
from vllm_ext.report.table import Table
from vllm_ext.routing.routers import ROUTERS
from vllm_ext.simulation.cost.spec import notes
from vllm_ext.simulation.plan import evidence, search
from vllm_ext.simulation.plan.answer import Answer, Doubt, answer, doubt, nearest, parts_of_choice
from vllm_ext.simulation.plan.candidates import AS_IT_IS, CHANGED, DEFAULT, Candidate, has_objectives
from vllm_ext.simulation.plan.command import VLLM_MEMORY_UTILIZATION, command_of, not_in_command
from vllm_ext.simulation.plan.estimate import estimate
from vllm_ext.simulation.plan.evidence import Objective
from vllm_ext.simulation.plan.runs import Bench, NoAnswer, Parts, parts_of
from vllm_ext.simulation.plan.saturation import Saturation, saturation
from vllm_ext.simulation.plan.search import Coarse
from vllm_ext.simulation.spec import SimulationSpec, resolve, with_values
from vllm_ext.simulation.sweep.capacity import Constraint
from vllm_ext.simulation.sweep.pools import local_pool
from vllm_ext.simulation.sweep.store import Outcome, PointStore, versions
from vllm_ext.simulation.workloads.build import GeneratedWorkload, build

PROG = "vllm-ext plan"
_SHOWN = {
    "e2e mean ms": evidence.MEAN, "P99": evidence.P99, "TTFT P90 ms": evidence.TTFT_P90, "TBT P99 ms": "tbt_p99_ms",
    "preemptions": "preemptions", "KV used": "mean_kv_used_fraction",
}  # fmt: skip
_SLO_SHOWN = {"SLO met": evidence.ATTAINMENT, "goodput req/s": "goodput_requests_per_s"}
_FEW = 60
"""Requests by which it is seen what a run measures."""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0, 2 if a flag or the trace is wrong, 3 if a run failed or left something out, 130 on Ctrl-C."""
    return guarded(_parser(), _plan, argv, again=GOES_ON)


def _plan(args: argparse.Namespace) -> int:
    base, own_rate = server_as_it_is(args)
    if args.print_spec:
        print(base.model_dump_json(indent=1))
        return 0
    need("vllm")
    loads = search.LOADS if args.loads is None else _loads(args.loads)
    ttft_s = [tier.ttft.base_s for tier in base.workload.tiers if tier.ttft and tier.ttft.base_s]
    short_ms = 1000 * min(ttft_s, default=evidence.SHORT_TTFT_MS / 1000)
    objective = Objective(with_slo=has_objectives(base), tolerance=args.tolerance, short_ttft_ms=short_ms,
                          allow_fp8_kv=args.allow_fp8_kv, constraints=tuple(args.constraint))  # fmt: skip
    workload = build(base.workload)
    parts = parts_of(workload)
    resolved = resolve(base)
    served = ", ".join(f"{name} {value}" for name, value in resolved.limits._asdict().items())
    print(f"{base.workload.source}: {own_rate:.4g} requests/s; {served}, {resolved.num_blocks} KV blocks",
          *workload.source.notes, *_estimated(base, workload), sep="\n", file=sys.stderr, flush=True)  # fmt: skip

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def tell(candidate: Candidate, load: float, outcome: Outcome) -> None:
        if outcome.metrics is None:
            say(f"{PROG}: {load:g} of saturation: {candidate.name}: failed: {outcome.error}")
        elif not args.quiet:
            shown = ", ".join(f"{label} {outcome.metrics.get(name, 0):.4g}" for label, name in _SHOWN.items())
            say(f"{load:g} of saturation: {candidate.name}: {shown}")

    with PointStore(args.cache) as store, local_pool(args.jobs) as pool:
        bench = Bench(base, store, pool, tell)
        try:
            _check_constraints(bench, parts, args.constraint, own_rate)
            saturated = saturation(bench, parts, own_rate)
            objective = replace(objective, own_load=float(f"{saturated.own_load:.3g}"))
            say(f"saturates at {saturated.rate_per_s:.4g} requests/s; your load is {saturated.own_load:.2f} of that")
            coarse = search.search(bench, parts, objective, saturated, args.keep)
            flags = shlex.join(coarse.choice.flags()) or "none"
            say(f"coarse: {coarse.choice.name}; flags: {flags}")
            found = answer(bench, parts, objective, saturated, coarse, loads)
            unsure = None
            if base.cost.kind == "roofline" and found.choice != DEFAULT:
                say("searching the token budget again with the cost model's constants 30 % off")
                unsure = doubt(bench, parts, objective, found.choice, own_rate)
        except NoAnswer as error:
            raise Failed(str(error)) from error
    made = _result(args, base, saturated, found, coarse, unsure, workload)
    everything = [metrics for runs in found.tried.metrics.values() for metrics in runs.values()]
    incomplete = left_out.lines(everything, base, workload)
    price = None if args.price_per_hour is None else args.price_per_hour * base.hardware.tensor_parallel * args.replicas
    sections = _sections(found, saturated, unsure, base, price, parts)
    dropped = [f"dropped: {name}: {why}" for name, why in {**coarse.dropped, **found.rejected}.items()]
    advice = [line for section in sections for line in section.text.splitlines()]
    told = [_table(found, saturated), *incomplete, "", *advice, *dropped]
    writes: list[Callable[[], None]] = [lambda: results.emit(made, told, args.out, as_json=args.json)]
    if args.save is not None:
        writes.append(lambda: tuned.save(_tuned(args, base, found, saturated, workload), args.save))
    if args.plot is not None:
        writes.append(lambda: _draw(found, saturated, base, args.plot))
    if args.html is not None:
        page = _page(made, found, saturated, base, sections, unsure, [*made.config["costs"], *incomplete, *dropped])
        writes.append(lambda: write(page, args.html))
    _write_all(writes)
    return FAILED if found.tried.failed or incomplete or found.unmet else 0


def _write_all(writes: Sequence[Callable[[], None]]) -> None:
    """Write every file that can be written: minutes of work are in each."""
    errors = list[str]()
    for one in writes:
        try:
            one()
        except BrokenPipeError:
            raise
        except OSError as error:
            errors.append(str(error))
    if errors:
        raise Failed("; ".join(errors))


def _check_constraints(bench: Bench, parts: Parts, constraints: Sequence[Constraint], own_rate_per_s: float) -> None:
    """Refuse a constraint on what no run measures, by a run of the first few requests.

    Raises:
        ValueError: the metric is unknown; of a class of service, its last part.
    """
    if not constraints:
        return
    (outcome,) = bench.rates(DEFAULT, parts.search.head(_FEW), [own_rate_per_s])
    metrics = outcome.metrics or {}
    known = {name.rpartition(".")[2] for name in metrics}
    for constraint in constraints:
        if constraint.metric.rpartition(".")[2] not in known:
            constraint.meets(metrics)


def _estimated(base: SimulationSpec, workload: GeneratedWorkload) -> Iterator[str]:
    """What is known before anything is run; nothing of conversations, whose turns find the KV of those before."""
    if not base.workload.conversations and (found := estimate(base, workload)) is not None:
        yield (
            f"in the mean {found.prompt_tokens:.4g} prompt and {found.output_tokens:.4g} output tokens: by these alone "
            f"the server carries some {found.rate_per_s:.3g} requests/s as it is; measuring what it does carry"
        )


def _loads(text: str) -> tuple[float, ...]:
    try:
        loads = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        loads = ()
    if not loads or not all(0 < load <= 100 for load in loads) or loads[0] > evidence.JUDGED_UP_TO:
        raise UsageError(f"--loads {text}: must be numbers above 0, one of them at most 1, separated by commas")
    return loads


def _table(found: Answer, saturated: Saturation) -> Table:
    shown = {**(_SLO_SHOWN if found.objective.with_slo else {}), **_SHOWN}
    rows = []
    for load in sorted(found.tried.metrics[DEFAULT]):
        for candidate in found.tried.metrics:
            if load in found.tried.metrics[candidate]:
                metrics = found.tried.metrics[candidate][load]
                over = [found.over(candidate, load, name) for name in (evidence.MEAN, evidence.P99, evidence.TTFT_P90)]
                compared = (
                    ["", "", ""] if candidate == DEFAULT else [str(over[0]), *(f"{x.value:.2f}" for x in over[1:])]
                )
                rows.append((load, candidate.name, *(metrics.get(name) for name in shown.values()), *compared))
    title = f"load 1 is {saturated.rate_per_s:.4g} requests/s; the last columns: how many times better than as it is"
    return Table(("load", "server", *shown, "mean", "P99", "TTFT P90"), rows, title=title)


def _sections(
    found: Answer, saturated: Saturation, unsure: Doubt | None, base: SimulationSpec, price: float | None, parts: Parts
) -> list[Section]:
    """What is advised, in words."""
    said = {
        "Recommended": _recommended(found, base),
        "What it brings": [
            *_brings(found),
            *_helps(found, saturated),
            *_capacity(found, saturated, price, parts, base.replicas),
        ],
        "Who pays": [f"who pays: {line}" for line in found.who_pays],
        "What is in doubt": [] if unsure is None else _doubted(unsure),
        "What else": _more_memory(base),
    }
    return [Section(title=title, text=text) for title, lines in said.items() if (text := "\n".join(lines))]


def _page(
    made: results.Result, found: Answer, saturated: Saturation, base: SimulationSpec, sections: Sequence[Section],
    unsure: Doubt | None, left_out: Sequence[str],
) -> Page:  # fmt: skip
    what = "share of requests that meet all SLOs" if found.objective.with_slo else "mean end-to-end latency"
    chart = Chart(
        caption=f"Against the load: {what}. Bands: the 95 % interval against the server as it is, by windows",
        alt=f"Lines of the {what} against the request rate, one for each server of the table below",
        draw=lambda path: _draw(found, saturated, base, path),
    )
    runs = Section(title="Every server at every load", charts=[chart], table=_table(found, saturated))
    return Page(
        title=f"What to change for {Path(base.workload.source).name}", verdicts=[*_verdicts(found, unsure)],
        sections=[*sections, runs], left_out=left_out, command=made.command, facts=facts_of(made),
    )  # fmt: skip


def _verdicts(found: Answer, unsure: Doubt | None) -> Iterator[Verdict]:
    choice, load = found.choice, nearest(found.pair)
    if found.unmet:
        yield Verdict(text="no server that was tried keeps to every --constraint at your load", kind="missed")
    if choice == DEFAULT:
        yield Verdict(
            text="leave the server as it is: nothing that was tried is better by more than chance", kind="same"
        )
    else:
        better = found.is_better(choice, load)
        text = f"{choice.name}: {_gains(found, choice, load)} than as it is, at {load:g} of saturation"
        yield Verdict(text=text, kind="unknown" if better is None else "better" if better else "worse")
    yield from (Verdict(text=line, kind="worse") for line in found.who_pays)
    if unsure is not None and unsure.flips:
        yield Verdict(text="the best token budget depends on constants that nobody measured", kind="unknown")


def _recommended(found: Answer, base: SimulationSpec) -> Iterator[str]:
    choice = found.choice
    if found.unmet:
        yield "no server that was tried, and is allowed, keeps to every --constraint at your load; without them:"
    elif DEFAULT.name in found.rejected:
        yield f"the server as it is does not keep to the constraints: {found.rejected[DEFAULT.name]}"
    if choice == DEFAULT:
        yield "recommended: leave the server as it is: nothing that was tried is better by more than chance"
    else:
        yield f"recommended: {choice.name}: set these flags"
    yield f"  {command_of(base, choice)}"
    yield from (f"not in the command: {line}" for line in not_in_command(base, choice))
    if choice.system.needs:
        yield f"needs: {choice.system.needs}"


def _helps(found: Answer, saturated: Saturation) -> Iterator[str]:
    """From which load on the choice is better, and which load the trace has."""
    if found.choice != DEFAULT:
        start = found.helps_from
        yield (
            f"it is better for certain from {start:g} of saturation on" if start else "it is not better at all loads"
        )
        load, own = found.objective.own_load, found.tried.metrics[found.choice]
        measured = f"; there {_gains(found, found.choice, load)}" if load in own and load not in found.pair else ""
        yield f"your trace has {saturated.own_load:.2f} of it ({saturated.own_rate_per_s:.3g} requests/s){measured}"


def _more_memory(base: SimulationSpec) -> Iterator[str]:
    memory = base.hardware.gpu_memory_utilization
    if base.engine.num_blocks is None and base.hardware.kv_memory_bytes is None and memory < 0.95:
        more = with_values(base, {"hardware.gpu_memory_utilization": 0.95})
        gain = resolve(more).num_blocks / resolve(base).num_blocks - 1
        yield f"advice: --gpu-memory-utilization 0.95, if it fits, holds {100 * gain:.0f} % more KV than {memory:g}"


def _brings(found: Answer) -> Iterator[str]:
    """What each change brings by itself, and together, at the load nearest to `SHOWN_AT`."""
    load, choice = nearest(found.pair), found.choice
    shown = {label: one for label, one in parts_of_choice(choice).items() if one not in (DEFAULT, choice)}
    shown |= {"together" if shown else "this": choice} if choice != DEFAULT else {}
    fp8 = [one for one in found.tried.metrics if one.fp8_kv and one != choice]
    why = "--kv-cache-dtype fp8 changes the model's answers: vllm-ext quality MODEL says by how much"
    shown |= {f"{one.name} ({why})": one for one in fp8}
    for label, candidate in shown.items():
        if load in found.tried.metrics.get(candidate, {}):
            yield f"at {load:g} of saturation, {label}: {_gains(found, candidate, load)}"


_WHAT = {
    evidence.ATTAINMENT: "in the share of met objectives",
    evidence.MEAN: "times better in the mean end-to-end latency",
}


def _gains(found: Answer, candidate: Candidate, load: float) -> str:
    """How much better a candidate is by each measure of the objective; what is certain needs the A/A pair of a load."""
    return " and ".join(
        f"{found.compared(candidate, load, metric)} {_WHAT[metric]}"
        + ("" if load not in found.pair or found.is_difference(candidate, load, metric) else ": no difference")
        for metric in found.objective.metrics
    )


def _capacity(found: Answer, saturated: Saturation, price: float | None, parts: Parts, replicas: int) -> Iterator[str]:
    """What is carried, and at a price per hour of all devices what that costs."""
    before, now = found.carries_per_s
    counted = "conversations" if parts.counted(1.0) < 1 else "requests"
    if found.choice != DEFAULT:
        yield f"it carries {now:.3g} {counted}/s, {now / before:.2f} times what the server carries as it is"
    if price is None:
        return
    runs = found.tried.metrics[found.choice]
    run = runs[nearest(found.pair)]
    tokens = run["output_tokens"] / run["requests"]
    for label, rate in {"as it is": before, "recommended": now}.items():
        if label == "as it is" or found.choice != DEFAULT:
            cost, servers = (
                price / 3600 / rate * parts.counted(1.0),
                math.ceil(replicas * saturated.own_rate_per_s / rate),
            )
            per_token = f"{1e6 * cost / tokens:.3g} per million output tokens"
            needed = f"your load needs {servers} server{'s' if servers > 1 else ''}"
            yield f"cost {label}, at capacity: {1000 * cost:.3g} per 1,000 requests, {per_token}; {needed}"


def _doubted(unsure: Doubt) -> Iterator[str]:
    yield "by a cost model; the right budget hangs on constants that it does not know, which vllm-ext profile measures"
    if unsure.flips:
        low, high = min(unsure.budgets.values()), max(unsure.budgets.values())
        cases = ", ".join(f"{tokens} if {case}" for case, tokens in unsure.budgets.items() if tokens != unsure.tokens)
        low, high = min(low, unsure.tokens), max(high, unsure.tokens)
        yield f"with constants 30 % off the best budget is between {low} and {high} tokens: {cases}"
    else:
        yield f"with constants 30 % off, {unsure.tokens} tokens stay the best budget"


def _result(
    args: argparse.Namespace, base: SimulationSpec, saturated: Saturation, found: Answer, coarse: Coarse,
    unsure: Doubt | None, workload: GeneratedWorkload,
) -> results.Result:  # fmt: skip
    metrics = {"own_rate_per_s": saturated.own_rate_per_s, "saturation_per_s": saturated.rate_per_s,
               "carries_per_s": found.carries_per_s[1], "carries_as_it_is_per_s": found.carries_per_s[0]}  # fmt: skip
    baseline, metric = dict[str, float](), found.objective.metrics[0]
    for candidate, runs in found.tried.metrics.items():
        into, prefix = (baseline, "") if candidate == DEFAULT else (metrics, f"{candidate.name}.")
        for load, run in runs.items():
            into |= {f"{prefix}load_{load:g}.{name}": value for name, value in run.items()}
    config = {
        "spec": base.model_dump(mode="json"), "loads": sorted(found.pair), "recommended": found.choice.name,
        "flags": spec_flags.public(found.choice.flags()), "command": spec_flags.public(command_of(base, found.choice)),
        "not_in_command": [*not_in_command(base, found.choice)],
        "costs": spec_flags.public(notes(base.hardware, base.cost)), "helps_from": found.helps_from,
        "who_pays": found.who_pays,
        "constraints": [str(one) for one in found.objective.constraints], "constraints_hold": not found.unmet,
        "over_as_it_is": {
            candidate.name: {f"{load:g}": str(found.compared(candidate, load, metric)) for load in runs}
            for candidate, runs in found.tried.metrics.items()
        },
        "a_a_pair": {
            f"{load:g}": str(evidence.compared(run, found.tried.metrics[DEFAULT][load], metric))
            for load, run in found.pair.items()
        },
        "dropped": {**coarse.dropped, **found.rejected}, "failed": sorted(one.name for one in found.tried.failed),
        "budgets_if_costs_are_30_percent_off": None if unsure is None else dict(unsure.budgets),
    }  # fmt: skip
    return spec_flags.result("plan", args.command_line, base, workload, config, metrics, {DEFAULT.name: baseline})


def _tuned(
    args: argparse.Namespace, base: SimulationSpec, found: Answer, saturated: Saturation, workload: GeneratedWorkload
) -> tuned.Tuned:
    choice, hardware = found.choice, resolve(base).hardware
    profile = {"profile": "auto"} if base.engine.profiled else {}
    options = {} if choice.system is AS_IT_IS else {**choice.on(base).engine.options, **profile}
    limits = resolve(choice.on(base)).limits
    over = {load: [found.over(choice, load, name) for name in (evidence.MEAN, evidence.P99, evidence.TTFT_P90)]
            for load in sorted(found.pair)}  # fmt: skip
    return tuned.Tuned(
        made_for=tuned.For(
            model=without_folder(base.hardware.model), layers=hardware.model.layers, hidden=hardware.model.hidden,
            device=hardware.device.name, device_memory_gib=hardware.device.memory_bytes / (1 << 30),
            tensor_parallel_size=base.hardware.tensor_parallel,
        ),
        settings=tuned.Settings(
            scheduler_cls=None if choice.system is AS_IT_IS else choice.system.system,
            max_num_batched_tokens=limits.max_num_batched_tokens if choice.tokens else None,
            max_num_seqs=limits.max_num_seqs if choice.seats or choice.tokens else None,
            watermark=choice.reserve, kv_cache_dtype="fp8" if choice.fp8_kv else None, options=options,
        ),
        measured=tuned.Measured(
            command=spec_flags.command_line(args.command_line), trace=Path(workload.name).name,
            trace_sha256=workload.sha256, costs="a cost model" if base.cost.file is None else Path(base.cost.file).name,
            vllm=versions().get("vllm", ""), vllm_ext=vllm_ext.__version__,
            saturation_requests_per_s=saturated.rate_per_s,
        ),
        expected=tuple(
            tuned.Expected(load=load, mean_e2e=mean.value, mean_e2e_low=mean.low, mean_e2e_high=mean.high,
                           p99_e2e=p99.value, p90_ttft=ttft.value)
            for load, (mean, p99, ttft) in over.items()
        ),
    )  # fmt: skip


def _draw(found: Answer, saturated: Saturation, base: SimulationSpec, path: Path) -> None:
    hardware, metric = base.hardware, found.objective.metrics[0]
    devices = f"{hardware.tensor_parallel} x {hardware.device}" if hardware.tensor_parallel > 1 else hardware.device
    series = []
    for candidate, runs in found.tried.metrics.items():
        points: Mapping[float, float] = {load: runs[load][metric] for load in sorted(runs) if metric in runs[load]}
        rates = [load * saturated.rate_per_s for load in points]
        bands = zip(*(found.compared(candidate, load, metric).band(y) for load, y in points.items()), strict=True)
        low, high = bands if points and candidate != DEFAULT else ((), ())
        series.append(Series(label=candidate.name, x=rates, y=list(points.values()), low=low, high=high))
    lines(
        series, path,
        title=f"{Path(base.workload.source).name}\n{Path(hardware.model).name} on {devices}",
        xlabel="request rate (requests/s)",
        ylabel="share of requests that meet all SLOs" if found.objective.with_slo else "mean end-to-end latency (ms)",
        log_y=not found.objective.with_slo,
    )  # fmt: skip


def _constraint(text: str) -> Constraint:
    try:
        return Constraint.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _kept(text: str) -> frozenset[str]:
    names = frozenset(part.strip() for part in text.split(","))
    if unknown := sorted(names.difference(CHANGED)):
        raise argparse.ArgumentTypeError(f"{unknown[0]}: must be among {', '.join(CHANGED)}")
    return names


def _parser() -> Parser:
    parser = Parser(
        prog=PROG,
        description="Search what to change on a vLLM that serves your trace: token budget, seats, reserve, scheduler.",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="your trace, with its recorded arrivals")
    parser.add_argument(
        "--loads", metavar="X,Y",
        help="loads of the final table, as multiples of saturation (default: 0.5,0.7,0.9,1,1.2)",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", default=0.05, metavar="SHARE",
        type=common_flags.number(lambda value: 0 <= value < 100, "a number of at least 0, such as 0.05"),
        help="by how much the P99 of the end-to-end latency may get worse (default: 0.05)",
    )  # fmt: skip
    parser.add_argument(
        "--constraint", action="append", default=[], type=_constraint, metavar="METRIC<=X",
        help="what must hold at your trace's own load, such as ttft_p99_ms<=500; repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--keep", default=(), type=_kept, metavar="X,Y", help=f"what must stay as it is, of {', '.join(CHANGED)}"
    )
    parser.add_argument(
        "--price-per-hour",
        type=common_flags.number(lambda value: 0 < value < math.inf, "a number above 0"),
        metavar="P",
        help="of a device: tells what requests and tokens cost",
    )
    parser.add_argument(
        "--allow-fp8-kv", action="store_true",
        help="let KV in 8 bits be recommended, which changes the model's answers (default: it is shown only)",
    )  # fmt: skip
    parser.add_argument(
        "--save", type=common_flags.output_file(), metavar="FILE",
        help="write the settings for vllm serve --ext-tuned FILE",
    )  # fmt: skip
    parser.add_argument(
        "--replicas", type=common_flags.at_least(1), default=1, metavar="N",
        help="equal servers that share the load, by vllm-ext cluster serve (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--router", choices=list(ROUTERS), default="", metavar="NAME",
        help=f"of these: {', '.join(ROUTERS)} (default: marginal; vLLM as it is has round-robin)",
    )  # fmt: skip
    spec_flags.add_arguments(
        parser, systems=False, defaults={"hardware.gpu_memory_utilization": VLLM_MEMORY_UTILIZATION}
    )
    common_flags.add(
        parser, "jobs", "cache", "out", "json", "html", quiet="no line per simulation",
        plot="draw the objective against the rate (.png or .svg)",
    )  # fmt: skip
    return parser
