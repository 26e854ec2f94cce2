"""What does attention to paged KV cost that is partly in INT8, and how far is our kernel from vLLM's and from memory?

Question: Pensieve's figure 17 (batch 32, 8 query tokens, growing context), with the paper's straw men and its ideal and
what a server could do today beside it; then queries of 1 to 512 tokens over contexts that are 0, 25, 50 or 100 % INT8.

Method: one layer of Llama-3.1-8B in bfloat16, blocks of 32 tokens in random order. Subjects take turns, so that noise
of the machine meets all alike; reported are the median time, and the median ratio of neighbouring turns with its
quartiles. First every subject's output is compared with that of torch's SDPA on contiguous memory, and records with
what they are when dequantised: the benchmark fails where one is off. Measured is CPU time of one thread (``--wall``:
wall time, of ``--threads``). Memory's limit is a copy of 1 GiB, measured beside it. `attention_subjects.py` has the
subjects.

Output: a table of figure 17, one of the sweep; one JSON object.

    OMP_NUM_THREADS=1 python benchmarks/attention/attention.py --quick
    OMP_NUM_THREADS=1 python benchmarks/attention/attention.py --out benchmarks/results/attention.json
    python benchmarks/attention/attention.py --wall --threads 16 --contexts 1024,16384,131072
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attention_subjects import BLOCK, HEAD_DIM, HEADS, KV_HEADS, STRAW_MEN, Shape, Step
from vllm.platforms import current_platform

from vllm_ext.kernels.paged_attention import cpu
from vllm_ext.report.claim import Claim
from vllm_ext.report.common_flags import at_least
from vllm_ext.report.results import Result, Workload, argument_parser, command, emit
from vllm_ext.report.table import Table
from vllm_ext.report.timing import Seconds, check_output, largest_copy, measure, ratio

SHARES = (0.25, 0.5, 1.0)
MIXED = 0.5
"""Share of INT8 at which ways to read both are compared."""
CONTEXTS, QUERIES = (1024, 4096, 16384), (1, 8, 64, 512)
LONG_CONTEXT, LONG_QUERIES = 131072, (1, 8, 64)
"""Of the sweep beside the default contexts, of which the longest has the goals."""
QUICK_CONTEXTS, QUICK_QUERIES = (1024, 2048), (1, 8, 64)
FIG17_BATCH, FIG17_QUERY = 32, 8
SWEEP_TOKENS = 16384
"""Of KV in a step of the sweep, at least: short contexts come in batches."""
OWN, STOCK = "own", "stock"

Subject = Callable[[], torch.Tensor]
Times = dict[str, Seconds]


def check_all(subjects: Mapping[str, Subject], expected: Mapping[str, torch.Tensor], default: torch.Tensor) -> None:
    """Check every subject; which also touches all memory before the clock starts."""
    for name, subject in subjects.items():
        check_output(name, subject(), expected.get(name, default))


def figure_17(context: int, args: argparse.Namespace) -> tuple[Step, Times]:
    """Measure the figure's step."""
    step = Step(Shape(args.batch, FIG17_QUERY, context), args.seed, contiguous=True)
    subjects: dict[str, Subject] = {
        OWN: step.own(), f"{OWN}_int8": step.own(1.0), STOCK: step.stock(), "contiguous": step.contiguous_kv(),
        "copied_out": step.copied_out(), "single_tokens": step.single_tokens(), f"{OWN}_mixed": step.own(MIXED),
        "mixed_unpacked": step.unpacked(MIXED), "mixed_two_passes": step.two_passes(MIXED),
    }  # fmt: skip
    default = step.contiguous_kv()().float().clone()
    mixed, whole = (step.unpacked(share)().float().clone() for share in (MIXED, 1.0))
    expected = {f"{OWN}_int8": whole, f"{OWN}_mixed": mixed, "mixed_two_passes": mixed, "mixed_unpacked": mixed}
    check_all(subjects, expected, default)
    return step, measure(subjects, args.repeats, args.timer)


def sweep(context: int, query: int, args: argparse.Namespace) -> tuple[Step, Times]:
    """Measure our kernel at each share of INT8, and vLLM's."""
    step = Step(Shape(max(1, SWEEP_TOKENS // context), query, context), args.seed, contiguous=False)
    subjects = {OWN: step.own(), STOCK: step.stock()} | {f"{OWN}_{share}": step.own(share) for share in SHARES}
    default = step.stock()().float().clone()
    check_all(subjects, {f"{OWN}_{s}": step.unpacked(s)().float().clone() for s in SHARES}, default)
    return step, measure(subjects, args.repeats, args.timer)


class Report:
    """Metrics, baselines, goals and lines of the tables, as they are measured."""

    def __init__(self, copy_gb_per_s: float) -> None:
        self.copy = copy_gb_per_s
        self.metrics: dict[str, float] = {"copy_gb_per_s": copy_gb_per_s}
        self.baselines: dict[str, dict[str, float]] = {}
        self.claims: list[Claim] = []
        self.lines: dict[str, list[list[Any]]] = {"fig17": [], "sweep": []}

    def add_figure(self, context: int, step: Step, times: Times, *, last: bool) -> None:
        """Take over one context of figure 17."""
        for name, found in times.items():
            key = f"fig17_{context}_ms"
            milliseconds = round(float(np.median(found)) * 1e3, 3)
            if name == OWN:
                self.metrics[key] = milliseconds
            else:
                self.baselines.setdefault(name, {})[key] = milliseconds
            middle, low, high = ratio(times, name, OWN)
            if name != OWN:
                self.metrics[f"fig17_{context}_{name}_over_own"] = round(middle, 3)
            share = 1.0 if name == f"{OWN}_int8" else MIXED if "mixed" in name else 0.0
            self.lines["fig17"].append(
                [context, name, milliseconds, middle, low, high, *self._speed(step, found, share)]
            )
        if last:
            for name in STRAW_MEN:
                middle, low, high = ratio(times, name, OWN)
                self._judge(f"fig17_{context}_{name}_over_own", middle, ">=", 2.0, (low, high), "")

    def add_sweep(self, context: int, query: int, step: Step, times: Times, *, last: bool) -> None:
        """Take over one step of the sweep."""
        key = f"sweep_q{query}_{context}"
        for name, found in times.items():
            share = float(name.removeprefix(f"{OWN}_")) if name.startswith(f"{OWN}_") else 0.0
            milliseconds = round(float(np.median(found)) * 1e3, 3)
            speed, of_copy = self._speed(step, found, share)
            if name == STOCK:
                self.baselines.setdefault(STOCK, {})[f"{key}_int8_0_ms"] = milliseconds
            else:
                self.metrics[f"{key}_int8_{share * 100:.0f}_ms"] = milliseconds
                self.metrics[f"{key}_int8_{share * 100:.0f}_gb_per_s"] = speed
            middle, low, high = ratio(times, name, OWN)
            row = [query, context, step.shape.batch, name, milliseconds, middle, low, high, speed, of_copy]
            self.lines["sweep"].append(row)
        middle, low, high = ratio(times, OWN, STOCK)
        self.metrics[f"{key}_own_over_stock"] = round(middle, 3)
        int8 = ratio(times, f"{OWN}_1.0", OWN)
        self.metrics[f"{key}_int8_over_bf16"] = round(int8[0], 3)
        if last:
            self._judge(f"{key}_own_over_stock", middle, "<=", 1.3, (low, high), "")
            why = "dequantising takes more arithmetic than half the bytes save on this core"
            self._judge(f"{key}_int8_over_bf16", int8[0], "<=", 1.0 if query == 1 else 1.1, int8[1:], why)

    def _speed(self, step: Step, found: Any, share: float) -> tuple[float, float]:
        speed = step.bytes_read(share) / float(np.median(found)) / 1e9
        return round(speed, 3), round(speed / self.copy, 3)

    def _judge(self, metric: str, value: float, op: str, goal: float, quartiles: Sequence[float], why: str) -> None:
        note = f"quartiles {quartiles[0]:.3f} to {quartiles[1]:.3f}"
        self.claims.append(Claim(name=metric, value=round(value, 3), op=op, goal=goal, facts=note, why=why))

    def tables(self) -> list[Table]:
        """Lay out what was measured."""
        end = ["ms", "time / own", "q1", "q3", "GB/s of KV", "of a copy's"]
        return [
            Table(["context", "subject", *end], self.lines["fig17"]),
            Table(["queries", "context", "batch", "subject", *end], self.lines["sweep"]),
        ]


def numbers(text: str) -> tuple[int, ...]:
    """Split ``1,2`` at its commas."""
    return tuple(int(part) for part in text.split(","))


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--contexts", type=numbers, default=CONTEXTS, metavar="N,M", help="tokens of a history")
    parser.add_argument("--queries", type=numbers, default=QUERIES, metavar="N,M", help="tokens of a query (sweep)")
    parser.add_argument(
        "--batch", type=at_least(1), default=FIG17_BATCH, help="requests of figure 17 (default: %(default)s)"
    )
    parser.add_argument("--repeats", type=at_least(1), default=7, help="turns of all subjects (default: %(default)s)")
    parser.add_argument(
        "--threads", type=at_least(1), default=1, help="needs --wall if more than 1 (default: %(default)s)"
    )
    parser.add_argument("--wall", action="store_true", help="measure wall time instead of CPU time")
    args = parser.parse_args(argv)
    if args.quick:
        args.contexts, args.queries = QUICK_CONTEXTS, QUICK_QUERIES
        args.batch, args.repeats = 8, 3
    if min(args.queries) < 1:
        parser.error("--queries: must be at least 1")
    if any(context % (8 * BLOCK) or context < max(FIG17_QUERY, *args.queries) for context in args.contexts):
        parser.error(f"--contexts: must be multiples of {8 * BLOCK}, and no less than the queries")
    if args.threads > 1 and not args.wall:
        parser.error("--threads: CPU time is of one thread; add --wall")
    args.timer = time.perf_counter if args.wall else time.process_time
    return args


def main(argv: Sequence[str]) -> None:
    """Measure, print, write."""
    args = arguments(argv)
    current_platform.import_kernels()
    torch.set_num_threads(args.threads)
    report = Report(largest_copy(256.0 if args.quick else 1024.0, 5, args.timer))
    longest = max(args.contexts)
    for context in args.contexts:
        report.add_figure(context, *figure_17(context, args), last=context == longest)
    shapes = [(query, context) for query in args.queries for context in args.contexts]
    if args.contexts == CONTEXTS:
        shapes += [(query, LONG_CONTEXT) for query in args.queries if query in LONG_QUERIES]
    for query, context in shapes:
        report.add_sweep(context, query, *sweep(context, query, args), last=context == longest)
    config = {
        "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "block_tokens": BLOCK, "dtype": "bfloat16",
        "contexts": args.contexts, "queries": args.queries, "fig17_batch": args.batch, "fig17_query": FIG17_QUERY,
        "repeats": args.repeats, "threads": args.threads, "timer": "perf_counter" if args.wall else "process_time",
        "instructions": cpu.arithmetic(), "mixed_int8_share": MIXED,
    }  # fmt: skip
    result = Result(
        name="attention",
        command=command(argv, __file__),
        config=config,
        seed=args.seed,
        workload=Workload(
            name="random numbers", rows=len(shapes), sha256=hashlib.sha256(repr(shapes).encode()).hexdigest()
        ),
        metrics=report.metrics,
        baselines=report.baselines,
        claims=report.claims,
    )
    emit(result, report.tables(), args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
