"""Batching in virtual time: the scheduler that serves, on workers that are a cost model.

Events are ordered by (time, priority, sequence): at equal times a task ends before a request arrives, so that what
becomes ready can be batched with it, and workers are given tasks last. Equal seeds give equal numbers.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cellular.graphs import Ints
from vllm_ext.cellular.layout import CompiledGraph
from vllm_ext.cellular.scheduler import Batching, Task

_TASK_ENDS, _ARRIVES = 0, 1
Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Seconds of a batched cell: flat up to a batch, then linear through a second point."""

    flat_s: float
    knee: int
    """Largest batch that costs no more than a batch of one."""
    full_s: float
    full: int
    """A larger batch, and its time."""

    def __post_init__(self) -> None:
        if not (0 < self.flat_s <= self.full_s and 1 <= self.knee < self.full):
            raise ValueError(f"flat_s={self.flat_s!r}, full_s={self.full_s!r}, knee={self.knee!r}, full={self.full!r}: "
                             "must be 0 < flat_s <= full_s and 1 <= knee < full")  # fmt: skip

    def __call__(self, rows: int) -> float:
        """Return the time of a batch."""
        slope = (self.full_s - self.flat_s) / (self.full - self.knee)
        return self.flat_s + slope * max(0, rows - self.knee)

    def scaled(self, factor: float) -> StepCost:
        """Return a cell that does ``factor`` times the work per row."""
        return StepCost(flat_s=self.flat_s * factor, knee=self.knee, full_s=self.full_s * factor, full=self.full)


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What tasks cost."""

    cells: Mapping[str, Callable[[int], float]]
    """Seconds of a batch, by the name of its cell."""
    task_s: float = 0.0
    """Added to every task: scheduling and kernel launches that nothing hides."""
    row_s: float = 0.0
    """Added per row: gathering it."""

    def of(self, name: str, rows: int) -> float:
        """Return the time of a task."""
        return self.cells[name](rows) + self.task_s + self.row_s * rows


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request in virtual time."""

    at_s: float
    graph: CompiledGraph
    lengths: Mapping[int, int]
    """Node -> executions after which its chain ends; known to nobody who decides."""
    slo_s: float = math.inf
    """Latency objective."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Served:
    """What became of requests, in the order of arrival."""

    arrived_s: Floats
    started_s: Floats
    ended_s: Floats
    met: NDArray[np.bool_]
    """Whether the objective was met."""
    busy_s: float
    """Seconds that workers computed."""
    rows: int
    """Rows computed, padding included."""
    useful_rows: int
    tasks: int

    @property
    def latency_s(self) -> Floats:
        """From arrival to result."""
        return self.ended_s - self.arrived_s

    def window(self, skip: float = 0.1) -> slice:
        """Return the requests without the first and last tenth, while the system fills and drains."""
        edge = int(len(self.arrived_s) * skip)
        return slice(edge, len(self.arrived_s) - edge or None)

    def latency_ms(self, percent: float) -> float:
        """Return a percentile of latency, in milliseconds."""
        return float(np.percentile(self.latency_s[self.window()], percent)) * 1e3

    @property
    def throughput_per_s(self) -> float:
        """Results per second, from a fifth of the time in which requests arrive to nine tenths of it."""
        first, span = self.arrived_s[0], self.arrived_s[-1] - self.arrived_s[0]
        ended = (self.ended_s >= first + 0.2 * span) & (self.ended_s < first + 0.9 * span)
        return float(ended.sum() / (0.7 * span))


class _Hidden:
    """True lengths, and how often each node has been executed."""

    def __init__(self) -> None:
        self.true, self.executed = np.zeros(0, np.int64), np.zeros(0, np.int64)

    def enter(self, request: int, arrival: Arrival) -> None:
        """Set the lengths of a request's nodes."""
        count = len(arrival.graph.cell)
        if request + count > len(self.true):
            more = np.zeros(max(len(self.true), request + count), np.int64)
            self.true, self.executed = (np.concatenate((one, more)) for one in (self.true, self.executed))
        self.true[request : request + count] = arrival.graph.times
        for node, length in arrival.lengths.items():
            self.true[request + node] = min(length, int(arrival.graph.times[node]))
        self.executed[request : request + count] = 0

    def execute(self, nodes: Ints) -> tuple[int, NDArray[np.bool_]]:
        """Execute who has not ended; return how many they were and, per node, whether it has ended now."""
        running = nodes[self.executed[nodes] < self.true[nodes]]
        self.executed[running] += 1
        return len(running), self.executed[nodes] >= self.true[nodes]


def serve(batching: Batching, arrivals: Sequence[Arrival], costs: Costs, *, workers: int = 1) -> Served:
    """Serve requests in virtual time until all have ended.

    Args:
        batching: Empty; it is used up.
        arrivals: By increasing time.
        costs: Of tasks.
        workers: How many.

    Raises:
        RuntimeError: requests are left that nothing is scheduled for.
    """
    return _Clock(batching, arrivals, costs, workers).run()


class _Clock:
    def __init__(self, batching: Batching, arrivals: Sequence[Arrival], costs: Costs, workers: int) -> None:
        self._batching, self._arrivals, self._costs = batching, arrivals, costs
        self._names = [cell.name for cell in batching.table.cells.cells]
        self._hidden = _Hidden()
        self._idle = set(range(workers))
        self._events: list[tuple[float, int, int, Task | None, NDArray[np.bool_] | None]] = []
        self._sequence = 0
        self._place: dict[int, int] = {}
        self._inbox: list[int] = []
        self._last: dict[int, Task] = {}
        self._started, self._ended = (np.full(len(arrivals), np.nan) for _ in range(2))
        self._busy_s = 0.0
        self._rows = self._useful = self._tasks = 0

    def run(self) -> Served:
        for place, arrival in enumerate(self._arrivals):
            heapq.heappush(self._events, (arrival.at_s, _ARRIVES, place, None, None))
        while self._events:
            now, kind, number, task, ended = heapq.heappop(self._events)
            if kind == _ARRIVES:
                self._inbox.append(number)
            elif task is not None:
                self._complete(now, task, ended)
            if self._events and self._events[0][0] == now:
                continue
            if self._idle and self._inbox:
                self._enter()
            for worker in sorted(self._idle):
                self._give(worker, now)
        if np.isnan(self._ended).any():
            raise RuntimeError(
                f"{int(np.isnan(self._ended).sum())} requests are left and nothing is scheduled for them"
            )
        arrived = np.array([one.at_s for one in self._arrivals])
        slo = np.array([one.slo_s for one in self._arrivals])
        return Served(
            arrived_s=arrived, started_s=self._started, ended_s=self._ended, met=self._ended - arrived <= slo,
            busy_s=self._busy_s, rows=self._rows, useful_rows=self._useful, tasks=self._tasks,
        )  # fmt: skip

    def _enter(self) -> None:
        arrivals = [self._arrivals[place] for place in self._inbox]
        deadlines = [one.at_s + min(one.slo_s, 1e9) for one in arrivals]
        requests = self._batching.add([one.graph for one in arrivals], None, deadlines)
        for request, place, arrival in zip(requests, self._inbox, arrivals, strict=True):
            self._hidden.enter(request, arrival)
            self._place[request] = place
        self._inbox.clear()

    def _complete(self, now: float, task: Task, ended: NDArray[np.bool_] | None) -> None:
        for request in self._batching.complete(task, ended):
            self._ended[self._place.pop(request)] = now
        if self._last.get(task.worker) is task:
            del self._last[task.worker]
            self._idle.add(task.worker)

    def _give(self, worker: int, now: float) -> None:
        tasks = self._batching.schedule(worker, now)
        for task in tasks:
            rows, ended = self._hidden.execute(task.nodes)
            total = rows + task.padding
            took = self._costs.of(self._names[task.cell], total) if total else 0.0
            self._start(task.nodes[self._hidden.executed[task.nodes] == 1], now + task.delay_s)
            now += task.delay_s + took
            self._busy_s += took
            self._rows, self._useful, self._tasks = self._rows + total, self._useful + rows, self._tasks + 1
            self._sequence += 1
            grows = self._batching.table.cells.cells[task.cell].until is not None
            heapq.heappush(self._events, (now, _TASK_ENDS, self._sequence, task, ended if grows else None))
        if tasks:
            self._idle.discard(worker)
            self._last[worker] = tasks[-1]

    def _start(self, nodes: Ints, now: float) -> None:
        """Note who is executed for the first time."""
        for request in self._batching.table.request[nodes].tolist():
            place = self._place.get(request)
            if place is not None and np.isnan(self._started[place]):
                self._started[place] = now
