"""Cellular batching: which nodes make the next tasks of a worker.

Pure: no torch, no clock. A subgraph is pinned to the worker that runs its tasks, in the order of submission; so its
nodes become ready when the task before is *submitted*. Edges between subgraphs are resolved at *completion*. The next
execution of a growing chain is submitted before it is known that there is one; the worker leaves out who has ended.

Source: BatchMaker, Algorithm 1 and section 2.4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cellular.graphs import CellTable, Ints
from vllm_ext.cellular.layout import CompiledGraph
from vllm_ext.cellular.order import ArrivalOrder, Order
from vllm_ext.cellular.queue import ReadyQueue
from vllm_ext.cellular.tables import FREE, GraphTable

MAX_TASKS_TO_SUBMIT = 5
"""MaxTasksToSubmit of Algorithm 1, its default."""
_FEW = 4
"""Nodes of a task up to which plain Python is quicker than arrays."""
_LEARN = 0.02


@dataclass(frozen=True, eq=False, slots=True)
class Task:
    """One batched invocation of a cell."""

    cell: int
    worker: int
    nodes: Ints
    in_rows: Ints
    """Row of storage per node and input."""
    out_rows: Ints
    last: NDArray[np.bool_]
    """Whether this is the node's last execution, whatever its output."""
    padding: int = 0
    """Rows computed beside the nodes, to nobody's use."""
    goes_on: bool = False
    """Whether nobody has written to its rows since the worker's task before, although that is of another series."""
    delay_s: float = 0.0
    """What the worker waits for before it starts: graphs being merged."""


@dataclass
class CellCounts:
    """Running totals of a cell."""

    tasks: int = 0
    nodes: int = 0
    batches: dict[int, int] = field(default_factory=dict)
    """Batch size, rounded up to a power of two -> tasks."""

    def add(self, nodes: int) -> None:
        """Count a task."""
        self.tasks += 1
        self.nodes += nodes
        size = 1 << max(nodes - 1, 0).bit_length()
        self.batches[size] = self.batches.get(size, 0) + 1


class Batching(Protocol):
    """A manner of batching: cellular, or one of the baselines. All run the same tasks on the same workers."""

    table: GraphTable
    counts: list[CellCounts]

    def add(self, graphs: Sequence[CompiledGraph], bases: Ints | None, deadline_s: Sequence[float]) -> list[int]:
        """Enter requests and return their numbers."""

    def schedule(self, worker: int, now: float) -> list[Task]:
        """Return the next tasks of an idle worker; none if it has nothing to do."""

    def complete(
        self, task: Task, ended: NDArray[np.bool_] | None = None, failed: NDArray[np.bool_] | None = None
    ) -> list[int]:
        """Take note of a task that is done and return the requests that have ended, failed ones excepted."""

    def abort(self, request: int) -> None:
        """Drop a request; tasks that run with it go on."""

    def worker_died(self, worker: int) -> list[int]:
        """Give up what ran on a worker and return the requests that are lost."""


class Scheduler:
    """Algorithm 1 over arrays.

    Args:
        cells: What can be computed.
        on_free: Told of a request's number when nothing of it runs any more: its rows can be used again.
        max_tasks_to_submit: Tasks of one series.
        order: Of subgraphs within a cell.
        step_s: Cell -> seconds of a task, for orders that look at remaining work.
        alternates: Asked before each series, whether cells take turns instead of going as in Algorithm 1.
    """

    def __init__(
        self, cells: CellTable, on_free: Callable[[int], None] | None = None, *,
        max_tasks_to_submit: int = MAX_TASKS_TO_SUBMIT, order: Order | None = None,
        step_s: Mapping[str, float] | None = None, alternates: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        if max_tasks_to_submit < 1:
            raise ValueError(f"max_tasks_to_submit={max_tasks_to_submit!r}: must be at least 1")
        self.cells = cells
        self.table = GraphTable(cells)
        self.queues = [ReadyQueue() for _ in cells.cells]
        self.counts = [CellCounts() for _ in cells.cells]
        self.running_tasks = [0] * len(cells.cells)
        self._on_free = on_free or (lambda _: None)
        self._max_tasks = max_tasks_to_submit
        self._order = order or ArrivalOrder()
        self._alternates = alternates
        self._series = 0
        self._served = [0] * len(cells.cells)
        self._step_s = [(step_s or {}).get(cell.name, 1e-3) for cell in cells.cells]
        self._released = 0
        self._closing: set[int] = set()
        self._work: dict[int, Mapping[int, int]] = {}
        self._grown = [1.0] * len(cells.cells)
        self._tasks: dict[int, list[Task]] = {}
        self._few = _FEW

    def add(self, graphs: Sequence[CompiledGraph], bases: Ints | None, deadline_s: Sequence[float]) -> list[int]:
        """Enter requests: subgraphs without dependencies go to their queues.

        Args:
            graphs: What they compute.
            bases: See `GraphTable.add`.
            deadline_s: When they should have ended, on the clock of `schedule`.

        Returns:
            The requests' numbers.
        """
        table = self.table
        requests = table.add(graphs, bases)
        table.deadline_s[requests] = deadline_s
        numbers: list[int] = requests.tolist()
        self.begin(graphs, numbers)
        return numbers

    def begin(self, graphs: Sequence[CompiledGraph], numbers: Sequence[int]) -> None:
        """Queue what is ready of requests that are in the table."""
        self._work.update(zip(numbers, (graph.work for graph in graphs), strict=True))
        pairs = list(zip(numbers, graphs, strict=True))
        self._release(np.concatenate([graph.roots + number for number, graph in pairs]),
                      np.concatenate([graph.ready + number for number, graph in pairs]))  # fmt: skip

    def schedule(self, worker: int, now: float) -> list[Task]:
        """Form a series of tasks for an idle worker (``Schedule`` and ``Batch``)."""
        for cell in self._choices():
            queue, kind = self.queues[cell], self.cells.cells[cell]
            self._order.refresh(queue, self.table, now)
            tasks: list[Task] = []
            while len(tasks) < self._max_tasks:
                places = queue.first(kind.max_batch, lambda nodes: self._may_run(nodes, worker))
                if not len(places) or (tasks and len(places) < kind.min_batch):
                    break
                tasks.append(self._submit(cell, places, worker))
                self._tasks.setdefault(worker, []).append(tasks[-1])
            if tasks:
                self._series += 1
                self._served[cell] = self._series
                return tasks
        return []

    def complete(
        self, task: Task, ended: NDArray[np.bool_] | None = None, failed: NDArray[np.bool_] | None = None
    ) -> list[int]:
        """Take note of a task that is done.

        Args:
            task: As submitted; tasks of a worker complete in the order of submission.
            ended: Per node, whether its output ends its growing chain; nodes left out by the worker count for nothing.
            failed: Per node, whether it could not be computed; its request is dropped.

        Returns:
            Requests that have ended, in no particular order.
        """
        table, nodes = self.table, task.nodes
        running = self._tasks[task.worker]
        del running[next(place for place, one in enumerate(running) if one.nodes is task.nodes)]
        self._settle(task)
        if failed is not None and failed.any():
            for request in np.unique(table.request[nodes[failed]]):
                self.abort(int(request))
        over = self._completed_few(task, ended) if len(nodes) <= self._few else self._completed(task, ended)
        for request in [one for one in self._closing if not table.in_flight[one]]:
            self._free(request)
        return over

    def _completed(self, task: Task, ended: NDArray[np.bool_] | None) -> list[int]:
        """Count an execution of the nodes that are live, and end those that it was the last of."""
        table, nodes = self.table, task.nodes
        live = table.live[nodes]
        table.steps[nodes[live]] += 1
        over: list[int] = []
        if ended is not None:
            self._end_early(task.cell, nodes[live & ended])
            if (leaving := nodes[live & ended & table.exits[nodes]]).size:
                over = self._exit(leaving)
                live = table.live[nodes]
        done = live & task.last if ended is None else live & (task.last | ended)
        return over + self._finish(nodes[done])

    def _completed_few(self, task: Task, ended: NDArray[np.bool_] | None) -> list[int]:
        """`_completed` of so few nodes that arrays cost more than they save."""
        table = self.table
        finished: list[int] = []
        leaving: list[int] = []
        for place, node in enumerate(task.nodes.tolist()):
            if not table.live[node]:
                continue
            table.steps[node] += 1
            early = ended is not None and bool(ended[place])
            if early:
                self._end_early(task.cell, task.nodes[place : place + 1])
            if early and table.exits[node]:
                leaving.append(node)
            elif early or task.last[place]:
                finished.append(node)
        if not leaving:
            return self._finish_few(finished)
        over = self._exit(np.array(leaving))
        return over + self._finish_few([node for node in finished if table.live[node]])

    def _finish_few(self, nodes: list[int]) -> list[int]:
        """`_finish` of a few."""
        table = self.table
        if any(table.edge_end[node] > table.edge_start[node] for node in nodes):
            return self._finish(np.array(nodes))
        over: list[int] = []
        for node in nodes:
            table.live[node] = False
            request = int(table.request[node])
            table.open[request] -= 1
            if not table.open[request]:
                over.append(request)
        self._end(over)
        return over

    def abort(self, request: int) -> None:
        """Drop a request; its rows are free when no task with it runs."""
        if request not in self._work:
            return
        self._unqueue(request)
        self._end([request])

    def worker_died(self, worker: int) -> list[int]:
        """Drop the requests with tasks on a worker; all others go on elsewhere."""
        tasks = self._tasks.pop(worker, [])
        nodes = np.concatenate([task.nodes for task in tasks]) if tasks else np.empty(0, np.int64)
        lost = [int(r) for r in np.unique(self.table.request[nodes[self.table.live[nodes]]])]
        for request in lost:
            self.abort(request)
        for task in tasks:
            self._settle(task)
        for request in [one for one in self._closing if not self.table.in_flight[one]]:
            self._free(request)
        return lost

    def ready(self, cell: int) -> int:
        """Return how many nodes of a cell wait for a task."""
        return len(self.queues[cell])

    def _choices(self) -> list[int]:
        """Return cells as Algorithm 1 chooses them; the next is for a worker that may not run any node of the first.

        Its criterion "has no running task" lets early stages in, but says nothing to the only worker, which asks when
        nothing runs: while one late node is left, no newcomer begins. There, cells take turns (ours): who was served
        longest ago goes first.
        """
        ready = [cell for cell, queue in enumerate(self.queues) if len(queue)]
        if len(ready) == 1:
            return ready
        if self._alternates():
            return sorted(ready, key=lambda c: (self._served[c], -self.cells.cells[c].priority, c))
        full = [cell for cell in ready if len(self.queues[cell]) >= self.cells.cells[cell].max_batch]
        idle = [cell for cell in ready if not self.running_tasks[cell]]
        chosen: list[int] = []
        for group in (full, idle, ready):
            chosen += sorted((c for c in group if c not in chosen), key=lambda c: (-self.cells.cells[c].priority, c))
        return chosen

    def _may_run(self, nodes: Ints, worker: int) -> NDArray[np.bool_]:
        pin = self.table.pin[self.table.subgraph[nodes]]
        allowed: NDArray[np.bool_] = (pin == FREE) | (pin == worker)
        return allowed

    def _submit(self, cell: int, places: Ints, worker: int) -> Task:
        table, queue = self.table, self.queues[cell]
        nodes = queue.nodes[places]
        task_in, task_out = table.advance(nodes)
        self._count(nodes, 1)
        last = table.left[nodes] == 0
        table.pin[table.subgraph[nodes]] = worker
        queue.drop(places[last])
        if last.any():
            self._resolve_within(nodes[last])
        self.running_tasks[cell] += 1
        self.counts[cell].add(len(nodes))
        return Task(cell=cell, worker=worker, nodes=nodes, in_rows=task_in, out_rows=task_out, last=last)

    def _resolve_within(self, nodes: Ints) -> None:
        """UpdateNodesDependency: what follows in the same subgraph becomes ready."""
        sources, targets = self.table.targets(nodes)
        same = self.table.subgraph[sources] == self.table.subgraph[targets]
        if not same.any():
            return
        targets = targets[same]
        np.add.at(self.table.pending, targets, -1)
        ready = np.unique(targets)
        self._push(ready[self.table.pending[ready] == 0])

    def _settle(self, task: Task) -> None:
        """Undo what counts running tasks; unpin subgraphs that have none left."""
        table = self.table
        self.running_tasks[task.cell] -= 1
        self._count(task.nodes, -1)
        subgraphs = table.subgraph[task.nodes]
        table.pin[subgraphs[table.running[subgraphs] == 0]] = FREE

    def _count(self, nodes: Ints, change: int) -> None:
        """Count what runs of subgraphs and requests."""
        table = self.table
        if len(nodes) > self._few:
            np.add.at(table.running, table.subgraph[nodes], change)
            np.add.at(table.in_flight, table.request[nodes], change)
            return
        for node in nodes.tolist():
            table.running[table.subgraph[node]] += change
            table.in_flight[table.request[node]] += change

    def _end_early(self, cell: int, nodes: Ints) -> None:
        table = self.table
        for share in (table.steps[nodes] / table.times[nodes]).tolist():
            self._grown[cell] += _LEARN * (share - self._grown[cell])
        queued = nodes[table.left[nodes] > 0]
        self.queues[cell].remove(queued, table.key[table.subgraph[queued]])
        table.left[queued] = 0
        self._resolve_within(queued)

    def _exit(self, nodes: Ints) -> list[int]:
        """End the requests of nodes whose output says so."""
        requests: list[int] = np.unique(self.table.request[nodes]).tolist()
        for request in requests:
            self._unqueue(request)
        self._end(requests)
        return requests

    def _unqueue(self, request: int) -> None:
        """Take the nodes of a request out of the queues."""
        table = self.table
        nodes = table.nodes_of(request)
        nodes = nodes[(table.left[nodes] > 0) & (table.pending[nodes] == 0)
                      & (table.external[table.subgraph[nodes]] == 0)]  # fmt: skip
        for cell in {*table.cell[nodes].tolist()}:
            own = nodes[table.cell[nodes] == cell]
            self.queues[cell].remove(own, table.key[table.subgraph[own]])

    def _finish(self, nodes: Ints) -> list[int]:
        """End nodes; their edges to other subgraphs are resolved, and requests without open nodes have ended."""
        if not len(nodes):
            return []
        table = self.table
        table.live[nodes] = False
        sources, targets = table.targets(nodes)
        if len(sources):
            subgraphs = table.subgraph[targets]
            other = subgraphs[table.subgraph[sources] != subgraphs]
            np.add.at(table.external, other, -1)
            met = np.unique(other)
            met = met[table.external[met] == 0]
            if len(met):
                own = np.concatenate([table.nodes_of(one) for one in np.unique(table.request[met]).tolist()])
                self._release(met, own[np.isin(table.subgraph[own], met) & (table.pending[own] == 0)])
        requests = table.request[nodes]
        np.add.at(table.open, requests, -1)
        requests = np.unique(requests)
        over: list[int] = requests[table.open[requests] == 0].tolist()
        self._end(over)
        return over

    def _end(self, requests: list[int]) -> None:
        """End requests, of which no node is queued."""
        for request in requests:
            self.table.live[request : request + int(self.table.count[request])] = False
            self._close(request)

    def _release(self, subgraphs: Ints, ready: Ints) -> None:
        """Pass subgraphs whose external dependencies are met, and their ready nodes, to their queues."""
        table, count = self.table, len(subgraphs)
        requests = table.request[subgraphs]
        remaining = np.zeros(count)
        if self._order.looks_at_work:
            cells = table.cell[subgraphs].tolist()
            remaining[:] = [self._remaining_s(*pair) for pair in zip(requests.tolist(), cells, strict=True)]
        numbers = np.arange(self._released, self._released + count, dtype=np.float64)
        table.key[subgraphs] = self._order.keys(numbers, table.deadline_s[requests], remaining)
        self._released += count
        self._push(ready)

    def _remaining_s(self, request: int, cell: int) -> float:
        """Return the time of what follows, this cell included, if nobody else were served."""
        priority = self.cells.cells[cell].priority
        return sum(
            times * self._step_s[other] * self._grown[other]
            for other, times in self._work[request].items()
            if self.cells.cells[other].priority >= priority
        )

    def _push(self, nodes: Ints) -> None:
        table = self.table
        cells = table.cell[nodes]
        for cell in {*cells.tolist()}:
            own = nodes[cells == cell]
            self.queues[cell].push(own, table.key[table.subgraph[own]])

    def _close(self, request: int) -> None:
        if request in self._work:
            self._closing.add(request)
            if not self.table.in_flight[request]:
                self._free(request)

    def _free(self, request: int) -> None:
        self._closing.discard(request)
        del self._work[request]
        self.table.release(request)
        self._on_free(request)
