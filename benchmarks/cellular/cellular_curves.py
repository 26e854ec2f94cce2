"""Latency against throughput of cellular batching and all that it is compared with, in real execution on this CPU.

Method: `vllm-ext cellular`'s engine with one thread, hidden size 256, on LSTMs and Seq2Seq over made-up sentences and
on TreeLSTMs over made-up trees; the same engine with Algorithm 1's order of cells, with padded batching, one request at
a time, and for trees graph merging in DyNet's and in Fold's manner, whose merging costs what it costs on this machine,
measured first. Each manner has the largest batch, of four, with which it serves most from a queue; that is its
capacity, and it gets Poisson arrivals at shares of it, in turns with the others. Latency counts from the intended
arrival and is wall time. A load is sustained while P90 latency is at most 500 ms (Seq2Seq 1,500); the peak is the
highest throughput of those. Values are medians over seeds, `low` and `high` the least and the most of them. A second
curve of padded batching at the same loads, the A/A row, says what the machine does.

    OMP_NUM_THREADS=1 python benchmarks/cellular/cellular_curves.py --quick
    OMP_NUM_THREADS=1 python benchmarks/cellular/cellular_curves.py --out benchmarks/results/cellular_curves.json

Beside ``--out`` lies a figure per model.
"""

from __future__ import annotations

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

from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.models import Model, build
from vllm_ext.experiments.batching import workloads
from vllm_ext.experiments.batching.curves import HEADER, Point, metrics_of, peak, reductions, rows_of
from vllm_ext.experiments.batching.merging import MergedBatching, Merging
from vllm_ext.report.claim import Claim
from vllm_ext.report.common_flags import at_least
from vllm_ext.report.plots import Panel, Series, stacked
from vllm_ext.report.results import Result, argument_parser, command, emit
from vllm_ext.report.table import Table

HIDDEN = 256
OURS, PUBLISHED, PADDED, AGAIN = "cellular", "cellular, published", "padded", "padded (A/A)"
DYNET, FOLD, ALONE = "dynet", "fold", "one by one"
_KEY = {OURS: "cellular", PUBLISHED: "published", PADDED: "padded", AGAIN: "again", DYNET: "dynet", FOLD: "fold"}
SHARES = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0)
"""Of each manner's own capacity."""
QUICK_SHARES = (0.2, 0.6)
LIMIT_MS = {"lstm": 500.0, "seq2seq": 1500.0, "treelstm": 500.0}
"""As in `vllm-ext repro`: padded Seq2Seq passes 500 ms early."""
BATCHES = (64, 128, 256, 512)
WARM_UP = 16
"""Requests before the clock starts."""


@dataclass(frozen=True, kw_only=True)
class Manner:
    """A manner of batching."""

    make: Callable[[int], real.Make] | None = None
    """Largest batch -> manner; None is cellular batching."""
    cells: str | None = None
    """Order of cells, see `EngineOptions`."""
    batches: Sequence[int] = BATCHES
    """Largest batches that are tried."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what it is asked, and in which manners."""

    model: Model
    requests: Sequence[Mapping[str, Any]]
    manners: Mapping[str, Manner]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A manner with its best batch."""

    batch: int
    capacity_per_s: float


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
                     manners=padded_and_alone()),
        "seq2seq": Case(model=build("seq2seq", hidden=HIDDEN, vocabulary=words, forced=1), requests=translations,
                        manners={OURS: Manner(), PUBLISHED: Manner(cells="published"), **padded_and_alone()}),
        "treelstm": Case(
            model=build("treelstm", hidden=HIDDEN, vocabulary=1 << 14, classes=0), requests=trees,
            manners={
                OURS: Manner(), DYNET: Manner(make=lambda _: merged(DYNET, node_s, overlapped=False), batches=(64,)),
                FOLD: Manner(make=lambda _: merged(FOLD, node_s, overlapped=True), batches=(64,)), ALONE: alone(),
            },
        ),
    }  # fmt: skip


def padded_and_alone() -> dict[str, Manner]:
    """Return the manners for chains."""
    padded = Manner(make=real.padded)
    return {OURS: Manner(), PADDED: padded, AGAIN: padded, ALONE: alone()}


def alone() -> Manner:
    """Return batches of one request."""
    return Manner(make=lambda batch: real.padded(batch, width=1), batches=(1,))


def merged(name: str, node_s: Mapping[str, float], *, overlapped: bool) -> real.Make:
    """Return graph merging at the cost of this machine; its batches are as large as what was merged."""
    merging = Merging(name=name, node_s=node_s[name], overlapped=overlapped)
    return lambda table, freed: MergedBatching(table, freed, merging=merging)


def engine(case: Case, manner: Manner, batch: int, count: int) -> CellularEngine:
    """Return an engine that serves in a manner."""
    make = None if manner.make is None else manner.make(batch)
    return real.engine(case.model, make, batch, count + WARM_UP, manner.cells)


def tuned(case: Case, manner: Manner, count: int) -> Tuned:
    """Return the batch with which most is served from a queue, in wall time, and how much that is."""
    asked = [case.requests[i % len(case.requests)] for i in range(count)]
    found = []
    for batch in manner.batches:
        with engine(case, manner, batch, count) as one:
            warm(one, case)
            begin = time.monotonic()
            for handle in [one.submit(request) for request in asked]:
                real.values(handle)
            found.append(Tuned(batch=batch, capacity_per_s=count / (time.monotonic() - begin)))
    return max(found, key=lambda one: one.capacity_per_s)


def warm(one: CellularEngine, case: Case) -> None:
    """Serve some requests: what is done once per shape of a batch is not part of a load."""
    for handle in [one.submit(request) for request in case.requests[:WARM_UP]]:
        real.values(handle)


def served(case: Case, manner: Manner, batch: int, rate_per_s: float, seconds: float, seed: int) -> Point:
    """Serve Poisson arrivals; throughput is of the time in which requests arrived, after its first fifth."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate_per_s, max(int(rate_per_s * seconds), 20)))
    drawn = rng.integers(0, len(case.requests), len(times)).tolist()
    with engine(case, manner, batch, len(times)) as one:
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


Curves = dict[str, list[list[Point]]]
"""Manner -> load -> seed -> what was served."""


def curves(
    case: Case, chosen: Mapping[str, Tuned], shares: Sequence[float], seconds: float, seeds: Sequence[int]
) -> Curves:
    """Serve loads, increasing; a manner stops at the second that it does not sustain."""
    found: Curves = {name: [] for name in case.manners}
    for share in shares:
        going = [name for name, loads in found.items() if sum(not middle(load).sustained for load in loads) < 2]
        turns: Curves = {name: [[]] for name in going}
        for seed in seeds:
            for name in going:
                load = chosen[name].capacity_per_s * share
                turns[name][0].append(served(case, case.manners[name], chosen[name].batch, load, seconds, seed))
        for name, load in turns.items():
            found[name] += load
        print(f"  {share} of capacity: {', '.join(going)}", file=sys.stderr, flush=True)
    return found


def of_seed(loads: Sequence[Sequence[Point]], place: int) -> list[Point]:
    """Return the curve of one seed."""
    return [load[place] for load in loads]


def peaks(ours: Sequence[Sequence[Point]], theirs: Sequence[Sequence[Point]]) -> list[float]:
    """Return our peak over theirs, per seed."""
    return [
        peak(of_seed(ours, place)) / max(peak(of_seed(theirs, place)), theirs[0][place].served_per_s)
        for place in range(len(ours[0]))
    ]


def compared(found: Mapping[str, Curves]) -> dict[str, float]:
    """Return the ratios of peaks, medians over seeds with the least and the most, and by how much P90 is lower."""
    metrics: dict[str, float] = {}
    for model, manners in found.items():
        pairs = [(OURS, other) for other in (PADDED, PUBLISHED, DYNET, FOLD)] + [(AGAIN, PADDED), (PUBLISHED, PADDED)]
        for one, other in pairs:
            if one in manners and other in manners:
                name = f"{model}_{_KEY[one]}_peak_over_{_KEY[other]}"
                ratios = peaks(manners[one], manners[other])
                metrics |= {name: statistics.median(ratios), f"{name}_low": min(ratios), f"{name}_high": max(ratios)}
                mine, theirs = ([middle(load) for load in manners[which]] for which in (one, other))
                saved = reductions(mine, theirs)
                metrics |= {f"{name.replace('peak', 'p90_saved')}_least": min(saved, default=0.0),
                            f"{name.replace('peak', 'p90_saved')}_most": max(saved, default=0.0)}  # fmt: skip
    return metrics


def goals_of(metrics: Mapping[str, float]) -> list[Claim]:
    """Judge by what the paper reports of its GPU."""
    wanted = {
        "lstm_cellular_peak_over_padded": (1.25, ""),
        "lstm_cellular_p90_saved_over_padded_least": (0.375, "at loads below half of padded batching's peak"),
        "seq2seq_cellular_peak_over_padded": (1.6, ""),
        "seq2seq_cellular_p90_saved_over_padded_least": (0.175, "at loads below half of padded batching's peak"),
        "treelstm_cellular_peak_over_dynet": (1.48, "launching an operator costs little on a CPU"),
        "treelstm_cellular_peak_over_fold": (4.0, "merging costs a smaller part of a CPU's time than of a GPU's"),
    }
    return [Claim(name=name, value=metrics[name], op=">=", goal=goal, facts=note)
            for name, (goal, note) in wanted.items()]  # fmt: skip


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
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="arrivals of a load (default: %(default)s)")
    parser.add_argument("--repeats", type=at_least(1), default=3, help="seeds, in turns (default: %(default)s)")
    args = parser.parse_args(argv)
    if not args.seconds > 0:
        parser.error(f"--seconds={args.seconds}: must be greater than 0")
    seconds, repeats = (0.3, 1) if args.quick else (args.seconds, args.repeats)
    torch.set_num_threads(1)
    costs = virtual.merging_us(workloads.trees(200, args.seed).rows, 3 if args.quick else 20)
    node_s = {name: costs[f"{name}_merging_us_per_node"] * 1e-6 for name in (DYNET, FOLD)}
    shares, count = (QUICK_SHARES, 200) if args.quick else (SHARES, 1_500)
    found: dict[str, Curves] = {}
    metrics, beside = dict(costs), dict[str, dict[str, float]]()
    shown: dict[str, dict[str, list[Point]]] = {}
    for name, case in cases(100 if args.quick else 1_000, args.seed, node_s).items():
        chosen = {manner: tuned(case, how, count) for manner, how in case.manners.items() if manner != AGAIN}
        if AGAIN in case.manners:
            chosen[AGAIN] = chosen[PADDED]
        said = ", ".join(f"{manner} {one.capacity_per_s:.0f} at {one.batch}" for manner, one in chosen.items())
        print(f"{name}, requests/s with a queue: {said}", file=sys.stderr, flush=True)
        found[name] = curves(case, chosen, shares, seconds, [args.seed + i for i in range(repeats)])
        shown[name] = {manner: [middle(load) for load in loads] for manner, loads in found[name].items()}
        for manner, points in shown[name].items():
            into = metrics if manner == OURS else beside.setdefault(manner, {})
            into |= {f"{name}.capacity_per_s": chosen[manner].capacity_per_s, f"{name}.batch": chosen[manner].batch}
            into |= metrics_of(f"{name}.", points)
    metrics |= compared(found)
    result = Result(
        name="cellular_curves",
        command=command(argv, __file__),
        config={"hidden": HIDDEN, "batches": list(BATCHES), "seconds_per_load": seconds, "seeds": repeats, "threads": 1,
                "limit_ms": LIMIT_MS, "shares_of_capacity": list(shares)},
        seed=args.seed,
        workload=workloads.pairs(1_000, args.seed).workload,
        metrics=metrics,
        baselines=beside,
        claims=[] if args.quick else goals_of(metrics),
    )  # fmt: skip
    tables = [f"\n{name}\n{Table(HEADER, rows_of(one))}" for name, one in shown.items()]
    emit(result, tables, args.out)
    if args.out is not None:
        draw(shown, args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
