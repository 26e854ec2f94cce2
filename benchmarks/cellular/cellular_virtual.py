"""Parts of `cellular.py` that need no tensors: cost of the scheduler, order by slack, costs of merging, public data."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vllm_ext.cellular.graphs import CellTable
from vllm_ext.cellular.layout import compile_graph
from vllm_ext.cellular.models import build
from vllm_ext.cellular.order import Order, SlackOrder
from vllm_ext.cellular.scheduler import Scheduler
from vllm_ext.experiments.batching import workloads
from vllm_ext.experiments.batching.curves import LSTM, ROW_S, TASK_S, Manner, Requests, curve, peak, reductions
from vllm_ext.experiments.batching.merging import merge_cells, merge_operators
from vllm_ext.experiments.batching.virtual import Costs, serve
from vllm_ext.experiments.papers import batchmaker, batchmaker_trees

STEPS = 24
TASKS = 200
CAPACITY_SHARE = 1.2
TIGHT, LOOSE = 3.0, 20.0
"""Objectives over the time of a request alone: half of the requests each, in turns."""


def scheduling_us(queued: int, batch: int = 512) -> float:
    """CPU microseconds that forming and completing a task of 512 LSTM steps costs, median over series of five."""
    model = build("lstm", hidden=1, vocabulary=1, classes=0)
    table = CellTable([cell.with_batches(batch) for cell in model.cells])
    graph = compile_graph(model.unfold(model.parse({"tokens": [0] * STEPS})), table)
    scheduler = Scheduler(table)
    scheduler.add([graph] * queued, None, [1e9] * queued)
    times = []
    while len(times) < TASKS // 5:
        begin = time.thread_time()
        tasks = scheduler.schedule(0, 0.0)
        ended = [request for task in tasks for request in scheduler.complete(task)]
        times.append((time.thread_time() - begin) / len(tasks))
        if ended:
            scheduler.add([graph] * len(ended), None, [1e9] * len(ended))
    return statistics.median(times) * 1e6


def attainment(seed: int, count: int) -> dict[str, float]:
    """Share of objectives met at 1.2 times capacity, in order of arrival and of slack, in virtual time."""
    data = workloads.pairs(5_000, seed)
    model = build("lstm", hidden=1, vocabulary=1, classes=0)
    requests = Requests(model, [{"tokens": [0] * n} for n, _ in data.rows], shape=lambda row: len(row["tokens"]))
    costs = Costs(cells={"step": LSTM}, task_s=TASK_S, row_s=ROW_S)
    step_s = costs.of("step", 512)
    mean_steps = float(np.mean([n for n, _ in data.rows]))
    rate = CAPACITY_SHARE * 512 / (step_s * mean_steps)
    arrivals = requests.arrivals(rate, count, seed)
    objectives = [
        float(one.graph.times[0]) * step_s * (TIGHT if place % 2 else LOOSE) for place, one in enumerate(arrivals)
    ]
    timed = requests.arrivals(rate, count, seed, objectives)
    found = {}
    orders: dict[str, Order | None] = {"arrival": None, "slack": SlackOrder()}
    for name, order in orders.items():
        scheduler = Scheduler(requests.cells, order=order, step_s={"step": step_s})
        served = serve(scheduler, timed, costs)
        found[name] = float(served.met[served.window()].mean())
    return found


def merging_us(trees: Sequence[Any], repeats: int) -> dict[str, float]:
    """CPU microseconds per node of a cell graph, of batches of 64 trees."""
    model = build("treelstm", hidden=1, vocabulary=1 << 15, classes=0)
    table = CellTable(model.cells)
    rows = [{"tree": tree} for tree in trees[:64]]
    begin = time.thread_time()
    graphs = [compile_graph(model.unfold(model.parse(row)), table) for row in rows]
    built_s = time.thread_time() - begin
    nodes = sum(len(graph.cell) for graph in graphs)
    found = {}
    for name, merge, before_s in (("fold", merge_cells, built_s), ("dynet", merge_operators, 0.0)):
        times = []
        for _ in range(repeats):
            begin = time.thread_time()
            merge(graphs)
            times.append(time.thread_time() - begin)
        found[f"{name}_merging_us_per_node"] = (statistics.median(times) + before_s) / nodes * 1e6
    return found


def public_lstm(pairs: Path, seconds: float, seed: int) -> dict[str, float]:
    """The paper's headlines on lengths of WMT sentences, in virtual time."""
    data = workloads.read_pairs(pairs)
    model = build("lstm", hidden=1, vocabulary=1, classes=0)
    requests = Requests(model, [{"tokens": [0] * n} for n, _ in data.rows], shape=lambda row: len(row["tokens"]))
    ours, theirs = (
        curve(one, requests, batchmaker.LOADS, seconds=seconds, seed=seed)
        for one in (batchmaker.cellular(), batchmaker.padded())
    )
    lower = reductions(ours, theirs)
    return {
        "wmt_peak_over_padded": peak(ours) / peak(theirs),
        "wmt_p90_saved_least": min(lower),
        "wmt_p90_saved_most": max(lower),
    }


def public_trees(trees: Path, seconds: float, seed: int) -> dict[str, float]:
    """Peaks over graph merging on trees of SST, in virtual time."""
    data = workloads.read_trees(trees)
    model = build("treelstm", hidden=1, vocabulary=1 << 15, classes=0)
    requests = Requests(model, [{"tree": tree} for tree in data.rows])
    manners: dict[str, Manner] = batchmaker_trees.tree_manners()
    peaks = {
        name: peak(curve(one, requests, (1e3, 2e3, 3e3, 4e3, 6e3, 8e3, 10e3), seconds=seconds, seed=seed))
        for name, one in manners.items()
    }
    ours = peaks.pop(batchmaker_trees.OURS)
    return {f"sst_peak_over_{name.replace(', ', '_')}": ours / other for name, other in peaks.items()}
