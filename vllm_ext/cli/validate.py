"""`vllm-ext validate`: the simulator against a recorded run of the real engine."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ext.cli import spec_flags
from vllm_ext.cli.command import Parser, guarded
from vllm_ext.report import common_flags, plots, results

if TYPE_CHECKING:
    from vllm_ext.simulation.recorded.validation import Report


def main(argv: Sequence[str]) -> int:
    """Run the command; 1 if a replay decided otherwise than the recorded run, 2 if the recording can't be used."""
    return guarded(_parser(), _validate, argv)


def _validate(args: argparse.Namespace) -> int:
    from vllm_ext.simulation.cost.spec import HardwareSpec
    from vllm_ext.simulation.recorded import validation as reports
    from vllm_ext.simulation.spec import parse

    logging.getLogger("vllm").setLevel(logging.ERROR)  # it describes every configuration it builds
    runs = reports.load(args.recording, args.system)
    fit_on = reports.load(args.fit_on) if args.fit_on is not None else None
    given = {name: value for name in ("model", "device") if (value := getattr(args, name)) is not None}
    hardware = parse(HardwareSpec, given) if given else None
    report = reports.make_report(runs, fit_on, replays=not args.no_replay, hardware=hardware)
    command = spec_flags.command_line(args.command_line)
    result = reports.make_result(report, args.recording, args.fit_on, name="validate", command=command)
    if args.save_cost is not None:
        report.validations[0].fit.cost.save(args.save_cost)
    if args.plot is not None:
        _plot(report, args.plot)
    results.emit(result, [reports.make_table(report)], args.out)
    for divergence in report.divergences():
        print(f"the replay differs: {divergence}", file=sys.stderr)
    return 1 if report.divergences() else 0


def _parser() -> Parser:
    parser = Parser(
        prog="vllm-ext validate",
        description="Repeat recorded runs of the real engine exactly, predict them from their arrivals alone, and "
        "report how far prediction and measurement differ. benchmarks/engine/record_run.py writes a recording.",
    )
    parser.add_argument("recording", type=Path, metavar="RECORDING", help="file of recorded runs (.jsonl or .jsonl.gz)")
    parser.add_argument(
        "--fit-on", type=Path, metavar="OTHER",
        help="fit step times on this recording; default: the first half of each run, of which then the rest is judged",
    )  # fmt: skip
    parser.add_argument("--system", metavar="NAME", help="validate the runs of this system only")
    parser.add_argument("--no-replay", action="store_true", help="leave out the exact replay")
    parser.add_argument(
        "--save-cost", type=Path, metavar="FILE", help="keep the fitted cost model (of the first run) for simulations"
    )
    tier = parser.add_argument_group("of runs with a KV tier, whose copies depend on it; values as for `simulate`")
    tier.add_argument("--model", metavar="NAME|PATH|ID", help="what the engine served")
    tier.add_argument("--device", metavar="NAME|NUMBERS", help="what it ran on")
    common_flags.add(parser, "out", plot="draw predicted and measured latencies (.png, .svg)")
    return parser


def _plot(report: Report, path: Path) -> None:
    series = []
    for one in report.validations:
        for label, observed in (("measured", one.measured), ("predicted", one.predicted)):
            values = [timeline.e2e_s for timeline in observed.timelines]
            series.append(plots.empirical_cdf(f"{one.run.label}, {label}", values))
    plots.cdf(series, path, xlabel="end-to-end latency (s)", title="predicted and measured", log_x=True)
