"""Padded batching: requests of similar length are a batch from their first step to their last.

Requests wait in buckets by the length of their input; workers serve the buckets in turn: all requests that wait when a
turn comes, in as many batches as they fill, since one batch per turn could not serve the loads that the paper reports.
There are no time-outs: a batch starts as small as it is when a worker is idle. Every request of a batch is padded to
the upper end of its bucket, and a growing part goes on until all of the batch have ended. Results leave with the batch.

Source: MXNet and TensorFlow as set up for BatchMaker, section 2.7.1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cellular.graphs import CellTable, Ints
from vllm_ext.cellular.layout import CompiledGraph
from vllm_ext.cellular.scheduler import CellCounts, Task
from vllm_ext.cellular.tables import GraphTable

Bools = NDArray[np.bool_]


@dataclass
class _Batch:
    requests: list[int]
    padded: int
    """Steps of the first node."""
    stage: int = 0
    step: int = 0
    begun: bool = False
    going: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    """Nodes of the stage that have not ended."""


class PaddedBatching:
    """A manner of batching for graphs that are chains one after the other: the nodes of a graph in their order.

    Args:
        cells: What can be computed.
        on_free: Told of a request when its batch has ended.
        max_batch: Requests of a batch.
        width: Of a bucket; 1 pads nothing.
    """

    def __init__(
        self, cells: CellTable, on_free: Callable[[int], None] | None = None, *, max_batch: int = 512, width: int = 10
    ) -> None:
        if max_batch < 1 or width < 1:
            raise ValueError(f"max_batch={max_batch!r}, width={width!r}: must be at least 1")
        self.cells = cells
        self.table = GraphTable(cells)
        self.counts = [CellCounts() for _ in cells.cells]
        self._on_free = on_free or (lambda _: None)
        self._max_batch, self._width = max_batch, width
        self._buckets: dict[int, deque[int]] = {}
        self._turn, self._quota = -1, 0
        self._stages: dict[int, int] = {}
        self._batches: dict[int, _Batch] = {}
        self._dropped: set[int] = set()

    def add(self, graphs: Sequence[CompiledGraph], bases: Ints | None, deadline_s: Sequence[float]) -> list[int]:
        """Put requests into their buckets; objectives are nothing to this manner of batching."""
        del deadline_s
        numbers: list[int] = self.table.add(graphs, bases).tolist()
        for number, graph in zip(numbers, graphs, strict=True):
            self._stages[number] = len(graph.cell)
            self._buckets.setdefault((int(graph.times[0]) - 1) // self._width, deque()).append(number)
        return numbers

    def schedule(self, worker: int, now: float) -> list[Task]:
        """Return the next task of the worker's batch, or the first of a new one."""
        del now
        batch = self._batches.get(worker) or self._form(worker)
        return [] if batch is None else [self._task(batch, worker)]

    def complete(self, task: Task, ended: Bools | None = None, failed: Bools | None = None) -> list[int]:
        """Go on with the batch; its requests are returned when the last has ended."""
        batch, table = self._batches[task.worker], self.table
        table.steps[task.nodes] += 1
        if failed is not None and failed.any():
            self._dropped.update(table.request[task.nodes[failed]].tolist())
        over = table.left[task.nodes] == 0
        if ended is not None:
            over |= ended
        self._advance(batch, task.nodes[over])
        if batch.stage < self._stages[batch.requests[0]]:
            return []
        del self._batches[task.worker]
        for request in batch.requests:
            del self._stages[request]
            table.release(request)
            self._on_free(request)
        done = [request for request in batch.requests if request not in self._dropped]
        self._dropped.difference_update(batch.requests)
        return done

    def abort(self, request: int) -> None:
        """Take a request from its bucket; one of a running batch is computed to its end."""
        for bucket in self._buckets.values():
            if request in bucket:
                bucket.remove(request)
                del self._stages[request]
                self.table.release(request)
                self._on_free(request)
                return
        self._dropped.add(request)

    def worker_died(self, worker: int) -> list[int]:
        """Give up the worker's batch."""
        batch = self._batches.pop(worker, None)
        for request in batch.requests if batch else []:
            self._on_free(request)
        return batch.requests if batch else []

    def _form(self, worker: int) -> _Batch | None:
        """Take a batch from the next bucket that has requests."""
        filled = sorted(bucket for bucket, waiting in self._buckets.items() if waiting)
        if not filled:
            return None
        if not self._quota or self._turn not in filled:
            self._turn = next((bucket for bucket in filled if bucket > self._turn), filled[0])
            self._quota = len(self._buckets[self._turn])
        waiting = self._buckets[self._turn]
        requests = [waiting.popleft() for _ in range(min(self._max_batch, self._quota, len(waiting)))]
        self._quota -= len(requests)
        batch = _Batch(requests, padded=(self._turn + 1) * self._width, going=np.array(requests))
        self._batches[worker] = batch
        return batch

    def _task(self, batch: _Batch, worker: int) -> Task:
        table, nodes = self.table, batch.going
        in_rows, out_rows = table.advance(nodes)
        cell = int(table.cell[batch.requests[0] + batch.stage])
        self.counts[cell].add(len(nodes))
        begun, batch.begun = batch.begun, True
        return Task(
            cell=cell, worker=worker, nodes=nodes, in_rows=in_rows, out_rows=out_rows,
            last=np.zeros(len(nodes), bool), padding=len(batch.requests) - len(nodes), goes_on=begun,
        )  # fmt: skip

    def _advance(self, batch: _Batch, over: Ints) -> None:
        """Choose what is next: another step of the stage, or the next stage."""
        batch.going = batch.going[~np.isin(batch.going, over)]
        batch.step += 1
        if len(batch.going) or (batch.stage == 0 and batch.step < batch.padded):
            return
        batch.stage, batch.step = batch.stage + 1, 0
        batch.going = np.array(batch.requests) + batch.stage
