"""All graphs that are being served, as arrays over their nodes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cellular.graphs import CellTable, Ints
from vllm_ext.cellular.layout import CompiledGraph

FREE = -1
"""A subgraph that no worker has."""
_FIRST_CAPACITY = 1024


class Ranges:
    """Hands out ranges of numbers: of those that are free, the shortest that is long enough.

    Free neighbours are always one range, and none lies at the end: when all is given back, nothing is left of what was.
    """

    def __init__(self, first: int = 0) -> None:
        self.end = first
        """One beyond the highest number in use."""
        self.taken = 0
        """Numbers in use."""
        self._size_at: dict[int, int] = {}
        """First number of a free range -> how many it has."""
        self._first_before: dict[int, int] = {}
        """One beyond the last number of a free range -> its first."""
        self._of_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        """Keys of `_of_size`, increasing."""

    def end_with(self, count: int) -> int:
        """Return what `end` would be after a range was taken."""
        return self.end if self._sizes and self._sizes[-1] >= count else self.end + count

    def take(self, count: int) -> int:
        """Return the first number of a range."""
        self.taken += count
        place = bisect_left(self._sizes, count)
        if place == len(self._sizes):
            self.end += count
            return self.end - count
        size = self._sizes[place]
        first = next(iter(self._of_size[size]))
        self._forget(first, size)
        if size > count:
            self._keep(first + count, size - count)
        return first

    def give(self, first: int, count: int) -> None:
        """Take a range back."""
        self.taken -= count
        end = first + count
        if (behind := self._size_at.get(end)) is not None:
            self._forget(end, behind)
            end += behind
        if (before := self._first_before.get(first)) is not None:
            self._forget(before, first - before)
            first = before
        if end == self.end:
            self.end = first
        else:
            self._keep(first, end - first)

    def _keep(self, first: int, size: int) -> None:
        self._size_at[first], self._first_before[first + size] = size, first
        if size not in self._of_size:
            self._of_size[size] = {}
            insort(self._sizes, size)
        self._of_size[size][first] = None

    def _forget(self, first: int, size: int) -> None:
        del self._size_at[first], self._first_before[first + size], self._of_size[size][first]
        if not self._of_size[size]:
            del self._of_size[size]
            del self._sizes[bisect_left(self._sizes, size)]


class GraphTable:
    """State of every node, subgraph and request.

    A subgraph has the number of its first node, a request that of its graph's first node.
    """

    def __init__(self, cells: CellTable) -> None:
        self.cells = cells
        self._nodes, self._edges = Ranges(), Ranges()
        wide_in, wide_out = cells.num_inputs, cells.num_outputs
        self._kind_in = _padded(cells.in_kinds, wide_in)
        self._kind_out = _padded(cells.out_kinds, wide_out)

        def ints(*shape: int) -> Ints:
            return np.zeros((_FIRST_CAPACITY, *shape), np.int64)

        self.cell, self.left, self.times, self.steps = ints(), ints(), ints(), ints()
        self.pending, self.edge_start, self.edge_end = ints(), ints(), ints()
        self.in_row, self.in_next, self.in_step = ints(wide_in), ints(wide_in), ints(wide_in)
        self.out_row, self.out_step = ints(wide_out), ints(wide_out)
        self.live = np.zeros(_FIRST_CAPACITY, bool)
        """Whether a node has executions to come."""
        self.exits = np.zeros(_FIRST_CAPACITY, bool)
        self.subgraph, self.external, self.pin, self.running = ints(), ints(), ints(), ints()
        self.key = np.zeros(_FIRST_CAPACITY)
        self.request, self.open, self.in_flight, self.count = ints(), ints(), ints(), ints()
        self.deadline_s = np.zeros(_FIRST_CAPACITY)
        self._per_node = [name for name, value in vars(self).items() if isinstance(value, np.ndarray)]
        self._per_node = [name for name in self._per_node if not name.startswith("_")]
        self.target = np.zeros(_FIRST_CAPACITY, np.int64)

    def add(self, graphs: Sequence[CompiledGraph], bases: NDArray[np.int64] | None) -> Ints:
        """Enter graphs and return the requests' numbers; no node is ready yet.

        Args:
            graphs: Unchanged; one may be entered many times.
            bases: First row of storage per graph and kind; None where nothing is stored.
        """
        counts = np.array([len(graph.cell) for graph in graphs])
        firsts = np.array([self._nodes.take(count) for count in counts.tolist()])
        self._grow(int((firsts + counts).max()))
        offset = np.repeat(firsts, counts)
        here = offset + np.arange(len(offset)) - np.repeat(np.cumsum(counts) - counts, counts)

        def all_of(name: str) -> NDArray[Any]:
            found: NDArray[Any] = np.concatenate([getattr(graph, name) for graph in graphs])
            return found

        cell, times = all_of("cell"), all_of("times")
        self.cell[here], self.left[here], self.times[here] = cell, times, times
        self.exits[here], self.subgraph[here] = all_of("exits"), all_of("subgraph") + offset
        self.pending[here], self.external[here] = all_of("pending"), all_of("external")
        self.steps[here], self.running[here], self.in_flight[here] = 0, 0, 0
        self.pin[here], self.live[here], self.request[here] = FREE, True, offset
        self.edge_start[here] = self.edge_end[here] = 0
        for graph, first in zip(graphs, firsts.tolist(), strict=True):
            if len(graph.edges):
                self._add_edges(graph, first)
        if bases is not None:
            place = np.repeat(np.arange(len(graphs)), counts)[:, None]
            base_in, base_out = bases[place, self._kind_in[cell]], bases[place, self._kind_out[cell]]
            self.in_row[here], self.in_next[here] = (_placed(all_of(n), base_in) for n in ("in_first", "in_next"))
            self.out_row[here] = _placed(all_of("out_first"), base_out)
            self.in_step[here], self.out_step[here] = all_of("in_step"), all_of("out_step")
        self.open[firsts] = self.count[firsts] = counts
        return firsts

    def advance(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Count an execution of nodes and return its rows of storage, inputs and outputs."""
        in_rows, out_rows, following = self.in_row[nodes], self.out_row[nodes], self.in_next[nodes]
        self.in_row[nodes] = following
        self.in_next[nodes] = following + self.in_step[nodes]
        self.out_row[nodes] = out_rows + self.out_step[nodes]
        self.left[nodes] -= 1
        return in_rows, out_rows

    def release(self, request: int) -> None:
        """Forget a request; its number may be another's next."""
        count = int(self.count[request])
        first, end = int(self.edge_start[request]), int(self.edge_end[request + count - 1])
        if end > first:
            self._edges.give(first, end - first)
        self._nodes.give(request, count)

    def targets(self, nodes: Ints) -> tuple[Ints, Ints]:
        """Return the edges that leave nodes: sources and targets."""
        starts, counts = self.edge_start[nodes], self.edge_end[nodes] - self.edge_start[nodes]
        total = int(counts.sum())
        if not total:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(nodes, counts), self.target[np.repeat(starts, counts) + within]

    def are_live(self, nodes: Ints) -> NDArray[np.bool_]:
        """Return whether nodes have executions to come."""
        found: NDArray[np.bool_] = self.live[nodes]
        return found

    def nodes_of(self, request: int) -> Ints:
        """Return the nodes of a request."""
        return np.arange(request, request + self.count[request])

    def _add_edges(self, graph: CompiledGraph, first: int) -> None:
        edge, count = self._edges.take(len(graph.edges)), len(graph.edges)
        if edge + count > len(self.target):
            self.target = np.concatenate((self.target, np.zeros(max(len(self.target), edge + count), np.int64)))
        self.target[edge : edge + count] = graph.edges + first
        here = slice(first, first + len(graph.cell))
        self.edge_start[here], self.edge_end[here] = graph.edge_start[:-1] + edge, graph.edge_start[1:] + edge

    def _grow(self, needed: int) -> None:
        if needed <= len(self.cell):
            return
        for name in self._per_node:
            old: NDArray[np.generic] = getattr(self, name)
            more = np.zeros((max(len(old), needed - len(old)), *old.shape[1:]), old.dtype)
            setattr(self, name, np.concatenate((old, more)))


def _padded(lists: Sequence[Sequence[int]], width: int) -> Ints:
    return np.array([[*one, *[0] * (width - len(one))] for one in lists], np.int64)


def _placed(rows: Ints, base: Ints) -> Ints:
    """Return rows of storage for those of a graph's own region; see `CompiledGraph`."""
    return np.where(rows > 0, rows - 1 + base, np.where(rows < 0, -1 - rows, 0))
