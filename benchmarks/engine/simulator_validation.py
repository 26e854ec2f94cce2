"""The simulator against the real engine: how far off are predicted latencies, and are the decisions the same?

Method: `record_run.py` serves requests on the real engine and records every step. The recording that is judged
holds repeats of the same requests at the same times; each is repeated exactly in virtual time (every decision must be
equal, given the recorded clock readings and tokens) and predicted from its arrivals, prompts and lengths alone. The
distance between the repeats themselves is what the machine's noise allows at best, and is reported beside the errors.

Step times and two constants for the front end are fitted twice: on another recording, of other requests and another
start of the engine (the result's metrics), and on the first half of each run, of which then the second half is judged
(the baseline "fitted on its own first half"). A machine whose speed drifts between recordings tells the two apart.

The model is random and of some 25 million parameters: steps of the embedded one take 3 ms, of which the operating
system's noise is a large part. ``--setting`` chooses what else is looked at: too few KV blocks, conversations
whose turns find their history in the prefix cache, or in host memory. Runs with a KV tier are predicted only: when a
copy ends is not in the record, so no replay can decide the same. On CPUs vLLM schedules no step ahead
(``--async-scheduling`` is turned off), so that is for a machine with a GPU.

    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/engine/simulator_validation.py \\
        --out benchmarks/results/simulator_validation.json
    OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind python benchmarks/engine/simulator_validation.py \\
        --setting tier --out benchmarks/results/simulator_validation_tier.json
    python benchmarks/engine/simulator_validation.py --quick

With ``--quick`` one short run of the embedded model is recorded, its first half fitted and its second half predicted.
``--from FOLDER`` judges recordings that ``--keep`` left there. Options that are not listed here go to `record_run.py`:
systems, loads, the workload, and behind ``--`` flags of `vllm serve`. The environment is passed on.

Output: a table on stderr, with the real engine's own distance below each line; the last line on stdout is the result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import record_run

from vllm_ext import tiny_model
from vllm_ext.cli.command import Failed, split
from vllm_ext.report import common_flags, results
from vllm_ext.report.table import Table
from vllm_ext.simulation.cost.spec import HardwareSpec
from vllm_ext.simulation.recorded import validation as reports

_FIT_SEED = 1000
"""Added to the seed of the requests that are fitted, so that they are others."""
OWN_HALF = "fitted on its own first half"
MODEL = (
    '{"hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8, '
    '"num_key_value_heads": 4, "head_dim": 64}'
)
_ALONE = (
    "--source", "sharegpt-vllm", "--set", "scale_prompt=0.25", "--set", "scale_output=0.25", "--loads", "0.7",
    "--num-requests", "120",
)  # fmt: skip
_TALKS = (
    "--source", "pensieve-sharegpt", "--set", "scale_prompt=0.1", "--set", "scale_output=0.25", "--set", "min_turns=2",
    "--set", "max_turns=5", "--set", "think_s=2.0", "--loads", "0.7", "--num-requests", "40",
)  # fmt: skip
_BOTH = ("--systems", "upstream-fcfs,alise")
SETTINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain": ((*_ALONE, *_BOTH), ()),
    "memory": ((*_ALONE, *_BOTH), ("--num-gpu-blocks-override", "20")),
    "turns": ((*_TALKS, *_BOTH), ()),
    "tier": ((*_TALKS, "--systems", "pensieve"), ("--num-gpu-blocks-override", "32", "--kv-tier-gib", "0.25")),
}
"""What is recorded: options of `record_run.py` and flags of `vllm serve`, both before those from the command line."""
LARGER = ("--hf-overrides", MODEL, "--load-format", "dummy")
"""The same behind ``--``."""
QUICK = (
    "--source", "alpaca-like", "--set", "scale_output=0.5", "--num-requests", "80", "--rate", "20", "--loads", "0.8",
)  # fmt: skip
"""In place of a setting's options, with ``--quick``. Two slow cores end some 20 requests/s of a backlog; measuring it
would take another engine."""


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
        report, result, tables = _judge(args, argv, recording, fit_on, _hardware(Path(folder)))
    results.emit(result, tables, args.out)
    if report.divergences():
        raise SystemExit("simulator_validation: a replay decided otherwise:\n" + "\n".join(report.divergences()))


def _record_all(args: argparse.Namespace, rest: Sequence[str], recording: Path, fit_on: Path | None) -> None:
    if fit_on is None:
        _record(recording, rest, QUICK, (), seed=args.seed)
        return
    full, flags = SETTINGS[args.setting]
    rate = _record(fit_on, rest, full, (*LARGER, *flags), seed=args.seed + _FIT_SEED)
    same = full if rate is None else (*full, "--rate", str(rate))
    _record(recording, rest, same, (*LARGER, *flags), seed=args.seed, repeats=args.repeats)


def _record(
    path: Path, rest: Sequence[str], ours: Sequence[str], model: Sequence[str], *, seed: int, repeats: int = 1
) -> float | None:
    given, passed = split(rest)
    argv = [str(path), *ours, *given, "--seed", str(seed), "--repeats", str(repeats)]
    try:
        return record_run.record(record_run.parser([*model, *passed]).parse_args(argv))
    except (Failed, ValueError) as error:
        raise SystemExit(f"simulator_validation: {error}") from error


def _judge(
    args: argparse.Namespace, argv: Sequence[str], recording: Path, fit_on: Path | None, hardware: HardwareSpec
) -> tuple[reports.Report, results.Result, list[Table]]:
    """Both reports; the one with the fit of another recording is the result, the other a baseline of it."""
    runs = reports.load(recording)
    own = reports.make_report(runs, replays=fit_on is None, hardware=hardware)
    main = own if fit_on is None else reports.make_report(runs, reports.load(fit_on), hardware=hardware)

    made = partial(
        reports.make_result, path=recording, name=_name(args.setting), command=results.command(argv, __file__),
        seed=args.seed, note=args.note,
    )  # fmt: skip
    result = made(main, fit_path=fit_on)
    tables = [reports.make_table(main)]
    if fit_on is not None:
        halves = made(own, fit_path=None)
        result = dataclasses.replace(
            result,
            baselines={**result.baselines, OWN_HALF: halves.metrics},
            claims=[*result.claims, *(dataclasses.replace(c, name=f"{OWN_HALF}: {c.name}") for c in halves.claims)],
        )
        tables.append(dataclasses.replace(reports.make_table(own), title=f"{OWN_HALF}:"))
    return main, result, tables


def _hardware(folder: Path) -> HardwareSpec:
    """Return what copies of KV move here, and how fast; the folder gets the larger model's configuration."""
    config = json.loads((tiny_model.build() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | json.loads(MODEL)))
    return HardwareSpec(model=str(folder), device="cpu", kv_dtype_bytes=4)


def _name(setting: str) -> str:
    return "simulator_validation" if setting == "plain" else f"simulator_validation_{setting}"


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    common_flags.add(parser, "out", "quick", "seed")
    parser.add_argument(
        "--repeats", type=common_flags.at_least(1), default=2, help="runs of the same requests (default: %(default)s)"
    )
    parser.add_argument(
        "--setting",
        choices=SETTINGS,
        default="plain",
        help="what is looked at (default: %(default)s); not with --quick",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings there")
    parser.add_argument(
        "--from", dest="recorded", type=Path, metavar="FOLDER", help="judge the recordings that --keep left there"
    )
    parser.add_argument("--note", default="", help="why a goal is missed, if one is; put before the measured facts")
    ours, passed = split(argv)
    args, rest = parser.parse_known_args(ours)
    return args, [*rest, "--", *passed]


if __name__ == "__main__":
    main(sys.argv[1:])
