"""Latency against throughput of cellular batching and all that it is compared with, in real execution on this CPU.

Method: `vllm-ext cellular`'s engine with one thread, hidden size 256, on LSTMs and Seq2Seq over made-up sentences and
on TreeLSTMs over made-up trees; the same engine with padded batching, one request at a time, and for trees graph
merging in DyNet's and in Fold's manner, whose merging costs what it costs on this machine, measured first. All manners
get the same Poisson arrivals at shares of the throughput that cellular batching has with a queue, in turns; latency
counts from the intended arrival and is wall time. A load is sustained while P90 latency is at most 500 ms (Seq2Seq
1,500); the peak is the highest throughput of those. Values are medians over seeds. A second curve of padded batching,
the A/A row, says what the machine does.

    OMP_NUM_THREADS=1 python benchmarks/cellular_curves.py --quick
    OMP_NUM_THREADS=1 python benchmarks/cellular_curves.py --out benchmarks/results/cellular_curves.json

Beside ``--out`` lies a figure per model.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cellular_real as real
import cellular_virtual as virtual
import numpy as np
import torch

from vllm_ext.cellular.graphs import CellTable
from vllm_ext.cellular.models import Model, build
from vllm_ext.cellular.scheduler import Batching, Scheduler
from vllm_ext.report.plots import Panel, Series, stacked
from vllm_ext.report.results import Goal, Result, add_arguments, command, emit, format_table
from vllm_ext.repro.batching import workloads
from vllm_ext.repro.batching.curves import HEADER, Point, metrics_of, peak, reductions, rows_of
from vllm_ext.repro.batching.merging import MergedBatching, Merging

HIDDEN = 256
OURS, PADDED, AGAIN, DYNET, FOLD, ALONE = "cellular", "padded", "padded (A/A)", "dynet", "fold", "one by one"
WIDE = "cellular, 512"
"""Trees in batches that are not held to the paper's 64, as merged graphs are not."""
SHARES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.8, 1.0)
QUICK_SHARES = (0.2, 0.6)
LIMIT_MS = {"lstm": 500.0, "seq2seq": 1500.0, "treelstm": 500.0}
"""As in `vllm-ext repro`: padded Seq2Seq passes 500 ms early."""
BATCH = {"lstm": 512, "seq2seq": 256, "treelstm": 64}
"""Largest batches: the paper's."""
WARM_UP = 16
"""Requests before the clock starts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what it is asked, and in which manners."""

    model: Model
    requests: Sequence[Mapping[str, Any]]
    manners: Mapping[str, real.Make | None]


def cases(count: int, seed: int, node_s: Mapping[str, float]) -> dict[str, Case]:
    """Return what is measured, by the model's name."""
    rng = np.random.default_rng(seed)
    words = real.VOCABULARY
    pairs = workloads.pairs(count, seed).rows
    sources = [rng.integers(2, words, source).tolist() for source, _ in pairs]
    translations = [
        {"tokens": source, "length": target, "max_steps": workloads.LONGEST}
        for source, (_, target) in zip(sources, pairs, strict=True)
    ]
    trees = [{"tree": tree} for tree in workloads.trees(count, seed).rows]
    return {
        "lstm": Case(model=real.lstm(HIDDEN), requests=[{"tokens": source} for source in sources],
                     manners=padded_and_alone(BATCH["lstm"])),
        "seq2seq": Case(model=build("seq2seq", hidden=HIDDEN, vocabulary=words, forced=1), requests=translations,
                        manners=padded_and_alone(BATCH["seq2seq"])),
        "treelstm": Case(
            model=build("treelstm", hidden=HIDDEN, vocabulary=1 << 14, classes=0), requests=trees,
            manners={OURS: None, WIDE: wide, DYNET: merged(DYNET, node_s, overlapped=False),
                     FOLD: merged(FOLD, node_s, overlapped=True), ALONE: real.padded(1, width=1)},
        ),
    }  # fmt: skip


def padded_and_alone(batch: int) -> dict[str, real.Make | None]:
    """Return the manners for chains."""
    return {OURS: None, PADDED: real.padded(batch), AGAIN: real.padded(batch), ALONE: real.padded(1, width=1)}


def wide(table: CellTable, freed: Callable[[int], None]) -> Batching:
    """Return cellular batching of large batches."""
    return Scheduler(CellTable([cell.with_batches(512) for cell in table.cells]), freed)


def merged(name: str, node_s: Mapping[str, float], *, overlapped: bool) -> real.Make:
    """Return graph merging at the cost of this machine."""
    merging = Merging(name=name, node_s=node_s[name], overlapped=overlapped)
    return lambda table, freed: MergedBatching(table, freed, merging=merging)


def capacity(case: Case, batch: int, count: int) -> float:
    """Return requests per second that cellular batching serves while there is a queue, in wall time."""
    asked = [case.requests[i % len(case.requests)] for i in range(count)]
    with real.engine(case.model, None, batch, count + WARM_UP) as one:
        warm(one, case)
        begin = time.monotonic()
        for handle in [one.submit(request) for request in asked]:
            real.values(handle)
        return count / (time.monotonic() - begin)


def warm(one: Any, case: Case) -> None:
    """Serve some requests: what is done once per shape of a batch is not part of a load."""
    for handle in [one.submit(request) for request in case.requests[:WARM_UP]]:
        real.values(handle)


def served(case: Case, make: real.Make | None, batch: int, rate_per_s: float, seconds: float, seed: int) -> Point:
    """Serve Poisson arrivals; throughput is of the time in which requests arrived, after its first fifth."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate_per_s, max(int(rate_per_s * seconds), 20)))
    drawn = rng.integers(0, len(case.requests), len(times)).tolist()
    with real.engine(case.model, make, batch, len(times) + WARM_UP) as one:
        warm(one, case)
        ended = real.ends(one, [case.requests[row] for row in drawn], times)
    start, end = times[-1] / 5, times[-1]
    counted = times >= start
    rate = float(((ended >= start) & (ended < end)).sum() / (end - start))
    latencies = {f"p{p}_ms": float(np.percentile((ended - times)[counted], p)) * 1e3 for p in (50, 90, 99)}
    return Point(load_per_s=rate_per_s, served_per_s=rate, limit_ms=LIMIT_MS[case.model.kind], **latencies)


def middle(points: Sequence[Point]) -> Point:
    """Return medians."""
    values = {
        name: statistics.median(getattr(point, name) for point in points)
        for name in ("served_per_s", "p50_ms", "p90_ms", "p99_ms")
    }
    return replace(points[0], **values)


def curves(
    case: Case, batch: int, loads: Sequence[float], seconds: float, seeds: Sequence[int]
) -> dict[str, list[Point]]:
    """Serve loads, increasing; a manner stops at the second that it does not sustain."""
    found: dict[str, list[Point]] = {name: [] for name in case.manners}
    for load in loads:
        going = [name for name, points in found.items() if sum(not point.sustained for point in points) < 2]
        turns: dict[str, list[Point]] = {name: [] for name in going}
        for seed in seeds:
            for name in going:
                turns[name].append(served(case, case.manners[name], batch, load, seconds, seed))
        for name, points in turns.items():
            found[name].append(middle(points))
        print(f"  {load:.0f} requests/s: {', '.join(going)}", file=sys.stderr, flush=True)
    return found


def goals_of(found: Mapping[str, Mapping[str, Sequence[Point]]]) -> list[Goal]:
    """Judge by what the paper reports of its GPU."""
    why = "the loads are a few steps apart, so that a peak near one of them can miss it"
    made = []
    for name, over, saved in (("lstm", 1.25, 0.375), ("seq2seq", 1.6, 0.175)):
        ours, theirs = found[name][OURS], found[name][PADDED]
        lower = reductions(ours, theirs)
        made += [
            Goal(metric=f"{name}_peak_over_padded", value=peak(ours) / peak(theirs), op=">=", goal=over, note=why),
            Goal(metric=f"{name}_p90_saved_least", value=min(lower), op=">=", goal=saved,
                 note=f"below half of padded batching's peak, {len(lower)} loads"),
        ]  # fmt: skip
    trees = {name: peak(points) for name, points in found["treelstm"].items()}
    made += [
        Goal(metric="treelstm_peak_over_dynet", value=trees[OURS] / trees[DYNET], op=">=", goal=1.48,
             note="merged batches are not held to 64 rows, ours are; and launching an operator costs little on a CPU"),
        Goal(metric="treelstm_peak_over_fold", value=trees[OURS] / trees[FOLD], op=">=", goal=4.0,
             note="merging costs a smaller part of the time that a CPU needs than of a GPU's"),
    ]  # fmt: skip
    return made


def draw(found: Mapping[str, Mapping[str, Sequence[Point]]], out: Path) -> None:
    """Draw P50, P90 and P99 latency against throughput, a file per model."""
    for model, manners in found.items():
        panels = [
            Panel(ylabel=f"P{p} latency (ms)",
                  series=[Series(label=name, x=[q.served_per_s for q in points],
                                 y=[getattr(q, f"p{p}_ms") for q in points]) for name, points in manners.items()])
            for p in (50, 90, 99)
        ]  # fmt: skip
        stacked(panels, out.with_name(f"{out.stem}_{model}.png"), xlabel="served requests/s", log_y=True)


def main(argv: Sequence[str]) -> None:
    """Measure, print, write, draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=5.0, help="arrivals of a load (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="seeds, in turns (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("seconds", "repeats"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name}={getattr(args, name)}: must be greater than 0")
    seconds, repeats = (0.3, 1) if args.quick else (args.seconds, args.repeats)
    torch.set_num_threads(1)
    costs = virtual.merging_us(workloads.trees(200, args.seed).rows, 3 if args.quick else 20)
    node_s = {name: costs[f"{name}_merging_us_per_node"] * 1e-6 for name in (DYNET, FOLD)}
    found, metrics, beside = {}, dict(costs), {}
    for name, case in cases(100 if args.quick else 1_000, args.seed, node_s).items():
        batch = BATCH[name]
        rate = capacity(case, batch, 200 if args.quick else 2_000)
        print(f"{name}: {rate:.0f} requests/s with a queue", file=sys.stderr, flush=True)
        loads = [rate * share for share in (QUICK_SHARES if args.quick else SHARES)]
        found[name] = curves(case, batch, loads, seconds, [args.seed + i for i in range(repeats)])
        metrics |= {f"{name}.queue_per_s": rate, **metrics_of(f"{name}.", found[name][OURS])}
        for other, points in found[name].items():
            if other != OURS:
                beside.setdefault(other, {}).update(metrics_of(f"{name}.", points))
    result = Result(
        name="cellular_curves",
        command=command(argv, "benchmarks/cellular_curves.py"),
        config={"hidden": HIDDEN, "batch": BATCH, "seconds_per_load": seconds, "seeds": repeats, "threads": 1,
                "limit_ms": LIMIT_MS, "shares_of_queue_rate": list(QUICK_SHARES if args.quick else SHARES)},
        seed=args.seed,
        workload=workloads.pairs(1_000, args.seed).workload,
        metrics=metrics,
        baselines=beside,
        goals=[] if args.quick else goals_of(found),
    )  # fmt: skip
    tables = [f"\n{name}\n{format_table(HEADER, rows_of(one))}" for name, one in found.items()]
    emit(result, tables, args.out)
    if args.out is not None:
        draw(found, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
