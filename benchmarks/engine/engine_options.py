"""Command line of `engine_compare.py`, and the options of an engine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import engine_rows
import engine_slo

from vllm_ext import datasets
from vllm_ext.report import common_flags
from vllm_ext.simulation.workloads import synthetic

Option = tuple[str, Callable[[str], Any], Any, str]
"""Name, type, default and help; a default worth showing is shown."""


positive, _not_negative = common_flags.at_least(1), common_flags.at_least(0)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text}: must be a JSON object")
    return value


_SHOWN: tuple[Option, ...] = (
    ("--loads", str, "0.5,0.9,1.2", "comma list of fractions of the capacity"),
    ("--repeats", positive, 1, "runs of every cell, with new requests each"),
    ("--capacity", float, None, "requests/s to take as capacity instead of measuring it first"),
    (
        "--max-foreign-cores",
        float,
        None,
        "measure a cell again, up to three times in all, while other processes use more than so many cores meanwhile",
    ),
    (
        "--profile",
        str,
        "none",
        "step times from which our systems start: a file; `measure` runs `vllm-ext profile` once before the first of "
        "them; `none` lets them learn; measured by default with objectives",
    ),
    ("--ext-config", _object, {}, "JSON: options of vllm_ext for our systems, as in --additional-config"),
    ("--tier-gib", float, 1.0, "host memory of variants that have a KV tier"),
    (
        "--record",
        Path,
        None,
        "file: write every step and request of the measured runs, for replay and validation (gzipped if named *.gz)",
    ),
    ("--note", str, "", "why a goal is missed, if one is; put before the measured facts"),
)
_REQUESTS: tuple[Option, ...] = (
    ("--dataset", Path, None, "file with a recorded workload; otherwise a synthetic one is served"),
    ("--num-requests", positive, 1000, "measured requests per cell"),
    ("--warm-requests", positive, 4000, "rows, none of them measured, from which the predictor of NAME@warm learned"),
    ("--length-scale", float, 0.5, "factor on recorded output lengths"),
    ("--max-output-tokens", positive, 256, "max_tokens of every request"),
)
_OBJECTIVES: tuple[Option, ...] = (
    ("--slo-scale", float, 1.0, "factor on all objectives"),
    (
        "--calibration",
        _object,
        None,
        "JSON: what an idle server does, instead of measuring it: ttft_base_ms, ttft_ms_per_token, decode_step_ms",
    ),
)
_ENGINE: tuple[Option, ...] = (
    ("--model", str, None, "model directory or name; otherwise the embedded tiny model"),
    (
        "--hf-overrides",
        _object,
        {},
        "JSON: fields of the model's configuration to change, such as its size; with --load-format dummy",
    ),
    ("--dtype", str, "float32", "of weights and KV"),
    ("--max-model-len", positive, 512, "longest sequence"),
    ("--max-num-seqs", positive, 8, "seats: requests running at once"),
    ("--num-gpu-blocks", positive, 64, "KV blocks"),
    ("--block-size", positive, 32, "tokens per KV block"),
    ("--gpu-memory-utilization", float, 0.3, "fraction of memory vLLM may claim, with the model in it"),
)


def add(group: Any, options: Sequence[Option]) -> None:
    """Add options to a parser, or to a group of one."""
    for name, kind, default, text in options:
        shown = "" if default in (None, {}, "") else " (default: %(default)s)"
        group.add_argument(name, type=kind, default=default, help=text + shown)


def add_engine(group: Any) -> None:
    """Add the options of an engine."""
    add(group, _ENGINE)
    group.add_argument(
        "--load-format", choices=("auto", "dummy"), default="auto", help="dummy: random weights (default: auto)"
    )
    group.add_argument(
        "--enforce-eager",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="no compilation: engines start sooner, and a tiny model gains little from it",
    )


def parser(description: str) -> argparse.ArgumentParser:
    """The parser with all defaults of a full run."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_flags.add(options, "out", "quick", "seed")
    group = options.add_argument_group("what is compared")
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
        "NAME:VARIANT has the options of engine_rows.py (default: by workload)",
    )
    group.add_argument(
        "--same-requests",
        action="store_true",
        help="repeats serve the same requests at the same times: what differs then is the noise of the machine",
    )
    group.add_argument(
        "--priority-by",
        choices=("none", "prompt-length", "ttft-slo"),
        default="none",
        help="priority of a request: 0, its prompt length (upstream-priority then takes short prompts first), or its "
        "TTFT objective, told to upstream-priority alone (default with objectives)",
    )
    add(group, _SHOWN)
    group = options.add_argument_group("requests")
    add(group, _REQUESTS)
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
    group.add_argument(
        "--history-requests",
        "--warmup-requests",
        dest="history_requests",
        type=_not_negative,
        default=50,
        help="served before the clock starts, so that the length history is not cold (default: 50)",
    )
    add(options.add_argument_group("objectives, for workloads that have them"), _OBJECTIVES)
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
