"""Command line of `engine_compare.py`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_rows
import engine_slo

from vllm_ext import datasets
from vllm_ext.observability import results
from vllm_ext.simulation import synthetic


def parser(description: str) -> argparse.ArgumentParser:
    """The parser with all defaults of a full run."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_arguments(options)
    _add_comparison(options.add_argument_group("what is compared"))
    _add_requests(options.add_argument_group("requests"))
    _add_objectives(options.add_argument_group("objectives, for workloads that have them"))
    add_engine(options.add_argument_group("engine, the same for every system"))
    return options


def set_defaults(options: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Set what the chosen workload, and a quick run, have for defaults."""
    chosen, _ = options.parse_known_args(argv)
    quick: dict[str, Any] = {"num_requests": 120, "history_requests": 20, "repeats": 1}
    if chosen.workload == engine_rows.LENGTHS:
        quick["loads"] = "0.9"
    options.set_defaults(systems=engine_rows.default_rows(chosen.workload, quick=chosen.quick))
    options.set_defaults(**engine_slo.DEFAULTS[chosen.workload])
    if chosen.quick:
        options.set_defaults(**quick)


def _add_comparison(group: Any) -> None:
    group.add_argument(
        "--workload",
        choices=engine_rows.WORKLOADS,
        default=engine_rows.LENGTHS,
        help="lengths: the recorded or synthetic requests below, without objectives. mixed-slo: short and long "
        "prompts, objectives of their own, overload. memory-bound: long outputs in a small KV pool. swapping: the same "
        "without objectives, and what becomes of preempted KV. unused-tier: a host tier that nobody needs "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--systems",
        help="comma list; upstream-* is vLLM alone, others are for --scheduler-cls; NAME predicts from the length "
        "history, NAME@cold also from prompts, with nothing learned before, NAME@warm with --warm-requests learned; "
        "NAME:VARIANT has the options of engine_rows.py "
        "(default: by workload)",
    )
    group.add_argument(
        "--loads", default="0.5,0.9,1.2", help="comma list of fractions of the capacity (default: %(default)s)"
    )
    group.add_argument(
        "--repeats", type=positive, default=1, help="runs of every cell, with new requests each (default: 1)"
    )
    group.add_argument(
        "--same-requests",
        action="store_true",
        help="repeats serve the same requests at the same times: what differs then is the noise of the machine",
    )
    group.add_argument("--capacity", type=float, help="requests/s to take as capacity instead of measuring it first")
    group.add_argument(
        "--max-foreign-cores",
        type=float,
        metavar="N",
        help="measure a cell again, up to three times in all, while other processes use more than N cores meanwhile",
    )
    group.add_argument(
        "--priority-by",
        choices=("none", "prompt-length", "ttft-slo"),
        default="none",
        help="priority of a request: 0, its prompt length (upstream-priority then takes short prompts first), or its "
        "TTFT objective, told to upstream-priority alone (default with objectives)",
    )
    group.add_argument(
        "--profile",
        default="none",
        metavar="FILE",
        help="step times from which our systems start: `measure` runs `vllm-ext profile` once before the first of "
        "them, `none` lets them learn (default: none; with objectives: measure)",
    )
    group.add_argument(
        "--ext-config",
        type=_object,
        default={},
        metavar="JSON",
        help="options of vllm_ext for our systems, as in --additional-config",
    )
    group.add_argument(
        "--tier-gib", type=float, default=1.0, help="host memory of variants that have a KV tier (default: 1)"
    )
    group.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="write every step and request of the measured runs, for replay and validation (gzipped if named *.gz)",
    )
    group.add_argument("--note", default="", help="why a goal is missed, if one is; put before the measured facts")


def _add_requests(group: Any) -> None:
    group.add_argument("--dataset", type=Path, metavar="FILE", help="recorded workload; default: a synthetic one")
    group.add_argument("--dataset-format", choices=datasets.FORMATS, default="auto", help="(default: %(default)s)")
    group.add_argument(
        "--dataset-where",
        action="append",
        default=[],
        metavar="FIELD=V1,V2",
        help="keep only rows whose field is, or contains, a value",
    )
    group.add_argument(
        "--synthetic", choices=tuple(synthetic.PRESETS), default="alpaca-like", help="(default: %(default)s)"
    )
    group.add_argument("--num-requests", type=positive, default=1000, help="measured requests per cell (default: 1000)")
    group.add_argument(
        "--history-requests",
        "--warmup-requests",
        dest="history_requests",
        type=_not_negative,
        default=50,
        help="served before the clock starts, so that the length history is not cold (default: 50)",
    )
    group.add_argument(
        "--warm-requests",
        type=positive,
        default=4000,
        help="rows, none of them measured, from which the predictor of NAME@warm learned (default: 4000)",
    )
    group.add_argument(
        "--length-scale", type=float, default=0.5, help="factor on recorded output lengths (default: 0.5)"
    )
    group.add_argument(
        "--max-output-tokens", type=positive, default=256, help="max_tokens of every request (default: 256)"
    )


def _add_objectives(group: Any) -> None:
    group.add_argument("--slo-scale", type=float, default=1.0, help="factor on all objectives (default: 1)")
    group.add_argument(
        "--calibration",
        type=_object,
        metavar="JSON",
        help="what an idle server does, instead of measuring it: ttft_base_ms, ttft_ms_per_token, decode_step_ms",
    )


def add_engine(group: Any) -> None:
    """Add the options of an engine."""
    group.add_argument("--model", help="model directory or name (default: the embedded tiny model)")
    group.add_argument(
        "--hf-overrides",
        type=_object,
        default={},
        metavar="JSON",
        help="fields of the model's configuration to change, such as its size; with --load-format dummy",
    )
    group.add_argument(
        "--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights (default: auto)"
    )
    group.add_argument("--dtype", default="float32", help="(default: %(default)s)")
    group.add_argument("--max-model-len", type=positive, default=512, help="(default: 512)")
    group.add_argument("--max-num-seqs", type=positive, default=8, help="seats: requests running at once (default: 8)")
    group.add_argument("--num-gpu-blocks", type=positive, default=64, help="KV blocks (default: 64)")
    group.add_argument("--block-size", type=positive, default=32, help="tokens per KV block (default: 32)")
    group.add_argument(
        "--gpu-memory-utilization", type=float, default=0.1, help="fraction of memory vLLM may claim (default: 0.1)"
    )
    group.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="no compilation: engines start sooner, and a tiny model gains little from it",
    )


def positive(text: str) -> int:
    """Return a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text}: must be 0 or more")
    return value


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: must be a JSON object")
    return value
