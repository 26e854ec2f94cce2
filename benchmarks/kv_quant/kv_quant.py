"""Is KV in 8 bits small, quick and good enough to be kept in host memory?

Questions: how many bytes does a token take; does storing KV in 8 bits take longer than copying its bfloat16 bytes; how
far off are the values that come back; and what do they do to a model's perplexity, log-probabilities and greedy tokens?

Method: bytes are counted. Speed is that of the KV tier's own codecs, on one thread, with blocks in random order, copy
and 8 bits in turns, so that noise of the machine meets both; reported are the median ratio and its quartiles
(`kv_quant_speed.py`; ``cold`` is what a server sees). Measured is CPU time of the thread (``--wall``: wall time). On a
machine with a CUDA device its kernels are measured as well (`kv_quant_gpu.py`), else there is no GPU part. Errors are
taken in fp64, of a trained model's KV and of values made up to be hard (`kv_quant_error.py`). Output is that of a small
Llama, trained on this repository's text, on held-out text whose first half's KV went through 8 bits
(`kv_quant_model.py`, `kv_quant_quality.py`); beside it stands what bfloat16 does to KV of fp32. The model is trained
once, in minutes, and kept in the cache folder (``--models``); with ``--quick`` it is a smaller one, hardly trained.

Output: a table for each question; one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/kv_quant/kv_quant.py --quick
    OMP_NUM_THREADS=1 python benchmarks/kv_quant/kv_quant.py --out benchmarks/results/kv_quant.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kv_quant_error as error
import kv_quant_gpu
import kv_quant_quality as quality
import kv_quant_speed as speed
import torch
from kv_quant_model import FULL, QUICK, Trained, trained

from vllm_ext.config.kv_tier import BLOCK_TOKENS
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.quality.gate import perplexity_claim
from vllm_ext.report.claim import Claim
from vllm_ext.report.common_flags import at_least
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.report.timing import largest_copy

BLOCKS = (16, 32, 64, 128)
RATIO_GOAL = 1.9
JUDGED_BLOCK = 32
"""Tokens of a block at which the speed is judged, a multiple of which vLLM's CPU backend asks for."""


def bytes_of_blocks() -> dict[str, float]:
    """Return bytes of a token in a layer of Llama-3.1-8B, by tokens of a block, and how many times less that is."""
    found: dict[str, float] = {}
    for tokens in BLOCKS:
        fmt = RecordFormat(PageLayout.rows(torch.bfloat16, speed.HEADS, speed.HEAD_DIM, tokens))
        found[f"block_{tokens}_bytes_per_token_and_layer"] = fmt.record_bytes / tokens
        found[f"block_{tokens}_times_smaller_than_bf16"] = round(fmt.ratio, 4)
    return found


def measure_speed(args: argparse.Namespace) -> list[speed.Cell]:
    """Measure every layout, block size and state of the caches."""
    timer = time.perf_counter if args.wall else time.thread_time
    sizes = (JUDGED_BLOCK,) if args.quick else speed.BLOCK_SIZES
    cells: list[speed.Cell] = []
    for layout in speed.LAYOUTS:
        for block_size in sizes:
            for state, mib in args.mib.items():
                cells += speed.measure(layout, block_size, state, mib, args.repeats, args.seed, timer)
    return cells


def measure_error(found: Trained, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return errors by kind of data."""
    count = 8 if args.quick else 64
    errors = {"model": error.measure(torch.cat(quality.kv_of(found, count)), quality.page_layout(found))}
    return errors | {name: error.measure(p, error.layout()) for name, p in error.made_up(count, args.seed).items()}


def goals_of(
    sizes: Mapping[str, float], cells: Sequence[speed.Cell], errors: Mapping[str, Mapping[str, float]],
    output: Mapping[str, float], found: Trained,
) -> list[Claim]:  # fmt: skip
    """Judge what was measured."""
    claims = [Claim(name=f"block_{BLOCK_TOKENS}_times_smaller_than_bf16", op=">=", goal=RATIO_GOAL,
                  value=sizes[f"block_{BLOCK_TOKENS}_times_smaller_than_bf16"],
                  facts="a minimum and a scale of 16 bits for each channel of a block: see format.md")]  # fmt: skip
    for cell in cells:
        if cell.block_size == JUDGED_BLOCK and cell.state == "cold" and cell.direction == "store":
            middle, low, high = cell.ratios
            reached, copied = cell.metrics()[f"{cell.key}_gb_per_s"], cell.baseline()[f"{cell.key}_gb_per_s"]
            warm = next((c for c in cells if c.key == cell.key.replace("cold", "warm")), cell)
            arithmetic = warm.metrics()[f"{warm.key}_gb_per_s"]
            note = f"{reached:.2f} GB/s in 8 bits, {copied:.2f} GB/s copied; quartiles {low:.2f} to {high:.2f}; "
            note += f"arithmetic alone (warm) makes {arithmetic:.1f} GB/s and is only in part hidden behind memory"
            claims.append(Claim(name=f"{cell.key}_time_over_copy", value=middle, op="<=", goal=1.0, facts=note))
    worst = max(errors, key=lambda name: errors[name]["max_error_over_allowed"])
    claims.append(
        Claim(name="worst_error_over_allowed", value=errors[worst]["max_error_over_allowed"], op="<=", goal=1.0,
             facts=f"of {worst}")
    )  # fmt: skip
    low, high = (output[f"perplexity_change_{end}_percent"] for end in ("low", "high"))
    note = f"95 % interval {low:.3f} to {high:.3f} %, of a model with perplexity {output['perplexity']:.1f}"
    note += f" on held-out text ({found.recipe.steps} steps of training)"
    claims.append(perplexity_claim(output, note))
    return claims


def tables(
    sizes: Mapping[str, float], cells: Sequence[speed.Cell], errors: Mapping[str, Mapping[str, float]],
    outputs: Mapping[str, Mapping[str, float]],
) -> list[Table]:  # fmt: skip
    """Lay out what was measured."""
    header = ["tokens of a block", "bytes per token and layer", "times smaller than bf16"]
    names = ("bytes_per_token_and_layer", "times_smaller_than_bf16")
    made = [Table(header, [[b, *(sizes[f"block_{b}_{name}"] for name in names)] for b in BLOCKS])]
    header = ["layout", "block", "caches", "direction", "copy GB/s", "8 bits GB/s", "time / copy", "q1", "q3"]
    made.append(Table(header, speed.rows_of(cells)))
    made.append(_side_by_side("values", errors))
    made.append(_side_by_side("KV of the first half", outputs))
    return made


def _side_by_side(label: str, found: Mapping[str, Mapping[str, float]]) -> Table:
    """A column for each of several dictionaries; a line for each key."""
    keys = list(dict.fromkeys(key for one in found.values() for key in one))
    rows: list[list[Any]] = [[key, *(one.get(key) for one in found.values())] for key in keys]
    return Table([label, *found], rows)


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--wall", action="store_true", help="measure wall time instead of CPU time")
    parser.add_argument(
        "--repeats", type=at_least(1), default=21, help="turns of copy and 8 bits (default: %(default)s)"
    )
    parser.add_argument("--sequences", type=at_least(1), default=128, help="of held-out text (default: %(default)s)")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="where models are kept (default: the cache)")
    args = parser.parse_args(argv)
    args.mib = speed.QUICK_MIB if args.quick else speed.MIB
    if args.quick:
        args.sequences, args.repeats = min(args.sequences, 4), min(args.repeats, 5)
    sizes = bytes_of_blocks()
    print(f"whole copy: {(whole := largest_copy(args.mib['cold'], 5)):.1f} GB/s", file=sys.stderr, flush=True)
    cells = measure_speed(args)
    gpu_found, gpu_beside = kv_quant_gpu.measure(1024, 20, args.seed) if torch.cuda.is_available() else ({}, {})
    found = trained(QUICK if args.quick else FULL, args.models)
    errors = measure_error(found, args)
    output, beside = quality.measure(found, args.sequences, args.seed)
    metrics = sizes | {"copy_end_to_end_gb_per_s": whole} | gpu_found
    metrics |= {key: value for cell in cells for key, value in cell.metrics().items()}
    metrics |= {f"error_{name}_{key}": value for name, one in errors.items() for key, value in one.items()}
    metrics |= output | {f"model_{key}": value for key, value in found.facts.items()}
    config = {
        "heads": speed.HEADS, "head_dim": speed.HEAD_DIM, "block_tokens": BLOCK_TOKENS, "dtype": "bfloat16",
        "mib": args.mib, "repeats": args.repeats, "threads_of_copies": 1,
        "timer": "perf_counter" if args.wall else "thread_time", "recipe": vars(found.recipe),
        "sequences": args.sequences, "gpu": "measured" if gpu_found else "none on this machine: not measured",
    }  # fmt: skip
    result = Result(
        name="kv_quant",
        command=command(argv, __file__),
        config=config,
        seed=args.seed,
        workload=Workload(name="this repository's text", rows=len(found.held_out), sha256=found.text_sha256),
        metrics=metrics,
        baselines={"copy_bf16": {k: v for cell in cells for k, v in cell.baseline().items()}} | beside | gpu_beside,
        claims=goals_of(sizes, cells, errors, output, found),
    )
    shown = tables(sizes, cells, errors, {f"int8_block_{BLOCK_TOKENS}": output} | beside)
    emit(result, shown + ([_side_by_side("GPU", {"8 bits": gpu_found} | gpu_beside)] if gpu_found else []), args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
