"""BatchMaker, figures 13, 14 and 15: sequence to sequence on several devices, and TreeLSTMs against graph merging."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm_ext.experiments.experiment import Findings
from vllm_ext.experiments.papers import batchmaker as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import Claim

if TYPE_CHECKING:
    from vllm_ext.cellular.graphs import CellTable
    from vllm_ext.cellular.scheduler import Scheduler
    from vllm_ext.experiments.batching.curves import Manner, Point, Requests

PAPER, OURS, PADDED = base.PAPER, base.OURS, base.PADDED
DYNET, FOLD, IDEAL = "dynet", "fold", "ideal"
WIDE = f"{OURS}, 512"
"""Ours: batches are not held to 64."""
DYNET_NODE_S, FOLD_NODE_S = 3.9e-6, 22e-6
"""CPU seconds of building and merging a node of a cell graph, by `benchmarks/cellular/cellular.py`: by operators, with
arrays (`merge_operators`), and by cells, in an interpreter (``unfold``, layout, `merge_cells`)."""
LIMIT_MS = 1500.0
"""P90 latency up to which a load of figure 13 is sustained: padded batching passes 500 ms early."""
MOST = 20_000
"""Requests of a load of figure 13, at most."""
DECODER = 3.0
"""A decoder's step over an encoder's: decoding is 75 % of the work (section 2.7.4)."""
INTERNAL, LEAF = 5 / 4, 3 / 8
"""Work of a TreeLSTM's cells over that of an LSTM's: products of 2h x 5h and h x 3h instead of 2h x 4h."""
TREES = (
    base.SYSTEM,
    base.DEVICE,
    f"The cells cost {INTERNAL:g} (internal) and {LEAF:g} (leaf) of an LSTM's step, by the size of their products.",
    f"Building and merging a node costs {DYNET_NODE_S * 1e6:g} us in DyNet's manner, {FOLD_NODE_S * 1e6:g} in Fold's, "
    "as measured here (see benchmarks/cellular/cellular.py); DyNet's launches per operator are left out.",
    "Trees are made up with the shape of Stanford TreeBank's: 19 leaves, depth 11 on average.",
    base.SUSTAINED,
)


def translations(runner: Runner) -> tuple[Requests, Any]:
    """Return Seq2Seq requests, which decode as many words as the translation has, and their data."""
    from vllm_ext.cellular.models import build
    from vllm_ext.experiments.batching import workloads
    from vllm_ext.experiments.batching.curves import Requests

    data = workloads.pairs(2_000 if runner.quick else 20_000, runner.seed)
    rows = [{"tokens": [0] * source, "max_steps": 2 * workloads.LONGEST} for source, _ in data.rows]
    model = build("seq2seq", hidden=1, vocabulary=2)
    hidden = [{1: target} for _, target in data.rows]
    return Requests(model, rows, hidden, shape=lambda row: len(row["tokens"])), data.workload


def seq2seq(workers: int) -> dict[str, Manner]:
    """Return the manners of figure 13."""
    from vllm_ext.cellular.graphs import CellTable
    from vllm_ext.cellular.scheduler import Scheduler
    from vllm_ext.experiments.batching.curves import LSTM, ROW_S, TASK_S, Manner
    from vllm_ext.experiments.batching.padding import PaddedBatching
    from vllm_ext.experiments.batching.virtual import Costs

    cells = {"encoder": LSTM, "decoder": LSTM.scaled(DECODER)}
    ours = Costs(cells=cells, task_s=TASK_S, row_s=ROW_S)

    def limited(encoder: int) -> Any:
        def make(table: CellTable) -> Scheduler:
            sizes = {"encoder": encoder, "decoder": 256}
            return Scheduler(CellTable([cell.with_batches(sizes[cell.name]) for cell in table.cells]))

        return make

    return {
        OURS: Manner(name=OURS, make=limited(512), costs=ours, workers=workers),
        f"{OURS}, 256": Manner(name=OURS, make=limited(256), costs=ours, workers=workers),
        PADDED: Manner(name=PADDED, make=lambda table: PaddedBatching(table, max_batch=256), costs=Costs(cells=cells),
                       workers=workers),
    }  # fmt: skip


@PAPER.figure(
    "batchmaker-fig13", "Figure 2.13", "Seq2Seq on two and four devices",
    (base.SYSTEM, base.DEVICE, base.PADDING, base.DATA,
     f"A load is sustained while its P90 latency is at most {LIMIT_MS:.0f} ms: padding passes 500 ms early.",
     f"A decoder's step costs {DECODER:g} times an encoder's at the same batch.",
     "Devices share what they compute on: moving a request to another device costs nothing."),
)  # fmt: skip
def fig13(runner: Runner) -> Findings:
    """Serve translations."""
    from vllm_ext.experiments.batching.curves import curve, peak

    requests, data = translations(runner)
    steps = (0.25, 0.5, 1, 4, 8, 12) if runner.quick else (0.25, 0.5, 1, 2, 4, 6, 8, 10)
    every = [step * 1e3 for step in steps]
    curves: dict[str, list[Point]] = {}
    claims: list[Claim] = []
    for workers in (2,) if runner.quick else (2, 4):
        at = [load * workers / 2 for load in every]
        manners = seq2seq(workers)
        found = {
            name: curve(
                one, requests, at, seconds=2 * base.seconds(runner), seed=runner.seed, most=MOST, limit_ms=LIMIT_MS
            )
            for name, one in manners.items()
        }
        what = f"{workers} devices"
        curves |= {f"{name}, {workers}": points for name, points in found.items()}
        ours, same = peak(found[OURS]), peak(found[f"{OURS}, 256"])
        claims += base.against_padded(found[OURS], found[PADDED], what, (1.6, 0.175, 0.826))
        claims += [
            Claim(name=f"{what}: peak throughput (req/s)", goal=8.5e3 * workers / 2, value=ours),
            Claim(name=f"{what}: peak with encoder batches of 512 / 256", goal=1.035, value=ours / same,
                  why="a decoder's tasks come first and leave few encoders to gather for a batch of 512"),
        ]  # fmt: skip
    return base.findings(curves, claims, data, runner, [name for name in curves if name.startswith(OURS)])


def tree_requests(runner: Runner, fixed: bool = False) -> tuple[Requests, Any]:
    """Return TreeLSTM requests and their data; ``fixed`` is the complete tree of 16 leaves."""
    from vllm_ext.cellular.models import build
    from vllm_ext.experiments.batching import workloads
    from vllm_ext.experiments.batching.curves import Requests

    data = workloads.trees(300 if runner.quick else 3_000, runner.seed)
    if fixed:
        data = workloads.Data("complete trees of 16 leaves", [workloads.complete(16)])
    model = build("treelstm", hidden=1, vocabulary=1 << 14, classes=0)
    return Requests(model, [{"tree": tree} for tree in data.rows]), data.workload


def tree_manners(*, padding: bool = False) -> dict[str, Manner]:
    """Return the manners of figure 14; ``padding`` adds the ideal of figure 15."""
    from vllm_ext.cellular.graphs import CellTable
    from vllm_ext.cellular.scheduler import Scheduler
    from vllm_ext.experiments.batching.curves import LSTM, ROW_S, TASK_S, Manner
    from vllm_ext.experiments.batching.merging import MergedBatching, Merging
    from vllm_ext.experiments.batching.padding import PaddedBatching
    from vllm_ext.experiments.batching.virtual import Costs

    cells = {"leaf": LSTM.scaled(LEAF), "internal": LSTM.scaled(INTERNAL)}
    free = Costs(cells=cells)

    def merged(merging: Merging) -> Manner:
        return Manner(name=merging.name, make=lambda table: MergedBatching(table, merging=merging), costs=free)

    found = {
        OURS: Manner(name=OURS, make=Scheduler, costs=Costs(cells=cells, task_s=TASK_S, row_s=ROW_S)),
        DYNET: merged(Merging(name=DYNET, node_s=DYNET_NODE_S, overlapped=False)),
        FOLD: merged(Merging(name=FOLD, node_s=FOLD_NODE_S, overlapped=True)),
    }
    found[WIDE] = Manner(
        name=WIDE, make=lambda table: Scheduler(CellTable([cell.with_batches(512) for cell in table.cells])),
        costs=found[OURS].costs,
    )  # fmt: skip
    if padding:
        found["fold, merging for nothing"] = merged(Merging(name=FOLD, node_s=0.0, overlapped=True))
        found[IDEAL] = Manner(
            name=IDEAL, make=lambda table: PaddedBatching(table, max_batch=64, width=1), costs=free
        )  # fmt: skip
    return found


def _trees(runner: Runner, requests: Requests, at: Sequence[float], names: Sequence[str]) -> dict[str, list[Point]]:
    from vllm_ext.experiments.batching.curves import curve

    manners = tree_manners(padding=True)
    length = 0.1 if runner.quick else 0.3
    return {name: curve(manners[name], requests, at, seconds=length, seed=runner.seed) for name in names}


@PAPER.figure("batchmaker-fig14", "Figure 2.14", "TreeLSTM: cellular batching and graph merging", TREES)
def fig14(runner: Runner) -> Findings:
    """Serve parse trees."""
    from vllm_ext.experiments.batching.curves import peak

    requests, data = tree_requests(runner)
    at = (1e3, 3e3, 6e3, 9e3) if runner.quick else (500, 1e3, 2e3, 3e3, 4e3, 5e3, 6e3, 7e3, 8e3, 10e3, 12e3)
    free = "fold, merging for nothing"
    curves = _trees(runner, requests, at, (OURS, WIDE, DYNET, FOLD, free))
    low = {name: {p.load_per_s: p.p90_ms for p in points}[1e3] for name, points in curves.items()}
    peaks = {name: peak(points) for name, points in curves.items()}
    share = (peaks[OURS] / peaks[FOLD] - peaks[OURS] / peaks[free]) / (peaks[OURS] / peaks[FOLD] - 1)
    why = "DyNet computes batches of more than 64 cells here, at no cost per operator; ours is held to 64"
    claims = [
        Claim(name="peak throughput, batchmaker / dynet", goal=3.1 / 2.1, value=peaks[OURS] / peaks[DYNET],
              headline=True, why=why),
        Claim(name="peak throughput, batchmaker / fold", goal=4.0, value=peaks[OURS] / peaks[FOLD], headline=True,
              facts=f"with merging for nothing {peaks[OURS] / peaks[free]:.2f}: {share:.0%} of the gain is merging",
              why="merging here costs what it costs in this implementation, not what it cost TensorFlow Fold"),
        Claim(name="P90 latency at 1K req/s, batchmaker / dynet", goal=6.8 / 9.5, value=low[OURS] / low[DYNET],
              op="<=", why=why),
        Claim(name="P90 latency at 1K req/s (ms)", goal=6.8, value=low[OURS], op="<="),
    ]  # fmt: skip
    return base.findings(curves, claims, data, runner, (OURS, WIDE))


@PAPER.figure("batchmaker-fig15", "Figure 2.15", "TreeLSTM on complete trees of 16 leaves", (*TREES[:4], TREES[-1]))
def fig15(runner: Runner) -> Findings:
    """Serve equal trees; the ideal computes them node by node in batches of 64, without any cost of scheduling."""
    from vllm_ext.experiments.batching.curves import peak

    requests, data = tree_requests(runner, fixed=True)
    at = (1e3, 4e3, 8e3, 11e3) if runner.quick else (500, 1e3, 2e3, 4e3, 6e3, 8e3, 9e3, 10e3, 11e3, 12e3)
    curves = _trees(runner, requests, at, (OURS, WIDE, DYNET, FOLD, IDEAL))
    low = {name: points[0].p90_ms for name, points in curves.items()}
    claims = [
        Claim(name="peak throughput over the ideal", goal=0.7, value=peak(curves[OURS]) / peak(curves[IDEAL]),
              headline=True, why="65 us per task are a fourth of a task of internal nodes"),
        Claim(name="P90 latency at the lowest load, ideal / batchmaker", goal=1.0, value=low[IDEAL] / low[OURS],
              facts="stated as higher"),
    ]  # fmt: skip
    return base.findings(curves, claims, data, runner, (OURS, WIDE))
