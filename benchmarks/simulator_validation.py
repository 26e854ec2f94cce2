"""The simulator against the real engine: how far off are predicted latencies, and are the decisions the same?

Method: `engine_compare.py` serves requests on the real engine and records every step. One recording, of other requests,
gives the step times and two constants for the front end. The other recording holds repeats of the same requests at the
same times; each is repeated exactly in virtual time (every decision must be equal, given the recorded clock readings
and tokens) and predicted from its arrivals, prompts and lengths alone. The distance between the repeats themselves is
what the machine's noise allows at best, and is reported beside the errors.

    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/simulator_validation.py \\
        --max-foreign-cores 0.1 --out benchmarks/results/simulator_validation.json
    python benchmarks/simulator_validation.py --quick

With ``--quick`` one short run is recorded, its first half fitted and its second half predicted. Options that are not
listed here go to `engine_compare.py`: the data set, the engine, its seats and blocks. The environment is passed on.

Output: a table on stderr, with the real engine's own distance below each line; the last line on stdout is the result.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import engine_compare

from vllm_ext.observability import results
from vllm_ext.simulation import validation_report as reports

_FIT_SEED = 1000
"""Added to the seed of the requests that are fitted, so that they are others."""
_QUICK_CAPACITY = "20"
"""Requests/s of the tiny model on two slow cores; measuring it would take another engine."""
QUICK = {"systems": "upstream-fcfs", "loads": "0.8", "num_requests": 80, "history_requests": 20}


def main(argv: Sequence[str]) -> None:
    """Record, replay, predict and report; exits with status 1 if a replay decided otherwise."""
    args, rest = _parse(argv)
    with tempfile.TemporaryDirectory(prefix="simulator_validation-") as folder:
        kept = args.keep or Path(folder)
        recording = kept / "validate.jsonl.gz"
        fit_on = None if args.quick else kept / "fit.jsonl.gz"
        if args.quick:
            _record(args, [*rest, "--capacity", _QUICK_CAPACITY], recording, seed=args.seed, repeats=1)
        else:
            found = _record(args, rest, fit_on, seed=args.seed + _FIT_SEED, repeats=1)
            capacity = ["--capacity", str(found.metrics["capacity_requests_per_s"]), "--same-requests"]
            _record(args, [*rest, *capacity], recording, seed=args.seed, repeats=args.repeats)
        print("replaying and predicting", file=sys.stderr, flush=True)
        logging.getLogger("vllm").setLevel(logging.ERROR)
        report = reports.make_report(reports.load(recording), None if fit_on is None else reports.load(fit_on))
        result = reports.make_result(
            report,
            recording,
            fit_on,
            name="simulator_validation",
            command=results.command(argv, "benchmarks/simulator_validation.py"),
            seed=args.seed,
            note=args.note,
        )
    results.emit(result, [reports.make_table(report)], args.out)
    if report.divergences():
        raise SystemExit("simulator_validation: a replay decided otherwise:\n" + "\n".join(report.divergences()))


def _record(
    args: argparse.Namespace, rest: Sequence[str], path: Path | None, *, seed: int, repeats: int
) -> results.Result:
    options = {
        "systems": args.systems,
        "loads": args.loads,
        "num-requests": args.num_requests,
        "history-requests": args.history_requests,
        "seed": seed,
        "repeats": repeats,
        "record": path,
    }
    argv = [*rest, *(text for name, value in options.items() for text in (f"--{name}", str(value)))]
    if args.max_foreign_cores is not None:
        argv += ["--max-foreign-cores", str(args.max_foreign_cores)]
    with contextlib.redirect_stdout(sys.stderr):
        found, table = engine_compare.measure(engine_compare.parse(argv), argv)
    print(table, file=sys.stderr, flush=True)
    return found


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    results.add_arguments(parser)
    parser.add_argument("--systems", default="upstream-fcfs,alise", help="comma list (default: %(default)s)")
    parser.add_argument(
        "--loads", default="0.5,0.8", help="comma list of fractions of the capacity (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=2, help="runs of the same requests (default: %(default)s)")
    parser.add_argument(
        "--num-requests", type=int, default=600, help="measured requests per run (default: %(default)s)"
    )
    parser.add_argument("--history-requests", type=int, default=50, help="served before (default: %(default)s)")
    parser.add_argument(
        "--max-foreign-cores", type=float, metavar="N", help="measure a run again while others use more than N cores"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings there")
    parser.add_argument("--note", default="", help="why a goal is missed, if one is; put before the measured facts")
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    args, rest = parser.parse_known_args(list(argv))
    if args.repeats < 1:
        parser.error(f"--repeats={args.repeats}: must be at least 1")
    return args, rest


if __name__ == "__main__":
    main(sys.argv[1:])
