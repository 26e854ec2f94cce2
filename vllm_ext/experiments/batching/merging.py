"""Graph merging: the graphs of a batch of requests become one graph, whose equal cells are computed together.

A worker takes as many requests as wait, up to a bound, merges their graphs, computes the whole level by level and
returns all results at the end; who arrives meanwhile waits. Merging costs time on the CPU for every node. DyNet merges
operators, of which a cell has some, before it computes; Fold merges cells, the next batch's while this one is computed.

Source: BatchMaker, sections 2.2.3 and 2.7.5.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cellular.graphs import CellTable, Ints
from vllm_ext.cellular.layout import CompiledGraph
from vllm_ext.cellular.scheduler import Scheduler, Task

_UNBOUNDED = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Merging:
    """How graphs are merged."""

    name: str
    node_s: float
    """CPU seconds per node of a cell graph."""
    overlapped: bool
    """Whether the next batch is merged while this one is computed."""


class _BatchScheduler(Scheduler):
    """Keeps the requests of a batch, results and all, until the batch has ended."""

    def __init__(self, cells: CellTable, on_free: Callable[[int], None] | None) -> None:
        super().__init__(cells, on_free, max_tasks_to_submit=1)
        self._ended: list[int] = []

    def _free(self, request: int) -> None:
        self._closing.discard(request)
        self._ended.append(request)

    def end_batch(self) -> None:
        """Free all that have ended."""
        for request in self._ended:
            super()._free(request)
        self._ended = []


class MergedBatching:
    """A manner of batching for one worker.

    Args:
        cells: What can be computed; their batches are not bounded.
        on_free: Told of a request when its batch has ended.
        merging: How, and what it costs.
        max_requests: Graphs that are merged at most.
    """

    def __init__(
        self,
        cells: CellTable,
        on_free: Callable[[int], None] | None = None,
        *,
        merging: Merging,
        max_requests: int = 64,
    ) -> None:
        unbounded = CellTable([replace(cell, batch_sizes=(1, _UNBOUNDED)) for cell in cells.cells])
        self._inner = _BatchScheduler(unbounded, on_free)
        self.table, self.counts = self._inner.table, self._inner.counts
        self._merging, self._max_requests = merging, max_requests
        self._waiting: deque[tuple[CompiledGraph, int]] = deque()
        self._next: tuple[list[tuple[CompiledGraph, int]], float] | None = None
        self._batch: set[int] = set()
        self._done: list[int] = []

    def add(self, graphs: Sequence[CompiledGraph], bases: Ints | None, deadline_s: Sequence[float]) -> list[int]:
        """Let requests wait for the next batch."""
        del deadline_s
        numbers: list[int] = self.table.add(graphs, bases).tolist()
        self._waiting.extend(zip(graphs, numbers, strict=True))
        return numbers

    def schedule(self, worker: int, now: float) -> list[Task]:
        """Return the next level of the batch, or merge a new one."""
        if worker:
            raise ValueError(f"worker={worker!r}: graphs are merged for one worker, 0")
        if self._batch:
            return self._inner.schedule(worker, now)
        batch, ready_s = self._next or self._merged(now)
        self._next = None
        if not batch:
            return []
        self._batch = {number for _, number in batch}
        self._inner.begin([graph for graph, _ in batch], [number for _, number in batch])
        start_s = max(now, ready_s)
        if self._merging.overlapped and self._waiting:
            self._next = self._merged(start_s)
        first, *rest = self._inner.schedule(worker, now)
        return [replace(first, delay_s=start_s - now), *rest]

    def complete(
        self, task: Task, ended: NDArray[np.bool_] | None = None, failed: NDArray[np.bool_] | None = None
    ) -> list[int]:
        """Return the requests of a batch when all have ended."""
        self._done += self._inner.complete(task, ended, failed)
        if len(self._done) < len(self._batch):
            return []
        done, self._done, self._batch = self._done, [], set()
        self._inner.end_batch()
        return done

    def abort(self, request: int) -> None:
        """Drop a request."""
        self._batch.discard(request)
        self._waiting = deque(pair for pair in self._waiting if pair[1] != request)
        self._inner.abort(request)

    def worker_died(self, worker: int) -> list[int]:
        """Give up the batch."""
        lost = [*{*self._inner.worker_died(worker), *self._done}]
        self._batch, self._done = set(), []
        self._inner.end_batch()
        return lost

    def _merged(self, now: float) -> tuple[list[tuple[CompiledGraph, int]], float]:
        """Take a batch and return it with the time when it is merged."""
        batch = [self._waiting.popleft() for _ in range(min(self._max_requests, len(self._waiting)))]
        nodes = sum(len(graph.cell) for graph, _ in batch)
        return batch, now + nodes * self._merging.node_s


def merge_cells(graphs: Sequence[CompiledGraph]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Merge graphs as Fold does, cell by cell: (depth, cell) -> the nodes that are computed together.

    Not used to serve: its time is what merging in an interpreter costs.
    """
    merged: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place, graph in enumerate(graphs):
        depth = [0] * len(graph.cell)
        starts, targets = graph.edge_start.tolist(), graph.edges.tolist()
        for node, cell in enumerate(graph.cell.tolist()):
            merged.setdefault((depth[node], cell), []).append((place, node))
            for target in targets[starts[node] : starts[node + 1]]:
                depth[target] = max(depth[target], depth[node] + 1)
    return merged


def merge_operators(graphs: Sequence[CompiledGraph], operators: int = 16) -> NDArray[np.int64]:
    """Build and merge graphs as DyNet does, operator by operator: where each group begins.

    Not used to serve: its time stands for that of compiled code, with a tuple for an operator and arrays to merge them.
    A TreeLSTM cell has some 16 operators: product, sum, five gates cut out, five functions of them, products and sums.
    """
    built = [(cell, operator) for graph in graphs for cell in graph.cell.tolist() for operator in range(operators)]
    depths = np.repeat(np.concatenate([np.arange(len(graph.cell)) for graph in graphs]), operators)
    kinds = np.array(built)
    signature = (depths * 64 + kinds[:, 0]) * operators + kinds[:, 1]
    order = np.argsort(signature, kind="stable")
    begins: NDArray[np.int64] = np.flatnonzero(np.diff(signature[order], prepend=-1))
    return begins
