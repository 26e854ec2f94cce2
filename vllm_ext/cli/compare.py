"""`vllm-ext compare`: is another server better for these requests, by how much, and is that more than chance?"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vllm_ext import systems
from vllm_ext.cli import spec_flags
from vllm_ext.cli.command import FAILED, GOES_ON, Failed, Parser, UsageError, guarded, need, split
from vllm_ext.compare.observed import pooled
from vllm_ext.compare.rounds import Asked, Cells, Found, NoAnswer, compare
from vllm_ext.compare.servers import Backend, Clocked, Here, Row, There
from vllm_ext.compare.shown import COUNTED, Shown
from vllm_ext.envs import cache_dir
from vllm_ext.report import common_flags, results
from vllm_ext.report.page import write
from vllm_ext.simulation.cost.spec import CostSpec, HardwareSpec, notes
from vllm_ext.simulation.spec import parse
from vllm_ext.simulation.workloads.build import GeneratedWorkload, build
from vllm_ext.simulation.workloads.spec import WorkloadSpec

PROG = "vllm-ext compare"
UPSTREAM, TUNED = "upstream", "upstream-tuned"
_AGAIN = ", again"
_WORKLOAD, _HARDWARE, _COST = _PARTS = "workload.", "hardware.", "cost."
_QUIET = 0.2
"""Cores that others may keep busy without a word."""
_NOT_ONE = 1
"""Exit status where no server is better than the baseline."""


def main(argv: Sequence[str]) -> int:
    """Run the command; 0 if a server is better than the baseline, 1 if none is, 2 usage, 3 failed or incomplete."""
    return run(argv)


def run(argv: Sequence[str], told: Callable[[Shown, results.Result], None] | None = None) -> int:
    """Run the command; see `main`.

    Args:
        argv: The command line.
        told: Gets what was found, instead of what would print it.
    """
    ours, passed = split(argv)
    return guarded(_parser(passed), partial(_compare, told=told), ours, again=GOES_ON)


def _compare(args: argparse.Namespace, told: Callable[[Shown, results.Result], None] | None) -> int:
    need("vllm")
    for path, value in spec_flags.set_by(
        args, [name for name, found in vars(args).items() if found is not None]
    ).items():
        if not path.startswith(_PARTS):
            raise UsageError(f"--set {path}: must begin with one of {', '.join(_PARTS)}")
        setattr(args, path, value)
    first, *others = _rows(args)
    workload = build(_workload(args))  # what can't be read is said before a server is started
    asked = Asked(
        baseline=first, twin=replace(first, name=first.name + _AGAIN), others=others, workload=workload.spec,
        loads=args.loads, requests=args.requests, precision=args.precision, budget_s=60 * args.budget_minutes,
        rate_per_s=args.rate_at_1, seats=_seats(args.passed) if any(row.tune for row in others) else 0,
    )  # fmt: skip
    folder: Path = args.cells
    folder.mkdir(parents=True, exist_ok=True)
    backend = _backend(args, folder)
    costs = [*_clock_notes(args)]  # what can't be read is said before hours of runs, not behind them
    cells = Cells(folder, _identity(args, workload))
    found = Found()
    incomplete = False
    try:
        compare(backend, cells, asked, lambda text: print(text, file=sys.stderr, flush=True), found)
    except NoAnswer as error:
        incomplete, found.stopped = True, str(error)
    except KeyboardInterrupt:
        incomplete, found.stopped = True, "interrupted; the same command goes on with the rest"
    if not found.runs:
        raise Failed(found.stopped)
    found = found.whole_repeats(asked)
    notes = [*costs, *_foreign_notes(args, found), *_kept_notes(args, found)]
    shown = Shown(asked, found, list(found.verdicts(asked)), notes)
    made = _result(args, shown, workload)
    if told is None:
        results.emit(made, [shown.table(), "", *shown.words()], args.out, as_json=args.json)
    else:
        told(shown, made)
    if args.html is not None:
        write(shown.page(made), args.html)
    if incomplete or found.failed or not shown.verdicts:
        return FAILED
    return 0 if any(shown.is_better(row.name) for row in others) else _NOT_ONE


def _identity(args: argparse.Namespace, workload: GeneratedWorkload) -> str:
    """What a run depends on besides its server's own flags and the times of its requests."""
    costs = [spec_flags.given(args, prefix) for prefix in (_HARDWARE, _COST)]
    return repr([args.model, args.passed, args.clock, args.step_noise, costs, workload.sha256, results.versions()])


def _rows(args: argparse.Namespace) -> list[Row]:
    """The baseline, and the others."""
    given = args.url or ()
    if given and (args.systems or args.server or args.model or args.passed or args.clock == "engine"):
        raise UsageError("--url: servers that run have their flags; MODEL, --systems, --server, --clock and what "
                         "stands behind -- are for servers that are started here")  # fmt: skip
    if given:
        found = [Row(name, url=url.rstrip("/")) for name, url in given]
    else:
        if not args.model:
            raise UsageError("MODEL: must be named, or servers that run with --url NAME=URL")
        listed = [one.strip() for one in (args.systems or f"{UPSTREAM},alise").split(",")]
        for one in listed:
            if one and one not in (UPSTREAM, TUNED) and "." not in one:
                systems.resolve(one)  # not when the baseline has been served
        named = [(one, () if one in (UPSTREAM, TUNED) else ("--scheduler-cls", one)) for one in listed]
        found = [Row(name, flags, tune=name == TUNED) for name, flags in (*named, *(args.server or ()))]
    flags = "--url" if given else "--systems, --server"
    if len(found) < 2 or not all(row.name for row in found):
        raise UsageError(f"{flags}: must name at least two servers, the baseline first")
    names = [row.name for row in found]
    for name in names:
        if names.count(name) > 1 or name == names[0] + _AGAIN or "/" in name:
            raise UsageError(
                f"{flags}: {name}: must be a name of one server only, without / and not {names[0]}{_AGAIN}"
            )
    if found[0].tune:
        raise UsageError(f"--systems: {TUNED} must not be the first: its flags are searched at the baseline's load")
    return found


def _seats(passed: Sequence[str]) -> int:
    """Return how many requests the servers run at a time: what was passed, else vLLM's default on this device."""
    for at, word in enumerate(passed):
        name, equals, value = word.partition("=")
        if name == "--max-num-seqs" and (equals or passed[at + 1 : at + 2]):
            return int(value if equals else passed[at + 1])
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    return int(EngineArgs.get_batch_defaults(1)[1][UsageContext.OPENAI_API_SERVER])


def _workload(args: argparse.Namespace) -> WorkloadSpec:
    values = {
        "rate_per_s": 1.0,
        "over_context": "cut",
        "num_requests": args.requests,
        **spec_flags.given(args, _WORKLOAD),
    }
    if args.trace is not None:
        values |= {"source": str(args.trace), "arrivals": values.get("arrivals", "recorded")}
    return parse(WorkloadSpec, values)


def _backend(args: argparse.Namespace, folder: Path) -> Backend:
    if args.url:
        return There(folder)
    if args.clock == "wall":
        return Here(args.model, args.passed, folder)
    return Clocked(args.model, args.passed, folder, _hardware(args), _cost(args), args.step_noise)


def _clock_notes(args: argparse.Namespace) -> Iterator[str]:
    if args.clock == "engine":
        yield f"by the engine's clock: {_costs(args)}; tokens are computed, how long a step takes is said by the model"
        yield from notes(_hardware(args) if spec_flags.given(args, _HARDWARE) else None, _cost(args))


def _foreign_notes(args: argparse.Namespace, found: Found) -> Iterator[str]:
    if args.clock == "wall" and not args.url and found.foreign_cores > _QUIET:
        yield f"others kept up to {found.foreign_cores:.1f} cores busy: repeat it where nobody else computes"


def _kept_notes(args: argparse.Namespace, found: Found) -> Iterator[str]:
    made = [run.kept for each in found.beside.values() for run in each.values()]
    if args.url and any(made):
        yield (f"{sum(made)} of {len(made)} runs are of an earlier command: if a server was restarted since "
               "with other flags, give another --cells")  # fmt: skip


def _hardware(args: argparse.Namespace) -> HardwareSpec:
    return parse(HardwareSpec, spec_flags.given(args, _HARDWARE))


def _cost(args: argparse.Namespace) -> CostSpec:
    given = spec_flags.given(args, _COST)
    return parse(CostSpec, given | ({"kind": "fitted"} if "file" in given else {}))


def _costs(args: argparse.Namespace) -> str:
    hardware = _hardware(args)
    file = spec_flags.given(args, _COST).get("file")
    return f"steps of {hardware.model} on {hardware.device}" + (f", fitted to {Path(file).name}" if file else "")


def _result(args: argparse.Namespace, shown: Shown, made: GeneratedWorkload) -> results.Result:
    asked, found = shown.asked, shown.found
    flat: dict[str, dict[str, float]] = {}
    for (name, load), runs in found.runs.items():
        values = pooled([*runs.values()])
        counts = {key: shown.counted(name, load, key) for key in COUNTED}
        values |= {key: count for key, count in counts.items() if count is not None}
        flat.setdefault(name, {}).update({f"load_{load:g}.{key}": value for key, value in values.items()})
    ours = asked.others[0].name
    config = {
        "servers": {row.name: list(found.flags.get(row.name, row.flags)) for row in asked.rows},
        "flags_of_all": args.passed, "clock": args.clock, "workload": asked.workload.model_dump(mode="json"),
        "loads": list(asked.loads), "requests_per_run": asked.requests, "rate_per_s_of_load_1": found.rate_per_s,
        "stopped": found.stopped, "failed": found.failed,
        "foreign_cores_at_most": found.foreign_cores,
        "verdicts": [
            {"server": one.server, "load": one.load, "measure": one.measure, "kind": one.kind,
             "times_better": str(one.ratio), "a_a_pair": str(one.noise)}
            for one in shown.verdicts if math.isfinite(one.ratio.value)
        ],
    }  # fmt: skip
    return results.Result(
        name="compare", command=spec_flags.command_line([*args.command_line, *(["--", *args.passed] if args.passed
                                                                               else [])]),
        config=spec_flags.public(config), seed=asked.workload.seed, metrics=flat.get(ours, {}),
        workload=results.Workload(name=Path(made.name).name, rows=made.rows, sha256=made.sha256),
        baselines={name: values for name, values in flat.items() if name != ours},
    )  # fmt: skip


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise argparse.ArgumentTypeError(f"{text}: must be NAME=VALUE")
    return name, value


def _server(text: str) -> tuple[str, tuple[str, ...]]:
    name, flags = _named(text)
    try:
        return name, tuple(shlex.split(flags))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _loads(text: str) -> tuple[float, ...]:
    try:
        found = tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or not all(0 < one <= 10 for one in found):
        raise argparse.ArgumentTypeError(f"{text}: must be numbers above 0 and up to 10, separated by commas")
    return found


_ABOVE_0 = common_flags.number(lambda value: 0 < value < math.inf, "a number above 0")
_SHARE = common_flags.number(lambda value: 0 <= value < 1, "a number of at least 0 and below 1")


def _parser(passed: list[str]) -> Parser:
    parser = Parser(
        prog=PROG,
        description="Send the same requests to servers, vLLM's own first, and say which is better and whether that is "
        "more than chance. What stands behind -- goes to each `vllm serve`.",
    )
    parser.set_defaults(passed=passed)
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what `vllm serve` serves")
    parser.add_argument(
        "--systems", metavar="A,B", help="servers by what --scheduler-cls takes, the baseline first; upstream is vLLM "
        "as it is, upstream-tuned with the best of its own flags, which are searched (default: upstream,alise)",
    )  # fmt: skip
    parser.add_argument("--server", action="append", type=_server, metavar="NAME=FLAGS",
                        help="a further server, by flags of `vllm serve` of its own; repeatable")  # fmt: skip
    parser.add_argument("--url", action="append", type=_named, metavar="NAME=URL",
                        help="a server that runs, the baseline first; repeatable, instead of MODEL")  # fmt: skip
    parser.add_argument("--trace", type=Path, metavar="FILE", help="your trace, with its recorded arrivals")
    parser.add_argument("--slo", dest=f"{_WORKLOAD}tiers", type=spec_flags.slo, metavar="ttft=S,tbt=S,e2e=S",
                        help="objectives of every request in seconds")  # fmt: skip
    parser.add_argument("--loads", type=_loads, default=(0.7, 0.9, 1.0), metavar="X,Y",
                        help="multiples of what the baseline carries (default: 0.7,0.9,1)")  # fmt: skip
    parser.add_argument("--rate-at-1", type=_ABOVE_0, metavar="R",
                        help="requests (conversations) per second of load 1 (default: measured)")  # fmt: skip
    parser.add_argument("--requests", type=common_flags.at_least(20), default=300, metavar="N",
                        help="requests (conversations) of each run (default: 300)")  # fmt: skip
    parser.add_argument("--precision", type=_ABOVE_0, default=0.05, metavar="SHARE",
                        help="half width of the intervals that is enough (default: 0.05)")  # fmt: skip
    parser.add_argument("--budget-minutes", type=_ABOVE_0, default=30.0, metavar="M",
                        help="no run begins after so long (default: 30)")  # fmt: skip
    parser.add_argument("--clock", choices=("wall", "engine"), default="wall",
                        help="engine: tokens are computed here, and steps take what a cost model says of --device or "
                        "--profile; the API server is left out (default: wall)")  # fmt: skip
    parser.add_argument(
        "--cells",
        type=common_flags.output_folder,
        default=cache_dir() / "compare",
        metavar="DIR",
        help="where runs and logs are kept, so that the same command goes on (default: the cache)",
    )
    spec_flags.add_flags(parser, WorkloadSpec, _WORKLOAD, "requests")
    spec_flags.add_set(parser, "workload.cv=2.0")
    clock = parser.add_argument_group("the engine's clock")
    clock.add_argument("--model-costs", dest=f"{_HARDWARE}model", metavar="MODEL", help="whose steps (default: 8B)")
    clock.add_argument("--device", dest=f"{_HARDWARE}device", metavar="NAME", help="on which device")
    clock.add_argument("--step-noise", type=_SHARE, default=0.05, metavar="SHARE",
                       help="how far steps are off what the model says, at random (default: 0.05)")  # fmt: skip
    clock.add_argument("--profile", dest=f"{_COST}file", metavar="FILE", help="of `vllm-ext profile`")
    parser.flag_of[f"{_COST}file"] = "--profile"
    common_flags.add(parser, "out", "json", "html")
    return parser
