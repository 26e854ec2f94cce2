"""BatchMaker, figures 3 and 5: one cell, measured on this machine, and eight requests in unit time."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_ext.experiments.experiment import Findings, line_plot
from vllm_ext.experiments.papers import batchmaker as base
from vllm_ext.experiments.runner import Runner
from vllm_ext.report.claim import PaperClaim, Reason, Verdict
from vllm_ext.report.table import Table


@base.PAPER.figure(
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
    cpu: Mapping[Verdict, Reason] = {"not comparable": Reason("stated of a V100, measured on a CPU", "column `ms`")}
    claims = [
        base.tendency("rows/s at batch 512 / at batch 1, on a CPU", rate[512] / rate[1], "important for the CPU too",
                      headline=True),
        PaperClaim(name="rows/s at batch 64 / at batch 1", goal=64.0, value=rate[64] / rate[1], reasons=cpu),
        PaperClaim(name="rows/s at batch 512 / at batch 64", goal=(512 / 784) / (64 / 185),
                   value=rate[512] / rate[64], reasons=cpu),
    ]  # fmt: skip
    return Findings(
        tables=[Table(("batch", "ms", "rows/s"), [[str(b), ms[b], rate[b]] for b in batches])], claims=claims,
        metrics={f"batch_{b}.ms": ms[b] for b in batches} | {"knee_rows": float(found.knee)},
        plots=[line_plot("", {"this CPU": [(rate[b], ms[b]) for b in batches]}, xlabel="rows/s", ylabel="ms per step",
                         log_x=True, log_y=True)],
        workload=[Data("batches of random states", batches).workload],
    )  # fmt: skip


LENGTHS = (2, 3, 3, 5, 5, 7, 3, 1)
"""Steps of the figure's requests."""


@base.PAPER.figure(
    "batchmaker-fig5", "Figure 2.5", "Eight requests in batches of four: cellular and graph batching",
    ("A step takes one unit of time. The text has the lengths of the first four requests and of the longest; the "
     "others are ours. The last four arrive at 0.5.",),
)  # fmt: skip
def fig5(_: Runner) -> Findings:
    """Serve the eight requests by which the paper explains its batching."""
    from vllm_ext.cellular.graphs import CellTable
    from vllm_ext.cellular.layout import compile_graph
    from vllm_ext.cellular.models import build
    from vllm_ext.cellular.scheduler import Scheduler
    from vllm_ext.experiments.batching.merging import MergedBatching, Merging
    from vllm_ext.experiments.batching.virtual import Arrival, Costs, serve
    from vllm_ext.experiments.batching.workloads import Data

    model = build("lstm", hidden=1, vocabulary=1, classes=0)
    table = CellTable([cell.with_batches(4) for cell in model.cells])
    graphs = [compile_graph(model.unfold(model.parse({"tokens": [0] * length})), table) for length in LENGTHS]
    arrivals = [Arrival(at_s=0.5 * (n >= 4), graph=graph, lengths={}) for n, graph in enumerate(graphs)]
    costs = Costs(cells={"step": lambda _: 1.0})
    ours = serve(Scheduler(table, max_tasks_to_submit=1), arrivals, costs)
    merging = Merging(name="graph batching", node_s=0.0, overlapped=False)
    theirs = serve(MergedBatching(table, merging=merging, max_requests=4), arrivals, costs)
    times = [ours.started_s, ours.ended_s, theirs.started_s, theirs.ended_s]
    columns = ("cellular, from", "to", "graph batching, from", "to")
    stated = {
        "graph batching: end of the first batch": (5, theirs.ended_s[3]),
        "graph batching: end of the second batch": (12, theirs.ended_s[7]),
        "cellular batching: request 5 joins when request 1 leaves": (2, ours.started_s[4]),
        "cellular batching: requests 6 and 7 join when 2 and 3 leave": (3, ours.started_s[6]),
    }
    claims = [PaperClaim(name=what, goal=paper, value=float(at), op="<=") for what, (paper, at) in stated.items()]
    last = {name: float(one.ended_s.max()) for name, one in ((base.OURS, ours), (merging.name, theirs))}
    claims.append(base.tendency("end of the last request, graph batching / cellular",
                                last[merging.name] / last[base.OURS], "higher throughput", headline=True))  # fmt: skip
    return Findings(
        tables=[Table(("request", "steps", *columns), [*zip(range(1, 9), LENGTHS, *times, strict=True)])],
        claims=claims, metrics={"last_end": last.pop(base.OURS)},
        baselines={name: {"last_end": at} for name, at in last.items()},
        workload=[Data("the requests of figure 2.5", LENGTHS).workload],
    )  # fmt: skip
