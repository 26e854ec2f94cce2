"""Padded batching of a whole model with exits, for `cellular_exits.py`: nothing is run from here.

Requests of one padded length are a batch from the first layer to the last that one of them needs; meanwhile nobody
joins. Who has waited longest is in the next batch, and there are no time-outs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vllm_ext.cellular.graphs import CellTable, Ints
from vllm_ext.cellular.layout import CompiledGraph
from vllm_ext.cellular.scheduler import CellCounts, Task
from vllm_ext.cellular.tables import GraphTable
from vllm_ext.experiments.batching.padding import Bools


@dataclass
class Batch:
    requests: list[int]
    layer: int = 0
    going: list[int] = field(default_factory=list)
    """Requests that have not left."""


class WholeModel:
    """A manner of batching for graphs whose nodes are one after the other, the same for all of a length.

    Args:
        cells: What can be computed.
        on_free: Told of a request whose rows can be used again.
        max_batch: Requests of a batch.
        compact: Whether who has left is answered at once and not computed any further; otherwise all rows of a batch
            are computed until the last has left, and are answered then.
    """

    def __init__(self, cells: CellTable, on_free: Callable[[int], None], *, max_batch: int, compact: bool) -> None:
        self.cells, self.table = cells, GraphTable(cells)
        self.counts = [CellCounts() for _ in cells.cells]
        self._on_free, self._max_batch, self._compact = on_free, max_batch, compact
        self._waiting: dict[int, deque[int]] = {}
        self._order: dict[int, int] = {}
        self._arrived = 0
        self._batches: dict[int, Batch] = {}
        self._dropped: set[int] = set()

    def add(self, graphs: Sequence[CompiledGraph], bases: Ints | None, deadline_s: Sequence[float]) -> list[int]:
        numbers: list[int] = self.table.add(graphs, bases).tolist()
        for number, graph in zip(numbers, graphs, strict=True):
            self._arrived += 1
            self._order[number] = self._arrived
            self._waiting.setdefault(int(graph.cell[0]), deque()).append(number)
        return numbers

    def schedule(self, worker: int, now: float) -> list[Task]:
        """Return the next layer of the worker's batch, or the first of a new one."""
        begun = worker in self._batches
        if not begun and not self._form(worker):
            return []
        batch = self._batches[worker]
        nodes = np.array(batch.going) + batch.layer
        in_rows, out_rows = self.table.advance(nodes)
        cell = int(self.table.cell[nodes[0]])
        self.counts[cell].add(len(nodes))
        return [Task(
            cell=cell, worker=worker, nodes=nodes, in_rows=in_rows, out_rows=out_rows, last=np.zeros(len(nodes), bool),
            padding=0 if self._compact else len(batch.requests) - len(nodes), goes_on=begun,
        )]  # fmt: skip

    def complete(self, task: Task, ended: Bools | None = None, failed: Bools | None = None) -> list[int]:
        batch, table = self._batches[task.worker], self.table
        table.steps[task.nodes] += 1
        batch.layer += 1
        leaves = np.zeros(len(task.nodes), bool) if ended is None else ended.copy()
        leaves |= batch.layer == table.count[table.request[task.nodes]]
        if failed is not None:
            leaves |= failed
            self._dropped.update(table.request[task.nodes[failed]].tolist())
        left = table.request[task.nodes[leaves]].tolist()
        batch.going = table.request[task.nodes[~leaves]].tolist()
        if not batch.going:
            del self._batches[task.worker]
        if self._compact:
            return self._over(left)
        return [] if batch.going else self._over(batch.requests)

    def abort(self, request: int) -> None:
        """Take a request out of those that wait; one of a running batch is computed to its end."""
        for waiting in self._waiting.values():
            if request in waiting:
                waiting.remove(request)
                self._over([request])
                return
        self._dropped.add(request)

    def worker_died(self, worker: int) -> list[int]:
        batch = self._batches.pop(worker, None)
        return self._over(batch.going if self._compact else batch.requests) if batch else []

    def _form(self, worker: int) -> bool:
        """Make a batch of the length whose first request has waited longest."""
        filled = [waiting for waiting in self._waiting.values() if waiting]
        if not filled:
            return False
        waiting = min(filled, key=lambda one: self._order[one[0]])
        requests = [waiting.popleft() for _ in range(min(self._max_batch, len(waiting)))]
        self._batches[worker] = Batch(requests, going=requests)
        return True

    def _over(self, requests: Sequence[int]) -> list[int]:
        """Give up what requests hold, and return those that were not dropped."""
        for request in requests:
            del self._order[request]
            self.table.release(request)
            self._on_free(request)
        found = [request for request in requests if request not in self._dropped]
        self._dropped.difference_update(requests)
        return found
