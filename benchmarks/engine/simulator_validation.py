"""The simulator against the real engine: how far off are predicted latencies, and are the decisions the same?

Method: `engine_compare.py` serves requests on the real engine and records every step. The recording that is judged
holds repeats of the same requests at the same times; each is repeated exactly in virtual time (every decision must be
equal, given the recorded clock readings and tokens) and predicted from its arrivals, prompts and lengths alone. The
distance between the repeats themselves is what the machine's noise allows at best, and is reported beside the errors.

Step times and two constants for the front end are fitted twice: on another recording, of other requests and another
start of the engine (the result's metrics), and on the first half of each run, of which then the second half is judged
(the baseline "fitted on its own first half"). A machine whose speed drifts between recordings tells the two apart.

The model is random and of some 25 million parameters: steps of the embedded one take 3 ms, of which the operating
system's noise is a large part.

    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/engine/simulator_validation.py \\
        --max-foreign-cores 0.1 --out benchmarks/results/simulator_validation.json
    python benchmarks/engine/simulator_validation.py --quick

With ``--quick`` one short run of the embedded model is recorded, its first half fitted and its second half predicted.
``--from FOLDER`` judges recordings that ``--keep`` left there. Options that are not listed here go to
`engine_compare.py`: systems, loads and numbers of requests, the data set, the engine. The environment is passed on.

Output: a table on stderr, with the real engine's own distance below each line; the last line on stdout is the result.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import engine_compare

from vllm_ext.report import common_flags, results
from vllm_ext.report.table import Table
from vllm_ext.simulation.recorded import validation as reports

_FIT_SEED = 1000
"""Added to the seed of the requests that are fitted, so that they are others."""
OWN_HALF = "fitted on its own first half"
MODEL = (
    '{"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8, '
    '"num_key_value_heads": 4, "head_dim": 64}'
)
FULL = (
    "--synthetic", "sharegpt-vllm", "--length-scale", "0.25", "--hf-overrides", MODEL, "--load-format", "dummy",
    "--systems", "upstream-fcfs,alise", "--loads", "0.5,0.8", "--num-requests", "180", "--history-requests", "20",
)  # fmt: skip
"""Passed to `engine_compare.py` before the options from the command line."""
QUICK = (
    "--systems", "upstream-fcfs", "--loads", "0.8", "--num-requests", "80", "--history-requests", "20",
    "--capacity", "20",
)  # fmt: skip
"""The same with ``--quick``. Capacity: requests/s of the tiny model on two slow cores; measuring it would take another
engine."""


def main(argv: Sequence[str]) -> None:
    """Record, replay, predict and report; exits with status 1 if a replay decided otherwise."""
    args, rest = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="simulator_validation-") as folder:
        kept = args.recorded or args.keep or Path(folder)
        recording = kept / "validate.jsonl.gz"
        fit_on = None if args.quick else kept / "fit.jsonl.gz"
        if args.recorded is None:
            _record_all(args, rest, recording, fit_on)
        print("replaying and predicting", file=sys.stderr, flush=True)
        logging.getLogger("vllm").setLevel(logging.ERROR)
        report, result, tables = _judge(args, argv, recording, fit_on)
    results.emit(result, tables, args.out)
    if report.divergences():
        raise SystemExit("simulator_validation: a replay decided otherwise:\n" + "\n".join(report.divergences()))


def _record_all(args: argparse.Namespace, rest: Sequence[str], recording: Path, fit_on: Path | None) -> None:
    if fit_on is None:
        _record([*QUICK, *rest], recording, seed=args.seed, repeats=1)
        return
    found = _record([*FULL, *rest], fit_on, seed=args.seed + _FIT_SEED, repeats=1)
    capacity = ["--capacity", str(found.metrics["capacity_requests_per_s"]), "--same-requests"]
    _record([*FULL, *rest, *capacity], recording, seed=args.seed, repeats=args.repeats)


def _record(options: Sequence[str], path: Path, *, seed: int, repeats: int) -> results.Result:
    argv = [*options, "--seed", str(seed), "--repeats", str(repeats), "--record", str(path)]
    with contextlib.redirect_stdout(sys.stderr):
        found, table = engine_compare.measure(engine_compare.parse(argv), argv)
    print(table, file=sys.stderr, flush=True)
    return found


def _judge(
    args: argparse.Namespace, argv: Sequence[str], recording: Path, fit_on: Path | None
) -> tuple[reports.Report, results.Result, list[Table]]:
    """Both reports; the one with the fit of another recording is the result, the other a baseline of it."""
    runs = reports.load(recording)
    own = reports.make_report(runs, replays=fit_on is None)
    main = own if fit_on is None else reports.make_report(runs, reports.load(fit_on))

    def made(report: reports.Report, fitted: Path | None) -> results.Result:
        return reports.make_result(
            report,
            recording,
            fitted,
            name="simulator_validation",
            command=results.command(argv, __file__),
            seed=args.seed,
            note=args.note,
        )

    result = made(main, fit_on)
    tables = [reports.make_table(main)]
    if fit_on is not None:
        halves = made(own, None)
        result = dataclasses.replace(
            result,
            baselines={**result.baselines, OWN_HALF: halves.metrics},
            claims=[*result.claims, *(dataclasses.replace(c, name=f"{OWN_HALF}: {c.name}") for c in halves.claims)],
        )
        tables.append(dataclasses.replace(reports.make_table(own), title=f"{OWN_HALF}:"))
    return main, result, tables


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    common_flags.add(parser, "out", "quick", "seed")
    parser.add_argument(
        "--repeats", type=common_flags.at_least(1), default=2, help="runs of the same requests (default: %(default)s)"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings there")
    parser.add_argument(
        "--from", dest="recorded", type=Path, metavar="FOLDER", help="judge the recordings that --keep left there"
    )
    parser.add_argument("--note", default="", help="why a goal is missed, if one is; put before the measured facts")
    return parser.parse_known_args(list(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
