"""Latency against load: manners of batching on equal requests, in virtual time on a cost model of a V100."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm_ext.cellular.graphs import CellTable
from vllm_ext.cellular.layout import CompiledGraph, compile_graph
from vllm_ext.cellular.models.base import Model
from vllm_ext.cellular.scheduler import Batching
from vllm_ext.experiments.batching.virtual import Arrival, Costs, Served, StepCost, serve
from vllm_ext.simulation.workloads.arrivals import poisson

LSTM = StepCost(flat_s=185e-6, knee=64, full_s=784e-6, full=512)
"""A step of an LSTM of hidden size 1024: 185 us up to batches of 64, 784 us at 512 (sections 2.7.2 and 2.7.3)."""
TASK_S = 65e-6
"""What a task costs beyond its cells: a step at batch 64 takes 250 us instead of 185 (section 2.7.3)."""
ROW_S = 20e-9
"""Gathering a row: 16 KiB of states are read and written at some 800 GB/s."""
MOST = 30_000
"""Requests of a load, at most."""
SUSTAINED_MS = 500.0
"""P90 latency beyond which a load is not sustained; that of the baselines shoots beyond it (section 2.7.2)."""


@dataclass(frozen=True, kw_only=True)
class Manner:
    """A manner of batching as it is compared."""

    name: str
    make: Callable[[CellTable], Batching]
    costs: Costs
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Point:
    """One load."""

    load_per_s: float
    served_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    limit_ms: float = SUSTAINED_MS

    @property
    def sustained(self) -> bool:
        """Whether latency is bounded."""
        return self.p90_ms <= self.limit_ms


class Requests:
    """Requests of a model, laid out once per shape.

    Args:
        model: Its cells.
        rows: The model's requests, in the order in which they are drawn; drawn again from the first after the last.
        hidden: Per row, executions of nodes that no scheduler knows.
        shape: Row -> what tells graphs apart.
    """

    def __init__(
        self, model: Model, rows: Sequence[Mapping[str, Any]], hidden: Sequence[Mapping[int, int]] | None = None,
        shape: Callable[[Mapping[str, Any]], Hashable] = repr,
    ) -> None:  # fmt: skip
        self.cells = CellTable(model.cells)
        kept: dict[Hashable, CompiledGraph] = {}
        self._graphs = []
        for row in rows:
            key = shape(row)
            if key not in kept:
                kept[key] = compile_graph(model.unfold(model.parse(row)), self.cells)
            self._graphs.append(kept[key])
        self._hidden = hidden or [{}] * len(rows)

    def arrivals(self, rate_per_s: float, count: int, seed: int, slo_s: Sequence[float] | None = None) -> list[Arrival]:
        """Return Poisson arrivals; equal seeds draw equal requests at every rate."""
        times = poisson(rate_per_s=rate_per_s, count=count, seed=seed)
        drawn = np.random.default_rng(seed + 1).integers(0, len(self._graphs), count)
        objectives = np.full(count, np.inf) if slo_s is None else np.resize(np.asarray(slo_s), count)
        return [
            Arrival(at_s=at, graph=self._graphs[row], lengths=self._hidden[row], slo_s=slo)
            for at, row, slo in zip(times.tolist(), drawn.tolist(), objectives.tolist(), strict=True)
        ]


def at(manner: Manner, requests: Requests, rate_per_s: float, *, seconds: float, seed: int, most: int = MOST) -> Served:
    """Serve a load for so many seconds, at least 2,000 and at most ``most`` requests."""
    count = int(min(max(rate_per_s * seconds, 2_000), most))
    arrivals = requests.arrivals(rate_per_s, count, seed)
    return serve(manner.make(requests.cells), arrivals, manner.costs, workers=manner.workers)


def curve(
    manner: Manner, requests: Requests, loads: Sequence[float], *, seconds: float, seed: int,
    most: int = MOST, limit_ms: float = SUSTAINED_MS,
) -> list[Point]:  # fmt: skip
    """Serve loads, increasing, up to the second that is not sustained."""
    points: list[Point] = []
    for load in loads:
        served = at(manner, requests, load, seconds=seconds, seed=seed, most=most)
        points.append(
            Point(load_per_s=load, served_per_s=served.throughput_per_s, limit_ms=limit_ms,
                  **{f"p{p}_ms": served.latency_ms(p) for p in (50, 90, 99)})
        )  # fmt: skip
        if sum(not point.sustained for point in points) == 2:
            break
    return points


def peak(points: Sequence[Point]) -> float:
    """Return the highest throughput at a sustained load, in requests per second; 0 if none is sustained."""
    return max((point.served_per_s for point in points if point.sustained), default=0.0)


def reductions(ours: Sequence[Point], theirs: Sequence[Point]) -> list[float]:
    """Return by which share P90 latency is lower, at each load below half of their peak, and at the lowest.

    Ours is interpolated between its loads, where these are others.
    """
    loads, p90 = [point.load_per_s for point in ours], [np.log(point.p90_ms) for point in ours]
    half = max(peak(theirs) / 2, theirs[0].load_per_s)
    return [
        1 - float(np.exp(np.interp(p.load_per_s, loads, p90))) / p.p90_ms
        for p in theirs if p.load_per_s <= half and p.load_per_s <= loads[-1]
    ]  # fmt: skip


def metrics_of(name: str, points: Sequence[Point]) -> dict[str, float]:
    """Return a curve as flat metrics."""
    found = {f"{name}peak_per_s": peak(points)}
    for point in points:
        where = f"{name}load_{point.load_per_s:.0f}."
        found |= {f"{where}served_per_s": point.served_per_s, f"{where}p50_ms": point.p50_ms,
                  f"{where}p90_ms": point.p90_ms, f"{where}p99_ms": point.p99_ms}  # fmt: skip
    return found


def rows_of(curves: Mapping[str, Sequence[Point]]) -> list[list[object]]:
    """Return a table's rows: name, load, throughput, latencies."""
    return [
        [name, p.load_per_s, p.served_per_s, p.p50_ms, p.p90_ms, p.p99_ms]
        for name, points in curves.items()
        for p in points
    ]


HEADER = ("batching", "offered req/s", "served req/s", "P50 (ms)", "P90 (ms)", "P99 (ms)")
