"""BatchMaker, figures 13, 14 and 15: sequence to sequence on several devices, and TreeLSTMs against graph merging."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm_ext.experiments.experiment import Findings
from vllm_ext.experiments.papers import batchmaker as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim, Reason, Verdict

if TYPE_CHECKING:
    from vllm_ext.cellular.graphs import CellTable
    from vllm_ext.cellular.scheduler import Scheduler
    from vllm_ext.experiments.batching.curves import Manner, Point, Requests

PAPER, OURS, PADDED = base.PAPER, base.OURS, base.PADDED
DYNET, FOLD, IDEAL = "dynet", "fold", "ideal"
FREE, LAUNCHED = f"{FOLD}, merging for nothing", f"{DYNET}, 65 us a task"
WIDE = f"{OURS}, 512"
"""Ours: batches are not held to 64."""
DYNET_NODE_S, FOLD_NODE_S = 3.9e-6, 22e-6
"""CPU seconds of building and merging a node of a cell graph, by `benchmarks/cellular/cellular.py`: by operators, with
arrays (`merge_operators`), and by cells, in an interpreter (``unfold``, layout, `merge_cells`)."""
TURNS = f"{OURS}, in turns"
"""Ours: whichever cell was served longest ago goes first."""
FITTED_NODE_S = 5.2e-6
"""Cost of a node to cellular batching's own manager that gives the paper's peak of 3.1K req/s on trees."""
FITTED = f"{OURS}, {FITTED_NODE_S * 1e6:.2g} us a node"
NODES: Mapping[Verdict, Reason] = {
    "above": Reason("a node costs our manager nothing beyond its task", f"row `{FITTED}`")
}
LIMIT_MS = 1500.0
"""P90 latency up to which a load of figure 13 is sustained: padded batching passes 500 ms early."""
MOST_PER_WORKER = 10_000
"""Requests of a load of figure 13, at most."""
DECODER = 3.0
"""A decoder's step over an encoder's: decoding is 75 % of the work (section 2.7.4)."""
INTERNAL, LEAF = 5 / 4, 3 / 8
"""Work of a TreeLSTM's cells over that of an LSTM's: products of 2h x 5h and h x 3h instead of 2h x 4h."""
VOCABULARY = 1 << 17
"""Words of all trees, at most: SST has 21,000."""
TREES = (
    base.SYSTEM,
    base.DEVICE,
    f"The cells cost {INTERNAL:g} (internal) and {LEAF:g} (leaf) of an LSTM's step, by the size of their products.",
    f"Building and merging a node costs {DYNET_NODE_S * 1e6:g} us in DyNet's manner, {FOLD_NODE_S * 1e6:g} in Fold's, "
    "as measured here (see benchmarks/cellular/cellular.py): the paper has no figure for it. To launch DyNet's "
    f"operators costs nothing here; `{LAUNCHED}` has what a task of cellular batching costs. To cellular batching "
    f"itself a node costs nothing more than its row; `{FITTED}` has the paper's peak.",
    "Trees are made up with the shape of Stanford TreeBank's: 19 leaves, depth 11 on average. `--data DIR` serves "
    "those of a file of SST too.",
    base.SUSTAINED,
)


def translations(runner: Runner) -> tuple[Requests, Any]:
    """Return Seq2Seq requests, which decode as many words as the translation has, and their data."""
    from vllm_ext.cellular.models import build
    from vllm_ext.experiments.batching import workloads
    from vllm_ext.experiments.batching.curves import Requests

    data = base.pairs(runner, base.LONGEST)
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
    fitted = Costs(cells=cells, task_s=base.FITTED_TASK_S, row_s=base.FITTED_ROW_S)

    def limited(encoder: int, *, in_turns: bool = False) -> Any:
        def make(table: CellTable) -> Scheduler:
            sizes = {"encoder": encoder, "decoder": 256}
            cells = CellTable([cell.with_batches(sizes[cell.name]) for cell in table.cells])
            return Scheduler(cells, alternates=lambda: in_turns)

        return make

    found = {
        OURS: Manner(name=OURS, make=limited(512), costs=ours, workers=workers),
        f"{OURS}, 256": Manner(name=OURS, make=limited(256), costs=ours, workers=workers),
        base.FITTED: Manner(name=base.FITTED, make=limited(512), costs=fitted, workers=workers),
        PADDED: Manner(name=PADDED, make=lambda table: PaddedBatching(table, max_batch=256), costs=Costs(cells=cells),
                       workers=workers),
    }  # fmt: skip
    if workers > 2:
        for name, encoder in {TURNS: 512, f"{TURNS}, 256": 256}.items():
            found[name] = Manner(name=name, make=limited(encoder, in_turns=True), costs=ours, workers=workers)
    return found


@PAPER.figure(
    "batchmaker-fig13", "Figure 2.13", "Seq2Seq on two and four devices",
    (base.SYSTEM, base.DEVICE, base.PADDING, base.DATA,
     f"A load is sustained while its P90 latency is at most {LIMIT_MS:.0f} ms: padding passes 500 ms early.",
     f"A decoder's step costs {DECODER:g} times an encoder's at the same batch.",
     "Devices share what they compute on: moving a request to another device costs nothing."),
    repeats=5,
)  # fmt: skip
def fig13(runner: Runner) -> Findings:
    """Serve translations."""
    from vllm_ext.experiments.batching.curves import curve, peak

    requests, data = translations(runner)
    steps = (0.125, 0.25, 0.5, 2, 4, 6) if runner.quick else (0.125, 0.25, 0.5, 1, 2, 3, 4, 5)
    more: dict[str, Any] = {"seconds": 2 * base.seconds(runner), "seed": runner.seed, "limit_ms": LIMIT_MS}
    curves: dict[str, list[Point]] = {}
    claims: list[PaperClaim] = []
    for workers in (2,) if runner.quick else (2, 4):
        at = [step * 1e3 * workers for step in steps]
        found = {
            name: curve(one, requests, at, most=MOST_PER_WORKER * workers, **more)
            for name, one in seq2seq(workers).items()
        }
        what, turns = f"{workers} devices", f"row `{TURNS}, {workers}`"
        reasons: Mapping[Verdict, Reason] = base.above(f"{base.FITTED}, {workers}")
        larger: Mapping[Verdict, Reason] = {}
        if workers > 2:
            below = Reason("Algorithm 1's order keeps batches small; taking turns carries more", turns)
            reasons = {**reasons, "below": below}
            larger = {"above": Reason("by Algorithm 1's order; nothing where cells take turns", turns)}
        curves |= {f"{name}, {workers}": points for name, points in found.items()}
        ours, same = peak(found[OURS]), peak(found[f"{OURS}, 256"])
        ratio, saved = base.against_padded(found[OURS], found[PADDED], what, 1.6, (0.175, 0.826), reasons)
        claims += [
            ratio,
            replace(saved, headline=workers == 2),
            PaperClaim(name=f"{what}: peak throughput (req/s)", goal=8.5e3 * workers / 2, value=ours, reasons=reasons),
            PaperClaim(name=f"{what}: peak with encoder batches of 512 / 256", goal=1.035, most=1.06,
                       value=ours / same, reasons=larger),
        ]  # fmt: skip
    return base.findings(curves, claims, data, runner, [name for name in curves if name.startswith(OURS)])


def tree_requests(runner: Runner, fixed: bool = False) -> tuple[Requests, Any]:
    """Return TreeLSTM requests and their data: trees of SST, where its file is, or made up.

    ``fixed`` is the complete tree of 16 leaves.
    """
    from vllm_ext.cellular.models import build
    from vllm_ext.experiments.batching import workloads
    from vllm_ext.experiments.batching.curves import Requests

    if fixed:
        data = workloads.Data("complete trees of 16 leaves", [workloads.complete(16)])
    elif file := runner.files.of("sst"):
        data = workloads.read_trees(file)
    else:
        data = workloads.trees(300 if runner.quick else 3_000, runner.seed)
    model = build("treelstm", hidden=1, vocabulary=VOCABULARY, classes=0)
    return Requests(model, [{"tree": tree} for tree in data.rows]), data.workload


def tree_manners(*, every: bool = False) -> dict[str, Manner]:
    """Return the manners of figure 14; ``every`` adds the ideal of figure 15, and those that show why."""
    from vllm_ext.cellular.graphs import CellTable
    from vllm_ext.cellular.scheduler import Scheduler
    from vllm_ext.experiments.batching.curves import LSTM, ROW_S, TASK_S, Manner
    from vllm_ext.experiments.batching.merging import MergedBatching, Merging
    from vllm_ext.experiments.batching.padding import PaddedBatching
    from vllm_ext.experiments.batching.virtual import Costs

    cells = {"leaf": LSTM.scaled(LEAF), "internal": LSTM.scaled(INTERNAL)}

    def merged(merging: Merging, task_s: float = 0.0) -> Manner:
        costs = Costs(cells=cells, task_s=task_s)
        return Manner(name=merging.name, make=lambda table: MergedBatching(table, merging=merging), costs=costs)

    dynet = Merging(name=DYNET, node_s=DYNET_NODE_S, overlapped=False)
    fold = Merging(name=FOLD, node_s=FOLD_NODE_S, overlapped=True)
    ours = Costs(cells=cells, task_s=TASK_S, row_s=ROW_S)
    found = {OURS: Manner(name=OURS, make=Scheduler, costs=ours), DYNET: merged(dynet), FOLD: merged(fold)}
    found[WIDE] = Manner(
        name=WIDE, make=lambda table: Scheduler(CellTable([cell.with_batches(512) for cell in table.cells])), costs=ours
    )
    if every:
        slow = Costs(cells=cells, task_s=TASK_S, row_s=FITTED_NODE_S)
        found |= {
            FITTED: Manner(name=FITTED, make=Scheduler, costs=slow),
            LAUNCHED: merged(dynet, TASK_S),
            FREE: merged(replace(fold, node_s=0.0)),
            IDEAL: Manner(name=IDEAL, make=lambda table: PaddedBatching(table, max_batch=64, width=1),
                          costs=Costs(cells=cells)),
        }  # fmt: skip
    return found


def _trees(runner: Runner, requests: Requests, at: Sequence[float], names: Sequence[str]) -> dict[str, list[Point]]:
    from vllm_ext.experiments.batching.curves import curve

    manners = tree_manners(every=True)
    length = 0.1 if runner.quick else 0.3
    return {name: curve(manners[name], requests, at, seconds=length, seed=runner.seed) for name in names}


@PAPER.figure("batchmaker-fig14", "Figure 2.14", "TreeLSTM: cellular batching and graph merging", TREES, repeats=5)
def fig14(runner: Runner) -> Findings:
    """Serve parse trees."""
    from vllm_ext.experiments.batching.curves import peak

    requests, data = tree_requests(runner)
    at = (1e3, 3e3, 6e3, 9e3) if runner.quick else (500, 1e3, 1.25e3, 2e3, 3e3, 4e3, 6e3, 7e3, 8e3, 10e3, 12e3, 16e3)
    curves = _trees(runner, requests, at, (OURS, WIDE, FITTED, DYNET, LAUNCHED, FOLD, FREE))
    low = {name: {p.load_per_s: p.p90_ms for p in points}[1e3] for name, points in curves.items()}
    peaks = {name: peak(points) for name, points in curves.items()}
    over = {(one, other): peaks[one] / peaks[other] for one in (OURS, WIDE, FITTED) for other in peaks}
    claims = [
        PaperClaim(name=f"peak throughput, {OURS} / {DYNET}", goal=3.1 / 2.1, most=1.8, value=over[OURS, DYNET],
                   ours=over[WIDE, DYNET], headline=True, reasons=NODES,
                   facts=f"1.48 by figure 2.14, 1.8 by the summary; {over[OURS, LAUNCHED]:.2f} over {LAUNCHED}"),
        PaperClaim(name=f"peak throughput, {OURS} / {FOLD}", goal=4.0, value=over[OURS, FOLD], ours=over[WIDE, FOLD],
                   headline=True, reasons=NODES,
                   facts=f"{over[FITTED, FOLD]:.2f} for {FITTED}; {over[OURS, FREE]:.2f} over {FREE}"),
        PaperClaim(name="peak throughput (req/s)", goal=3.1e3, value=peaks[OURS], ours=peaks[WIDE], reasons=NODES),
        PaperClaim(name=f"P90 latency saved at 1K req/s, against {DYNET}", goal=1 - 6.8 / 9.5,
                   value=1 - low[OURS] / low[DYNET], ours=1 - low[WIDE] / low[DYNET],
                   reasons={"below": Reason("launching DyNet's operators costs nothing here", f"row `{LAUNCHED}`")}),
        PaperClaim(name=f"P90 latency saved at 1K req/s, against {FOLD}", goal=0.87, value=1 - low[OURS] / low[FOLD],
                   ours=1 - low[WIDE] / low[FOLD], headline=True,
                   facts="the paper's load is moderate; 1K req/s is that of its comparison with DyNet"),
        PaperClaim(name="P90 latency at 1K req/s (ms)", goal=6.8, value=low[OURS], ours=low[WIDE], op="<="),
    ]  # fmt: skip
    return base.findings(curves, claims, data, runner, (OURS, WIDE, FITTED))


@PAPER.figure(
    "batchmaker-fig15", "Figure 2.15", "TreeLSTM on complete trees of 16 leaves", (*TREES[:4], TREES[-1]), repeats=5
)
def fig15(runner: Runner) -> Findings:
    """Serve equal trees; the ideal computes them node by node in batches of 64, without any cost of scheduling."""
    from vllm_ext.experiments.batching.curves import peak

    requests, data = tree_requests(runner, fixed=True)
    every = (500, 1e3, 2e3, 4e3, 6e3, 8e3, 9e3, 10e3, 11e3, 12e3, 14e3, 16e3)
    at = (1e3, 4e3, 8e3, 11e3, 15e3) if runner.quick else every
    curves = _trees(runner, requests, at, (OURS, WIDE, FITTED, DYNET, FOLD, IDEAL))
    low = {name: points[0].p90_ms for name, points in curves.items()}
    peaks = {name: peak(points) for name, points in curves.items()}
    claims = [
        PaperClaim(name="peak throughput over the ideal", goal=0.7, value=peaks[OURS] / peaks[IDEAL],
                   ours=peaks[WIDE] / peaks[IDEAL], headline=True, reasons=NODES),
        base.tendency(f"P90 latency at the lowest load, ideal / {OURS}", low[IDEAL] / low[OURS], "higher",
                      headline=True),
        base.tendency(f"P90 latency at the lowest load, ideal / {DYNET}", low[IDEAL] / low[DYNET], "higher"),
    ]  # fmt: skip
    return base.findings(curves, claims, data, runner, (OURS, WIDE, FITTED))
