"""BatchMaker, figures 7, 8, 9 and 11: LSTMs over sentences, against padded batching.

The scheduler is the one that serves; workers are a cost model of the paper's V100, in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from vllm_ext.experiments.experiment import Findings, Paper, bar_plot, line_plot
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim, Reason, Verdict
from vllm_ext.report.table import Table

if TYPE_CHECKING:
    from vllm_ext.experiments.batching.curves import Manner, Point, Requests
    from vllm_ext.experiments.batching.workloads import Data

NOT_SIMULATED = {
    "Figures 2.1, 2.2, 2.4, 2.6 and 2.12": "drawings",
    "Figure 2.10": "the data set's lengths, which the workload is drawn from",
}
"""Figures without an experiment, and why."""
OURS, PADDED = "batchmaker", "padded"
SYSTEM = "The system is the scheduler of `vllm-ext cellular`, in order of arrival; the systems table has no such row."
DEVICE = (
    "The device is a cost model with the paper's figures: a step takes 185 us up to batch 64, 784 us at 512. Cellular "
    "batching adds 65 us per task, as the paper states for batches of 64, and 20 ns per gathered row."
)
PADDING = "Padded batching has neither scheduling nor gathering cost, which is in its favour."
LONGEST = 130
"""Words of the longest sentence."""
DATA = (
    "Sentences are made up: log-normal lengths with the paper's mean (24) and 99th percentile (100). The longest has "
    f"330 words in the paper and {LONGEST} here, with which padded batching has the paper's peak, 16K requests/s. How "
    "many lie between 100 and 330 words is not stated, and it decides that peak: see a table of batchmaker-fig7. "
    "`--data DIR` serves the pairs of a file of WMT too."
)
SUSTAINED = "A load is sustained while its P90 latency is at most 500 ms; the peak is the highest throughput of those."
DIFFERENCES = (SYSTEM, DEVICE, PADDING, DATA, SUSTAINED)
PAPER = Paper("BatchMaker, EuroSys 2018 (figures as in the dissertation, 2024)", "batchmaker-published", DIFFERENCES)
LOADS = (1e3, 2e3, 3.5e3, 5e3, 8e3, 12e3, 16e3, 18e3, 20e3, 24e3, 28e3)
QUICK_LOADS = (2e3, 5e3, 8e3, 14e3, 20e3, 26e3)
CUTS = (100, 160, 200, 330)
"""Longest sentences that a table looks at as well."""
FITTED_TASK_S, FITTED_ROW_S = 34e-6, 487e-9
"""Cost of a task and of gathering a row that give the paper's 250 us at batch 64 and its peak of 20K req/s at 512."""
FITTED = f"{OURS}, {FITTED_ROW_S * 1e6:.2g} us a row"


def seconds(runner: Runner) -> float:
    """Return how long a load lasts: many turns of all buckets, each of which takes some 0.2 s."""
    return 0.2 if runner.quick else 2.5


def loads(runner: Runner) -> tuple[float, ...]:
    """Return the offered rates, in requests per second."""
    return QUICK_LOADS if runner.quick else LOADS


def pairs(runner: Runner, longest: int) -> Data:
    """Return sentences and their translations of at most so many words: those of WMT, where its file is, or made up."""
    from vllm_ext.experiments.batching import workloads

    file = runner.files.of("wmt")
    found = workloads.read_pairs(file) if file else workloads.pairs(2_000 if runner.quick else 20_000, runner.seed)
    return workloads.clipped(found, longest)


def sentences(runner: Runner, longest: int = LONGEST, fixed: int | None = None) -> tuple[Requests, Any]:
    """Return LSTM requests and their data: sentences of at most ``longest`` words, or all of ``fixed``."""
    from vllm_ext.cellular.models import build
    from vllm_ext.experiments.batching.curves import Requests
    from vllm_ext.experiments.batching.workloads import Data

    data = Data(f"sentences of {fixed} words", [[fixed, fixed]]) if fixed else pairs(runner, longest)
    rows = [{"tokens": [0] * source} for source, _ in data.rows]
    model = build("lstm", hidden=1, vocabulary=1, classes=0)
    return Requests(model, rows, shape=lambda row: len(row["tokens"])), data.workload


def cellular(max_batch: int = 512, *, fitted: bool = False) -> Manner:
    """Return cellular batching of an LSTM, ``fitted`` with overhead that gives the paper's peak."""
    from vllm_ext.cellular.graphs import CellTable
    from vllm_ext.cellular.scheduler import Scheduler
    from vllm_ext.experiments.batching.curves import LSTM, ROW_S, TASK_S, Manner
    from vllm_ext.experiments.batching.virtual import Costs

    task_s, row_s = (FITTED_TASK_S, FITTED_ROW_S) if fitted else (TASK_S, ROW_S)

    def make(cells: CellTable) -> Scheduler:
        return Scheduler(CellTable([cell.with_batches(max_batch) for cell in cells.cells]))

    return Manner(name=OURS, make=make, costs=Costs(cells={"step": LSTM}, task_s=task_s, row_s=row_s))


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
    curves: Mapping[str, Sequence[Point]], claims: Sequence[PaperClaim], data: Any, runner: Runner,
    ours: Sequence[str] = (OURS,), beside: Sequence[Table] = (),
) -> Findings:  # fmt: skip
    """Return curves as findings: a table, with others ``beside`` it, a plot of P90 latency, flat metrics."""
    from vllm_ext.experiments.batching.curves import HEADER, metrics_of, rows_of

    plot = line_plot(
        "", {name: [(p.served_per_s, p.p90_ms) for p in points if p.sustained] for name, points in curves.items()},
        xlabel="served requests/s", ylabel="P90 latency (ms)", log_y=True,
    )  # fmt: skip
    metrics: dict[str, float] = {}
    for name in ours:
        metrics |= metrics_of("" if len(ours) == 1 else f"{name}.", curves[name])
    return Findings(
        tables=[Table(HEADER, rows_of(curves)), *beside], claims=claims, metrics=metrics,
        baselines={name: metrics_of("", points) for name, points in curves.items() if name not in ours},
        config={"seconds_per_load": seconds(runner)}, plots=[plot], workload=[data],
    )  # fmt: skip


def against_padded(
    ours: Sequence[Point], theirs: Sequence[Point], what: str, ratio: float, saved: tuple[float, float],
    reasons: Mapping[Verdict, Reason],
) -> list[PaperClaim]:  # fmt: skip
    """Return the paper's headlines, peak throughput and P90 latency at moderate load.

    Args:
        ours: A curve; so is ``theirs``.
        theirs: Of padded batching.
        what: Served, for the names.
        ratio: Of the peaks, as the paper states it.
        saved: Least and most of what it states to be saved of P90 latency.
        reasons: Why the peaks' ratio is another.
    """
    from vllm_ext.experiments.batching.curves import peak, reductions

    lower, most = reductions(ours, theirs), max(point.served_per_s for point in theirs)
    return [
        PaperClaim(name=f"{what}: peak throughput, {OURS} / {PADDED}", goal=ratio, value=peak(ours) / peak(theirs),
                   facts=f"{peak(ours):.0f} and {peak(theirs):.0f} req/s, {most:.0f} at any latency", headline=True,
                   reasons=reasons),
        PaperClaim(name=f"{what}: P90 latency saved below half of {PADDED}'s peak, median over loads", goal=saved[0],
                   most=saved[1], value=median(lower), headline=True,
                   facts=f"{min(lower):.2f} to {max(lower):.2f} over {len(lower)} loads"),
    ]  # fmt: skip


def above(row: str) -> Mapping[Verdict, Reason]:
    """Return why cellular batching serves more than the paper's; a row has overhead that does not let it."""
    return {"above": Reason("gathering a row costs less than the paper's peak tells", f"row `{row}`")}


def tendency(name: str, value: float, stated: str, **more: Any) -> PaperClaim:
    """Return a ratio that the paper puts into words, above 1."""
    return PaperClaim(name=name, kind="tendency", goal=1.0, value=value, facts=f"stated as {stated}", **more)


@PAPER.figure(
    "batchmaker-fig7", "Figure 2.7", "LSTM: latency against throughput, batches of at most 512 and 64", repeats=5
)
def fig7(runner: Runner) -> Findings:
    """Serve sentences at increasing loads; then cut the data at other lengths, and look at the peaks."""
    from vllm_ext.experiments.batching.curves import peak

    requests, data = sentences(runner)
    small = f"{OURS}, 64"
    manners = {OURS: cellular(), PADDED: padded(), FITTED: cellular(fitted=True), small: cellular(64),
               f"{PADDED}, 64": padded(64)}  # fmt: skip
    curves = compared(runner, manners, requests)
    peaks = {name: peak(points) for name, points in curves.items()}
    low = {name: next(p.p90_ms for p in curves[name] if p.load_per_s == 5e3) for name in (OURS, small)}
    claims = [
        *against_padded(curves[OURS], curves[PADDED], "LSTM", 1.25, (0.375, 0.905), above(FITTED)),
        PaperClaim(name="P90 latency at 5K req/s (ms)", goal=12.0, value=low[OURS], op="<="),
        PaperClaim(name="peak throughput (req/s)", goal=20e3, value=peaks[OURS], reasons=above(FITTED)),
        PaperClaim(name=f"peak throughput, {PADDED} (req/s)", goal=16e3, value=peaks[PADDED]),
        PaperClaim(name="P90 latency at 5K req/s, batches of at most 512 / 64", goal=1.0, value=low[OURS] / low[small],
                   op="<=", facts="stated as similar"),
        tendency("peak throughput, batches of at most 512 / 64", peaks[OURS] / peaks[small], "much higher"),
    ]  # fmt: skip
    cuts = {cut: _peaks(runner, cut) for cut in CUTS[:: 3 if runner.quick else 1]}
    cuts = dict(sorted({**cuts, LONGEST: (peaks[OURS], peaks[PADDED])}.items()))
    by_cut = Table(("longest sentence (words)", f"{PADDED}, req/s", f"{OURS}, req/s", "ratio"),
                   [(cut, theirs, ours, ours / theirs) for cut, (ours, theirs) in cuts.items()],
                   title="Peaks by the longest sentence")  # fmt: skip
    found = findings(curves, claims, data, runner, (OURS, small, FITTED), [by_cut])
    ratios = {f"longest_{cut}.peak_over_padded": ours / theirs for cut, (ours, theirs) in cuts.items()}
    return replace(found, metrics={**found.metrics, **ratios})


def _peaks(runner: Runner, longest: int) -> tuple[float, float]:
    """Return the peaks of cellular and of padded batching on sentences of at most so many words."""
    from vllm_ext.experiments.batching.curves import peak

    requests, _ = sentences(runner, longest)
    curves = compared(runner, {OURS: cellular(), PADDED: padded()}, requests)
    return peak(curves[OURS]), peak(curves[PADDED])


@PAPER.figure("batchmaker-fig8", "Figure 2.8", "Padded LSTM by the width of buckets", repeats=5)
def fig8(runner: Runner) -> Findings:
    """Serve sentences in buckets of several widths."""
    from vllm_ext.experiments.batching.curves import peak

    requests, data = sentences(runner)
    manners = {f"width {width}": padded(width=width) for width in (1, 5, 10, 20, 40)}
    curves = compared(runner, manners, requests)
    low = {name: points[0].p90_ms for name, points in curves.items()}
    peaks = {name: peak(points) for name, points in curves.items()}
    late = Reason("its turn passes 500 ms before its batches are full", "row `width 1`")
    claims = [
        tendency("P90 latency at the lowest load, width 10 / 40", low["width 10"] / low["width 40"], "better at 40",
                 headline=True),
        tendency("P90 latency at the lowest load, width 1 / 10", low["width 1"] / low["width 10"], "better at 10"),
        tendency("peak throughput, width 1 / 10", peaks["width 1"] / peaks["width 10"], "best at 1",
                 reasons={"tendency": late}),
        tendency("peak throughput, width 10 / 40", peaks["width 10"] / peaks["width 40"], "higher at 10"),
    ]  # fmt: skip
    return findings(curves, claims, data, runner, tuple(curves))


@PAPER.figure("batchmaker-fig9", "Figure 2.9", "LSTM at 5K requests/s: queueing and computing", repeats=5)
def fig9(runner: Runner) -> Findings:
    """Split latency at one load; padded batching also serves longer sentences."""
    import numpy as np

    from vllm_ext.experiments.batching.curves import at

    requests, data = sentences(runner)
    longer = CUTS[-1]
    served = {
        name: at(one, of, 5e3, seconds=1.0 if runner.quick else 6.0, seed=runner.seed)
        for name, one, of in (
            (OURS, cellular(), requests),
            (PADDED, padded(), requests),
            (f"{PADDED}, at most {longer} words", padded(), sentences(runner, longer)[0]),
        )
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
        PaperClaim(name="P99 queueing time (ms)", goal=1.38, value=ours["queueing_p99_ms"], op="<=", headline=True,
                   reasons={"above": Reason("five tasks of 250 us, and nothing else waited for",
                                            f"column `queueing_p99_ms`, row `{OURS}`")}),
        PaperClaim(name="P99 queueing time, padded / batchmaker", goal=100 / 1.38, headline=True,
                   value=theirs["queueing_p99_ms"] / ours["queueing_p99_ms"],
                   facts="the paper states more than 100 ms over 1.38",
                   reasons={"above": Reason("the paper's 100 ms is a bound; long sentences decide",
                                            f"row `{PADDED}, at most {longer} words`")}),
        tendency("median computing time, padded / batchmaker", theirs["computing_p50_ms"] / ours["computing_p50_ms"],
                 "less"),
    ]  # fmt: skip
    keys = list(ours)
    return Findings(
        tables=[Table(("batching", *keys), [[name, *one.values()] for name, one in found.items()])], claims=claims,
        metrics=ours, baselines={name: one for name, one in found.items() if name != OURS}, workload=[data],
        plots=[bar_plot("", keys, {name: [*one.values()] for name, one in found.items()}, ylabel="ms")],
    )  # fmt: skip


@PAPER.figure(
    "batchmaker-fig11", "Figure 2.11", "LSTM by variance of length: 24 words, at most 50, at most 100",
    (*DIFFERENCES, "Sentences of 24 words are padded to 24, not to the 30 of their bucket: the paper's padded "
     "systems reach the ideal there."),
    repeats=5,
)  # fmt: skip
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
        manners = {f"{OURS}, {name}": cellular(), f"{PADDED}, {name}": padded(width=1 if name == "24" else 10)}
        curves |= compared(runner, manners, requests)
    ideal = 512 / (LSTM(512) * 24)
    low = {name: points[0].p90_ms for name, points in curves.items()}
    peaks = {name: peak(points) for name, points in curves.items()}
    claims = [
        PaperClaim(name="24 words: peak throughput over the ideal", goal=0.87, value=peaks[f"{OURS}, 24"] / ideal,
                   facts=f"ideal {ideal:.0f} req/s", headline=True),
        PaperClaim(name=f"24 words: peak throughput over the ideal, {PADDED}", goal=1.0,
                   value=peaks[f"{PADDED}, 24"] / ideal, facts="stated as closely matched"),
        PaperClaim(name="P90 latency at the lowest load, at most 100 / 50", goal=1.0, op="<=",
                   value=low[f"{OURS}, 100"] / low[f"{OURS}, 50"], facts="stated as the same", headline=True,
                   reasons={"below": Reason("nobody waits: P90 is that of the longer sentences themselves",
                                            f"rows `{OURS}, 50` and `{OURS}, 100`: it is the same up to 8K req/s")}),
        tendency(f"P90 latency at the lowest load, at most 100 / 50, {PADDED}",
                 low[f"{PADDED}, 100"] / low[f"{PADDED}, 50"], "much worse"),
        tendency(f"peak throughput, at most 50 / 100, {PADDED}", peaks[f"{PADDED}, 50"] / peaks[f"{PADDED}, 100"],
                 "much worse at 100"),
    ]  # fmt: skip
    return findings(curves, claims, data_sets["100"][1], runner, tuple(f"{OURS}, {n}" for n in data_sets))
