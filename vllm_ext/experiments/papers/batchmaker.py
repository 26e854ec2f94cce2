"""BatchMaker, figures 3, 7, 8, 9 and 11: one cell, and LSTMs over sentences, against padded batching.

The scheduler is the one that serves; workers are a cost model of the paper's V100, in virtual time. Figure 3 alone is
measured, on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ext.experiments.experiment import Findings, Paper, bar_plot, line_plot
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim
from vllm_ext.report.table import Table

if TYPE_CHECKING:
    from vllm_ext.experiments.batching.curves import Manner, Point, Requests

OURS, PADDED = "batchmaker", "padded"
SYSTEM = "The system is the scheduler of `vllm-ext cellular`, in order of arrival; the systems table has no such row."
DEVICE = (
    "The device is a cost model with the paper's figures: a step takes 185 us up to batch 64, 784 us at 512. Cellular "
    "batching adds 65 us per task, as the paper states for batches of 64, and 20 ns per gathered row."
)
PADDING = "Padded batching has neither scheduling nor gathering cost, which is in its favour."
DATA = "Sentences are made up: log-normal lengths with the paper's mean (24) and 99th percentile (100), at most 330."
SUSTAINED = "A load is sustained while its P90 latency is at most 500 ms; the peak is the highest throughput of those."
PAPER = Paper(
    "BatchMaker, EuroSys 2018 (figures as in the dissertation, 2024)", "batchmaker-published",
    (SYSTEM, DEVICE, PADDING, DATA, SUSTAINED),
)  # fmt: skip
LOADS = (1e3, 2e3, 3.5e3, 5e3, 8e3, 12e3, 16e3, 20e3, 24e3, 28e3)
QUICK_LOADS = (2e3, 5e3, 8e3, 14e3, 20e3, 26e3)
MARGIN = "padded batching has no cost per task here"


def seconds(runner: Runner) -> float:
    """Return how long a load lasts: many turns of all buckets, each of which takes some 0.2 s."""
    return 0.2 if runner.quick else 2.5


def loads(runner: Runner) -> tuple[float, ...]:
    """Return the offered rates, in requests per second."""
    return QUICK_LOADS if runner.quick else LOADS


def sentences(runner: Runner, longest: int | None = None, fixed: int | None = None) -> tuple[Requests, Any]:
    """Return LSTM requests and their data."""
    from vllm_ext.cellular.models import build
    from vllm_ext.experiments.batching import workloads
    from vllm_ext.experiments.batching.curves import Requests

    data = workloads.pairs(2_000 if runner.quick else 20_000, runner.seed)
    if longest is not None:
        data = workloads.clipped(data, longest)
    if fixed is not None:
        data = workloads.Data(f"sentences of {fixed} words", [[fixed, fixed]])
    rows = [{"tokens": [0] * source} for source, _ in data.rows]
    model = build("lstm", hidden=1, vocabulary=1, classes=0)
    return Requests(model, rows, shape=lambda row: len(row["tokens"])), data.workload


def cellular(max_batch: int = 512) -> Manner:
    """Return cellular batching of an LSTM."""
    from vllm_ext.cellular.graphs import CellTable
    from vllm_ext.cellular.scheduler import Scheduler
    from vllm_ext.experiments.batching.curves import LSTM, ROW_S, TASK_S, Manner
    from vllm_ext.experiments.batching.virtual import Costs

    def make(cells: CellTable) -> Scheduler:
        return Scheduler(CellTable([cell.with_batches(max_batch) for cell in cells.cells]))

    return Manner(name=OURS, make=make, costs=Costs(cells={"step": LSTM}, task_s=TASK_S, row_s=ROW_S))


def padded(max_batch: int = 512, width: int = 10) -> Manner:
    """Return padded batching of an LSTM."""
    from vllm_ext.experiments.batching.curves import LSTM, Manner
    from vllm_ext.experiments.batching.padding import PaddedBatching
    from vllm_ext.experiments.batching.virtual import Costs

    return Manner(
        name=PADDED, make=lambda cells: PaddedBatching(cells, max_batch=max_batch, width=width),
        costs=Costs(cells={"step": LSTM}),
    )  # fmt: skip


def compared(runner: Runner, manners: Mapping[str, Manner], requests: Requests) -> dict[str, list[Point]]:
    """Return the curve of each manner."""
    from vllm_ext.experiments.batching.curves import curve

    at = loads(runner)
    return {name: curve(one, requests, at, seconds=seconds(runner), seed=runner.seed) for name, one in manners.items()}


def findings(
    curves: Mapping[str, Sequence[Point]],
    claims: Sequence[Claim],
    data: Any,
    runner: Runner,
    ours: Sequence[str] = (OURS,),
) -> Findings:
    """Return curves as findings: a table, a plot of P90 latency, flat metrics."""
    from vllm_ext.experiments.batching.curves import HEADER, metrics_of, rows_of

    plot = line_plot(
        "", {name: [(p.served_per_s, p.p90_ms) for p in points if p.sustained] for name, points in curves.items()},
        xlabel="served requests/s", ylabel="P90 latency (ms)", log_y=True,
    )  # fmt: skip
    metrics: dict[str, float] = {}
    for name in ours:
        metrics |= metrics_of("" if len(ours) == 1 else f"{name}.", curves[name])
    return Findings(
        tables=[Table(HEADER, rows_of(curves))], claims=claims, metrics=metrics,
        baselines={name: metrics_of("", points) for name, points in curves.items() if name not in ours},
        config={"seconds_per_load": seconds(runner)}, plots=[plot], workload=[data],
    )  # fmt: skip


def against_padded(
    ours: Sequence[Point], theirs: Sequence[Point], what: str, paper: tuple[float, float, float]
) -> list[Claim]:
    """Return the paper's headlines, peak throughput and P90 latency at moderate load.

    Args:
        ours: A curve; so is ``theirs``.
        theirs: Of padded batching.
        what: Served, for the names.
        paper: Ratio of peaks, least and most of what is saved.
    """
    from vllm_ext.experiments.batching.curves import peak, reductions

    lower = reductions(ours, theirs)
    facts, most = f"{len(lower)} loads", max(point.served_per_s for point in theirs)
    saved = f"{what}: P90 latency saved below half of {PADDED}'s peak"
    return [
        Claim(name=f"{what}: peak throughput, {OURS} / {PADDED}", goal=paper[0], value=peak(ours) / peak(theirs),
              facts=f"{peak(ours):.0f} and {peak(theirs):.0f} req/s, {most:.0f} at any latency",
              why=MARGIN, headline=True),
        Claim(name=f"{saved}, at least", goal=paper[1], value=min(lower), facts=facts, headline=True, why=MARGIN),
        Claim(name=f"{saved}, at most", goal=paper[2], value=max(lower), facts=facts, headline=True,
              why="the cost model's padded batching has no overhead of its own"),
    ]  # fmt: skip


@PAPER.figure(
    "batchmaker-fig3", "Figure 2.3", "A step of an LSTM by batch size, measured",
    ("Measured on this machine's CPU with one thread and hidden size 1024, where the paper has a CPU and a V100; only "
     "ratios of the V100 are stated in its text.",),
)  # fmt: skip
def fig3(runner: Runner) -> Findings:
    """Measure the cell."""
    from vllm_ext.cellular.models import build
    from vllm_ext.cellular.profile import measure
    from vllm_ext.experiments.batching.workloads import Data

    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    cell = build("lstm", hidden=1024, vocabulary=64, classes=0).cells[0]
    found = measure(cell, batches, repeats=3 if runner.quick else 9)
    ms = {batch: seconds * 1e3 for batch, seconds in found.seconds.items()}
    rate = {batch: batch / seconds for batch, seconds in found.seconds.items()}
    why = "a CPU is busy with a small batch already, where a GPU waits for weights"
    claims = [
        Claim(name="rows/s at batch 64 / at batch 1", goal=64.0, value=rate[64] / rate[1], why=why),
        Claim(name="rows/s at batch 512 / at batch 64", goal=(512 / 784) / (64 / 185), value=rate[512] / rate[64],
              why=why),
    ]  # fmt: skip
    return Findings(
        tables=[Table(("batch", "ms", "rows/s"), [[str(b), ms[b], rate[b]] for b in batches])], claims=claims,
        metrics={f"batch_{b}.ms": ms[b] for b in batches} | {"knee_rows": float(found.knee)},
        plots=[line_plot("", {"this CPU": [(rate[b], ms[b]) for b in batches]}, xlabel="rows/s", ylabel="ms per step",
                         log_x=True, log_y=True)],
        workload=[Data("batches of random states", batches).workload],
    )  # fmt: skip


@PAPER.figure("batchmaker-fig7", "Figure 2.7", "LSTM: latency against throughput, batches of at most 512 and 64")
def fig7(runner: Runner) -> Findings:
    """Serve sentences at increasing loads."""
    from vllm_ext.experiments.batching.curves import peak

    requests, data = sentences(runner)
    small, small_padded = f"{OURS}, 64", f"{PADDED}, 64"
    manners = {OURS: cellular(), PADDED: padded(), small: cellular(64), small_padded: padded(64)}
    curves = compared(runner, manners, requests)
    low = {name: next(p.p90_ms for p in curves[name] if p.load_per_s == 5e3) for name in (OURS, small)}
    claims = [
        *against_padded(curves[OURS], curves[PADDED], "LSTM", (1.25, 0.375, 0.905)),
        Claim(name="P90 latency at 5K req/s (ms)", goal=12.0, value=low[OURS], op="<="),
        Claim(name="peak throughput (req/s)", goal=20e3, value=peak(curves[OURS])),
        Claim(name="P90 latency at 5K req/s, batches of at most 512 / 64", goal=1.0, value=low[OURS] / low[small],
              op="<=", facts="stated as similar"),
        Claim(name="batches of at most 64: peak, batchmaker / padded", goal=1.0,
              value=peak(curves[small]) / peak(curves[small_padded]),
              why="at batch 64 the 65 us per task are a fourth of it; padded batching has no such cost here"),
    ]  # fmt: skip
    return findings(curves, claims, data, runner, (OURS, small))


@PAPER.figure("batchmaker-fig8", "Figure 2.8", "Padded LSTM by the width of buckets")
def fig8(runner: Runner) -> Findings:
    """Serve sentences in buckets of several widths."""
    from vllm_ext.experiments.batching.curves import peak

    requests, data = sentences(runner)
    manners = {f"width {width}": padded(width=width) for width in (1, 5, 10, 20, 40)}
    curves = compared(runner, manners, requests)
    low = {name: points[0].p90_ms for name, points in curves.items()}
    claims = [
        Claim(name="P90 latency at the lowest load, width 40 / 10", goal=1.0, value=low["width 40"] / low["width 10"],
              op="<=", facts="stated as better"),
        Claim(name="P90 latency at the lowest load, width 10 / 1", goal=1.0, value=low["width 10"] / low["width 1"],
              op="<=", facts="stated as better"),
        Claim(name="peak, width 1 / 10", goal=1.0, value=peak(curves["width 1"]) / peak(curves["width 10"]),
              facts="stated as best",
              why="its latency is above 500 ms from moderate loads on, before its batches are full"),
        Claim(name="peak, width 10 / 40", goal=1.0, value=peak(curves["width 10"]) / peak(curves["width 40"]),
              facts="stated as higher", why="fewer, fuller buckets outweigh their padding"),
    ]  # fmt: skip
    return findings(curves, claims, data, runner, tuple(curves))


@PAPER.figure("batchmaker-fig9", "Figure 2.9", "LSTM at 5K requests/s: queueing and computing")
def fig9(runner: Runner) -> Findings:
    """Split latency at one load."""
    import numpy as np

    from vllm_ext.experiments.batching.curves import at

    requests, data = sentences(runner)
    served = {
        one.name: at(one, requests, 5e3, seconds=1.0 if runner.quick else 6.0, seed=runner.seed)
        for one in (cellular(), padded())
    }
    found: dict[str, dict[str, float]] = {}
    for name, one in served.items():
        window = one.window()
        queue = (one.started_s - one.arrived_s)[window] * 1e3
        compute = (one.ended_s - one.started_s)[window] * 1e3
        found[name] = {
            f"{what}_p{p}_ms": float(np.percentile(values, p))
            for what, values in (("queueing", queue), ("computing", compute))
            for p in (50, 90, 99)
        }
    ours, theirs = found[OURS], found[PADDED]
    claims = [
        Claim(name="P99 queueing time (ms)", goal=1.38, value=ours["queueing_p99_ms"], op="<=", headline=True,
              why="a series of five tasks is waited for"),
        Claim(name="P99 queueing time, padded / batchmaker", goal=100 / 1.38, headline=True,
              value=theirs["queueing_p99_ms"] / ours["queueing_p99_ms"], facts="the paper states more than 100 ms"),
        Claim(name="median computing time, padded / batchmaker", goal=1.0,
              value=theirs["computing_p50_ms"] / ours["computing_p50_ms"], facts="stated as less"),
    ]  # fmt: skip
    keys = list(ours)
    return Findings(
        tables=[Table(("batching", *keys), [[name, *one.values()] for name, one in found.items()])], claims=claims,
        metrics=ours, baselines={PADDED: theirs}, workload=[data],
        plots=[bar_plot("", keys, {name: [*one.values()] for name, one in found.items()}, ylabel="ms")],
    )  # fmt: skip


@PAPER.figure("batchmaker-fig11", "Figure 2.11", "LSTM by variance of length: 24 words, at most 50, at most 100")
def fig11(runner: Runner) -> Findings:
    """Serve three data sets; of the first, equal lengths without any cost of scheduling are the ideal."""
    from vllm_ext.experiments.batching.curves import LSTM, peak

    data_sets = {
        "24": sentences(runner, fixed=24),
        "50": sentences(runner, longest=50),
        "100": sentences(runner, longest=100),
    }
    curves: dict[str, list[Point]] = {}
    for name, (requests, _) in data_sets.items():
        manners = {f"{one.name}, {name}": one for one in (cellular(), padded())}
        curves |= compared(runner, manners, requests)
    ideal = 512 / (LSTM(512) * 24)
    low = {name: points[0].p90_ms for name, points in curves.items()}
    grown = {one: low[f"{one}, 100"] / low[f"{one}, 50"] for one in (OURS, PADDED)}
    claims = [
        Claim(name="24 words: peak throughput over the ideal", goal=0.87, value=peak(curves[f"{OURS}, 24"]) / ideal,
              facts=f"ideal {ideal:.0f} req/s", headline=True,
              why="a task at batch 512 takes 859 us instead of 784"),
        *(Claim(name=f"at most {n}: peak throughput, {OURS} / {PADDED}", goal=1.0,
                value=peak(curves[f"{OURS}, {n}"]) / peak(curves[f"{PADDED}, {n}"]), facts="stated as higher")
          for n in ("50", "100")),
        Claim(name=f"P90 at the lowest load, at most 100 / 50: {OURS} over {PADDED}", goal=1.0, op="<=",
              value=grown[OURS] / grown[PADDED], facts="variance of length costs the baselines more",
              why="its P90 follows the longer sentences themselves"),
    ]  # fmt: skip
    return findings(curves, claims, data_sets["100"][1], runner, tuple(f"{OURS}, {n}" for n in data_sets))
