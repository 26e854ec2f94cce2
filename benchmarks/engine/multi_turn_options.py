"""Command line of `multi_turn.py`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import engine_options
import multi_turn_rows as rows
import multi_turn_workload as workload

from vllm_ext.report import common_flags

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


_COMPARED: tuple[engine_options.Option, ...] = (
    ("--rates", str, None, "comma list of conversations that begin per second; otherwise see --loads"),
    (
        "--loads",
        str,
        "0.5,0.75,1,1.4",
        "comma list: rates as fractions of what stateless serving carries, measured first",
    ),
    (
        "--target-ms",
        float,
        None,
        "P90 normalised latency, in ms per token, at which rates are compared; otherwise twice that of stateless "
        "serving of one client at a time, measured first",
    ),
    ("--repeats", engine_options.positive, 1, "runs of every cell, with other conversations each"),
    (
        "--keep",
        Path,
        None,
        "folder: write every cell there when it is measured, and take from there what the same command measured before "
        "it was interrupted",
    ),
    ("--note", str, "", "why a goal is missed, if one is; put before the measured facts"),
)
_CONVERSATIONS: tuple[engine_options.Option, ...] = (
    (
        "--conversations",
        Path,
        None,
        "file of JSON lines {id, conversations: [{from, value}]}, gzipped or not; otherwise the shared data where it "
        f"is, else, and with --quick, the preset {workload.SYNTHETIC}",
    ),
    ("--num-conversations", engine_options.positive, 64, "of every cell"),
    ("--min-turns", int, 2, "leave out shorter ones"),
    ("--max-turns", int, 12, "end longer ones, which would make a cell's tail"),
    ("--length-scale", float, 0.5, "factor on recorded lengths"),
    ("--think-s", float, 5.0, "mean time from an answer's end to the next turn, exponential"),
)
_MEMORY: tuple[engine_options.Option, ...] = (
    (
        "--tier-gib",
        float,
        None,
        "host memory of every row that has a tier; otherwise a quarter of the KV of all conversations, 16 bits",
    ),
    ("--int8-share", float, 0.4, "of the device's blocks in rows with records of 8 bits"),
)


def parse(description: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check the command line; ends the process with a message if it is not usable."""
    options = _parser(description)
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
    for refused, why in (
        (args.min_turns < 2, f"--min-turns={args.min_turns}: must be at least 2, or nothing is said twice"),
        (
            args.max_turns < args.min_turns,
            f"--max-turns={args.max_turns}: must be at least --min-turns={args.min_turns}",
        ),
        (not 0 < args.int8_share < 1, f"--int8-share={args.int8_share:g}: must be greater than 0 and less than 1"),
        (args.think_s < 0, f"--think-s={args.think_s:g}: must be 0 or more"),
        (not args.length_scale > 0, f"--length-scale={args.length_scale:g}: must be greater than 0"),
        (
            args.dtype not in workload.DTYPE_BYTES,
            f"--dtype={args.dtype}: must be one of {', '.join(workload.DTYPE_BYTES)}",
        ),
    ):
        if refused:
            options.error(why)
    return args


def _parser(description: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    common_flags.add(options, "out", "quick", "seed")
    group = options.add_argument_group("what is compared")
    others = ", ".join(name for name in rows.ROWS if name not in rows.DEFAULT)
    chosen = f"comma list; beside those by default: {others}"
    engine_options.add(group, (("--rows", str, ",".join(rows.DEFAULT), chosen), *_COMPARED))
    engine_options.add(options.add_argument_group("conversations"), _CONVERSATIONS)
    group = options.add_argument_group("engine, the same for every row")
    engine_options.add(group, _MEMORY)
    engine_options.add_engine(group)
    options.set_defaults(**ENGINE)
    return options


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option}={text}: must be a comma list of numbers") from error
    if len(set(found)) < len(found) or not all(0 < number < float("inf") for number in found):
        raise ValueError(f"{option}={text}: must be different numbers greater than 0")
    return found
