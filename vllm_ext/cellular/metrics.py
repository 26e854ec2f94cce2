"""Prometheus metrics ``vllm_ext:cell_*`` of an engine: histograms, and running totals that are read when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.requests import Request

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
_PREFIX = "vllm_ext:cell_"


class EngineMetrics(Collector):
    """Registers an engine's metrics."""

    def __init__(self, engine: CellularEngine, registry: CollectorRegistry) -> None:
        self._engine = engine
        self._queue = Histogram(f"{_PREFIX}queue_seconds", "Arrival to the end of the first task.", buckets=_SECONDS,
                                registry=registry)  # fmt: skip
        self._latency = Histogram(f"{_PREFIX}latency_seconds", "Arrival to result.", buckets=_SECONDS,
                                  registry=registry)  # fmt: skip
        self._attained = Counter(f"{_PREFIX}objectives", "Requests with an objective that ended.",
                                 ["met"], registry=registry)  # fmt: skip
        engine.on_finished = self.finished
        registry.register(self)

    def finished(self, request: Request) -> None:
        """Take note of a request that has ended."""
        if request.started_s is not None and request.ended_s is not None:
            self._queue.observe(request.started_s - request.arrived_s)
            self._latency.observe(request.ended_s - request.arrived_s)
        if request.met is not None:
            self._attained.labels("yes" if request.met else "no").inc()

    def collect(self) -> Iterator[Any]:
        """Yield what the engine counts."""
        engine = self._engine
        yield GaugeMetricFamily(f"{_PREFIX}requests", "Requests accepted and not ended.", value=engine.open_requests)
        yield GaugeMetricFamily(f"{_PREFIX}storage_share", "Rows in use of all that a kind of values "
                                "may have beside what others use, of the fullest kind.",
                                value=engine.arena.share_taken)  # fmt: skip
        yield CounterMetricFamily(f"{_PREFIX}request_errors", "Requests that failed.", value=engine.errors)
        yield CounterMetricFamily(f"{_PREFIX}scheduling_seconds", "CPU time of scheduling and of handing out results.",
                                  value=engine.scheduling_s)  # fmt: skip
        workers = GaugeMetricFamily(f"{_PREFIX}workers", "Workers by state.", labels=["state"])
        workers.add_metric(["alive"], engine.options.workers - engine.dead_workers)
        workers.add_metric(["dead"], engine.dead_workers)
        yield workers
        yield CounterMetricFamily(f"{_PREFIX}worker_restarts", "Workers that died and began anew.",
                                  value=engine.restarts)  # fmt: skip
        traffic = CounterMetricFamily(f"{_PREFIX}copied_bytes", "Bytes copied between tasks.", labels=["way"])
        for way in ("gathered", "reused", "scattered"):
            traffic.add_metric([way], getattr(engine.arena.traffic, way))
        yield traffic
        computing = [sum(times) for times in zip(*(one.times.computing for one in engine.executors), strict=True)]
        copying = sum(one.times.copying for one in engine.executors)
        yield GaugeMetricFamily(f"{_PREFIX}gather_share", "Share of gathering and scattering in the CPU time of tasks.",
                                value=copying / max(sum(computing), 1e-9))  # fmt: skip
        yield CounterMetricFamily(f"{_PREFIX}uncaptured_batches", "Batches computed without a CUDA graph, as none was "
                                  "captured at start.", value=engine.executors[0].uncaptured)  # fmt: skip
        yield from self._of_cells(computing)

    def _of_cells(self, computing: list[float]) -> Iterator[Any]:
        engine = self._engine
        ready = GaugeMetricFamily(f"{_PREFIX}ready_nodes", "Nodes that wait for a task.", labels=["cell"])
        occupancy = GaugeMetricFamily(f"{_PREFIX}occupancy", "Mean batch over the largest.", labels=["cell"])
        seconds = CounterMetricFamily(f"{_PREFIX}task_cpu_seconds", "CPU time of workers' threads in tasks; "
                                      "on a CUDA device without the device's own time.", labels=["cell"])  # fmt: skip
        batches = HistogramMetricFamily(f"{_PREFIX}batch_nodes", "Nodes of a task.", labels=["cell"])
        waiting = getattr(engine.batching, "ready", lambda _: 0)
        for number, (cell, counts) in enumerate(zip(engine.cells.cells, engine.batching.counts, strict=True)):
            ready.add_metric([cell.name], waiting(number))
            occupancy.add_metric([cell.name], counts.nodes / max(counts.tasks, 1) / cell.max_batch)
            seconds.add_metric([cell.name], computing[number])
            total, buckets = 0, []
            for size, tasks in sorted(dict(counts.batches).items()):
                total += tasks
                buckets.append((str(float(size)), total))
            batches.add_metric([cell.name], [*buckets, ("+Inf", total)], counts.nodes)
        yield from (ready, occupancy, seconds, batches)
