"""Command line of `multi_turn.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_options
import multi_turn_rows as rows
import multi_turn_workload as workload

from vllm_ext.observability import results

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
"""Some 25 million parameters, random: large enough that computing a history takes longer than copying it, and with the
ids of made-up conversations in its vocabulary."""
ENGINE: dict[str, Any] = {
    "hf_overrides": MODEL,
    "load_format": "dummy",
    "dtype": "float16",  # of bfloat16, vLLM packs KV in pairs where the CPU has AMX, which slows our 8 bits down
    "max_model_len": 2048,
    "num_gpu_blocks": None,
}
QUICK: dict[str, Any] = {
    "num_conversations": 6,
    "length_scale": 0.1,
    "max_model_len": 512,
    "think_s": 0.5,
    "rates": "4",
    "target_ms": 30.0,
    "rows": ",".join(rows.QUICK),
}


def parse(description: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line; ends the process with a message if it is not usable."""
    options = _parser(description)
    options.set_defaults(**ENGINE)
    chosen, _ = options.parse_known_args(argv)
    if chosen.quick:
        options.set_defaults(**QUICK)
    elif workload.DATA.is_file():
        options.set_defaults(conversations=workload.DATA)
    args = options.parse_args(argv)
    try:
        args.rows = rows.chosen(args.rows)
        args.rates = None if args.rates is None else _numbers("--rates", args.rates)
        args.loads = _numbers("--loads", args.loads)
    except ValueError as error:
        options.error(str(error))
    if args.min_turns < 2:
        options.error(f"--min-turns={args.min_turns}: must be at least 2, or nothing is said twice")
    if args.max_turns < args.min_turns:
        options.error(f"--max-turns={args.max_turns}: must be at least --min-turns={args.min_turns}")
    if args.think_s < 0:
        options.error(f"--think-s={args.think_s:g}: must be 0 or more")
    if not args.length_scale > 0:
        options.error(f"--length-scale={args.length_scale:g}: must be greater than 0")
    if args.dtype not in workload.DTYPE_BYTES:
        options.error(f"--dtype={args.dtype}: must be one of {', '.join(workload.DTYPE_BYTES)}")
    return args


def _parser(description: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_arguments(options)
    group = options.add_argument_group("what is compared")
    group.add_argument(
        "--rows",
        default=",".join(rows.DEFAULT),
        help="comma list (default: %(default)s; beside these: "
        + ", ".join(name for name in rows.ROWS if name not in rows.DEFAULT)
        + ")",
    )
    group.add_argument("--rates", help="comma list of conversations that begin per second (default: see --loads)")
    group.add_argument(
        "--loads",
        default="0.5,0.75,1,1.4",
        help="comma list: rates as fractions of what stateless serving carries, measured first (default: %(default)s)",
    )
    group.add_argument(
        "--target-ms",
        type=float,
        help="P90 normalised latency, in ms per token, at which rates are compared (default: twice that of stateless "
        "serving of one client at a time, measured first)",
    )
    group.add_argument(
        "--repeats",
        type=engine_options.positive,
        default=1,
        help="runs of every cell, with other conversations each (default: 1)",
    )
    group.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="write every cell there when it is measured, and take from there what the same command measured before it "
        "was interrupted",
    )
    group.add_argument("--note", default="", help="why a goal is missed, if one is; put before the measured facts")
    _add_conversations(options.add_argument_group("conversations"))
    group = options.add_argument_group("engine, the same for every row")
    group.add_argument(
        "--tier-gib",
        type=float,
        help="host memory of every row that has a tier (default: a quarter of the KV of all conversations, 16 bits)",
    )
    engine_options.add_engine(group)
    return options


def _add_conversations(group: Any) -> None:
    group.add_argument(
        "--conversations",
        type=Path,
        metavar="FILE",
        help="JSON lines of {id, conversations: [{from, value}]}, gzipped or not (default: the shared data where it "
        f"is, else, and with --quick, the preset {workload.SYNTHETIC})",
    )
    group.add_argument(
        "--num-conversations", type=engine_options.positive, default=64, help="of every cell (default: %(default)s)"
    )
    group.add_argument("--min-turns", type=int, default=2, help="leave out shorter ones (default: %(default)s)")
    group.add_argument(
        "--max-turns",
        type=int,
        default=12,
        help="end longer ones, which would make a cell's tail (default: %(default)s)",
    )
    group.add_argument(
        "--length-scale", type=float, default=0.5, help="factor on recorded lengths (default: %(default)s)"
    )
    group.add_argument(
        "--think-s",
        type=float,
        default=5.0,
        help="mean time from an answer's end to the next turn, exponential (default: %(default)s)",
    )


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option}={text}: must be a comma list of numbers") from error
    if len(set(found)) < len(found) or not all(0 < number < float("inf") for number in found):
        raise ValueError(f"{option}={text}: must be different numbers greater than 0")
    return found
