"""From a cell graph to arrays: where each value is stored, and which nodes depend on each other."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cellular.cells import Kind
from vllm_ext.cellular.graphs import (
    MAX_TIMES,
    CellGraph,
    CellTable,
    Data,
    GraphError,
    Held,
    Ints,
    Node,
    Output,
    Source,
    Zero,
)


class Result(NamedTuple):
    """Where an output of a graph is."""

    node: int
    place: int
    """Of the output among the cell's."""
    kind: int
    first: int
    """Row, as `CompiledGraph` numbers them."""
    collected: bool
    """Whether all executions are kept."""


class Region(NamedTuple):
    """Rows that a graph needs of one kind; row 0 of storage is zeros and belongs to nobody."""

    kind: int
    rows: int


@dataclass(frozen=True, eq=False, kw_only=True)
class CompiledGraph:
    """A graph as arrays, one row per node.

    Row numbers of storage count from 1 inside of the graph's own region; 0 is the row of zeros; held rows are negative:
    -1 - row.
    """

    cell: Ints
    times: Ints
    exits: NDArray[np.bool_]
    """Whether the node can end the request, see `CellGraph.add`."""
    subgraph: Ints
    """First node of the connected nodes of one cell that it belongs to (section 2.4.3)."""
    pending: Ints
    """Distinct nodes of the same subgraph that must end before."""
    external: Ints
    """At a subgraph's first node: edges into the subgraph from others."""
    edges: Ints
    """Targets, those of node i from ``edge_start[i]`` on."""
    edge_start: Ints
    """One more than there are nodes."""
    in_first: Ints
    in_next: Ints
    in_step: Ints
    out_first: Ints
    out_step: Ints
    regions: tuple[Region, ...]
    inputs: tuple[tuple[int, int, NDArray[Any]], ...]
    """Kind, first row in the region, values."""
    results: Mapping[str, tuple[Result, ...]]
    """Of several, that of the last node that was computed counts."""
    work: Mapping[int, int]
    """Cell -> executions on the longest path."""

    @cached_property
    def roots(self) -> Ints:
        """First nodes of the subgraphs that nothing has to be done for."""
        return np.unique(self.subgraph[self.external[self.subgraph] == 0])

    @cached_property
    def ready(self) -> Ints:
        """Nodes that can be executed at once."""
        return np.flatnonzero(np.isin(self.subgraph, self.roots) & (self.pending == 0))

    def with_data(self, data: Mapping[str, NDArray[Any]]) -> CompiledGraph:
        """Return the same graph for other data, in the same order.

        Raises:
            ValueError: it is of another shape or type.
        """
        if len(data) != len(self.inputs):
            raise GraphError(f"data={[*data]}: must be {len(self.inputs)} arrays, as in the first graph of this shape")
        for (_, _, known), (name, value) in zip(self.inputs, data.items(), strict=True):
            if (value.dtype, value.shape) != (known.dtype, known.shape):
                raise GraphError(f"data={name!r}: {value.dtype}{list(value.shape)}, must be {known.dtype}"
                                 f"{list(known.shape)} as in the first graph of this shape")  # fmt: skip
        places = zip(self.inputs, data.values(), strict=True)
        _ = self.roots, self.ready  # found once, for all copies
        made = copy.copy(self)
        object.__setattr__(made, "inputs", tuple((kind, row, value) for (kind, row, _), value in places))
        return made


def compile_graph(graph: CellGraph, cells: CellTable, held: Mapping[str, int] | None = None) -> CompiledGraph:
    """Check a graph and lay it out.

    Args:
        graph: It is not changed.
        cells: The cells that it may use.
        held: Name of a session's value -> its row in storage.

    Raises:
        GraphError: the graph is not of these cells, or has no node.
    """
    return _Layout(graph, cells, held or {}).compiled()


class _Layout:
    """Lays a graph out; one use."""

    def __init__(self, graph: CellGraph, cells: CellTable, held: Mapping[str, int]) -> None:
        if not graph.nodes:
            raise GraphError("nodes=[]: a cell graph needs at least one node")
        self._graph, self._cells, self._held = graph, cells, held
        self._used = [0] * len(cells.kinds)
        self._numbers = [self._cell_of(place, node) for place, node in enumerate(graph.nodes)]
        self._readers: dict[Output, int] = {}
        results = [one for of in graph.result.values() for one in _several(of)]
        for source in [s for node in graph.nodes for s in node.inputs.values()] + results:
            if isinstance(source, Output):
                self._readers[source] = self._readers.get(source, 0) + 1
        self._data: dict[str, tuple[int, int]] = {}
        self._out: list[list[int]] = []

    def compiled(self) -> CompiledGraph:
        graph, cells, count = self._graph, self._cells, len(self._graph.nodes)
        inputs = [self._place(name, values) for name, values in graph.data.items()]
        shape_in, shape_out = (count, cells.num_inputs), (count, cells.num_outputs)
        in_first, in_next, in_step = (np.zeros(shape_in, np.int64) for _ in range(3))
        out_first, out_step = (np.zeros(shape_out, np.int64) for _ in range(2))
        for number, node in enumerate(graph.nodes):
            self._check(number, node)
            outs = self._outputs(number, node)
            self._out.append(outs)
            out_first[number, : len(outs)] = outs
            for name in node.collect:
                out_step[number, cells.out_place[self._numbers[number]][name]] = 1
        for number, node in enumerate(graph.nodes):
            for place, port in enumerate(cells.cells[self._numbers[number]].inputs):
                first, following, step = self._input(number, node, port.name)
                in_first[number, place], in_next[number, place], in_step[number, place] = first, following, step
        sub, pending, external, edges, edge_start = self._edges()
        return CompiledGraph(
            cell=np.array(self._numbers), times=np.array([node.times for node in graph.nodes]),
            exits=np.array([node.exits for node in graph.nodes]),
            subgraph=sub, pending=pending, external=external, edges=edges, edge_start=edge_start,
            in_first=in_first, in_next=in_next, in_step=in_step, out_first=out_first, out_step=out_step,
            regions=tuple(Region(kind, rows) for kind, rows in enumerate(self._used) if rows),
            inputs=tuple(inputs), results={name: self._result(name, _several(of)) for name, of in graph.result.items()},
            work=self._longest(),
        )  # fmt: skip

    def _cell_of(self, place: int, node: Node) -> int:
        if node.cell not in self._cells.number:
            raise GraphError(f"cell={node.cell!r} of node {place}: must be one of {', '.join(self._cells.number)}")
        return self._cells.number[node.cell]

    def _take(self, kind: int, rows: int = 1) -> int:
        first = self._used[kind] + 1
        self._used[kind] += rows
        return first

    def _place(self, name: str, values: NDArray[Any]) -> tuple[int, int, NDArray[Any]]:
        kind = self._cells.kind_number.get(Kind(values.dtype.name, values.shape[1:]))
        if kind is None:
            known = ", ".join(map(str, self._cells.kinds))
            raise GraphError(f"data={name!r}: rows of {values.dtype}{list(values.shape[1:])}, must be one of {known}")
        self._data[name] = (kind, self._take(kind, len(values)))
        return (*self._data[name], values)

    def _check(self, number: int, node: Node) -> None:
        cell, where = self._cells.cells[self._numbers[number]], f"node {number} ({node.cell})"
        wanted, made = {port.name for port in cell.inputs}, {port.name for port in cell.outputs}
        if node.inputs.keys() != wanted:
            raise GraphError(f"inputs={sorted(node.inputs)} of {where}: must be {', '.join(sorted(wanted))}")
        if not 1 <= node.times <= MAX_TIMES:
            raise GraphError(f"times={node.times!r} of {where}: must be a whole number from 1 to {MAX_TIMES}")
        if unknown := {*node.feedback} - wanted:
            raise GraphError(f"feedback={sorted(unknown)} of {where}: must be inputs, {', '.join(sorted(wanted))}")
        if unknown := {*node.feedback.values(), *node.collect, *node.into} - made:
            raise GraphError(f"outputs={sorted(unknown)} of {where}: must be among {', '.join(sorted(made))}")
        if node.exits and cell.until is None:
            raise GraphError(f"exits={node.exits!r} of {where}: must be of a cell with until")

    def _outputs(self, number: int, node: Node) -> list[int]:
        cell, kinds = self._cells.cells[self._numbers[number]], self._cells.out_kinds[self._numbers[number]]
        rows = []
        for place, port in enumerate(cell.outputs):
            if port.name in node.into:
                rows.append(-1 - self._held_row(node.into[port.name], number))
            elif port.name in node.collect:
                rows.append(self._take(kinds[place], node.times))
            else:
                rows.append(self._reused(node, port.name, kinds[place]) or self._take(kinds[place]))
        return rows

    def _reused(self, node: Node, port: str, kind: int) -> int:
        """Return the row of an input that nobody else reads, so that a chain or tree is computed in place; or 0."""
        if node.times > 1 and node.feedback.get(port) != port:
            return 0  # the input is read again by each execution
        source = node.inputs.get(port) or node.inputs.get(f"{port}_left")
        if not isinstance(source, Output) or self._readers[source] > 1 or not 0 <= source.node < len(self._out):
            return 0
        other = self._numbers[source.node]
        place = self._cells.out_place[other].get(source.port)
        collected = source.port in self._graph.nodes[source.node].collect
        if place is None or collected or self._cells.out_kinds[other][place] != kind:
            return 0
        return max(0, self._out[source.node][place])

    def _held_row(self, name: str, number: int) -> int:
        if name not in self._held:
            raise GraphError(f"held={name!r} of node {number}: must be one of {', '.join(self._held) or 'a session'}")
        return self._held[name]

    def _input(self, number: int, node: Node, port: str) -> tuple[int, int, int]:
        """Return the row of the first execution, that of the second, and how it goes on from there."""
        source, cell = node.inputs[port], self._numbers[number]
        kind = self._cells.in_kinds[cell][self._cells.in_place[cell][port]]
        first, step = self._first(number, port, source, kind)
        if port in node.feedback:
            place = self._cells.out_place[cell][node.feedback[port]]
            if self._cells.out_kinds[cell][place] != kind:
                raise GraphError(f"feedback={port!r} of node {number}: {node.feedback[port]} is of another kind")
            return first, self._out[number][place], int(node.feedback[port] in node.collect)
        return first, first + step, step

    def _first(self, number: int, port: str, source: Source, kind: int) -> tuple[int, int]:
        where = f"input {port} of node {number} ({self._graph.nodes[number].cell})"
        if isinstance(source, Zero):
            return 0, 0
        if isinstance(source, Held):
            return -1 - self._held_row(source.name, number), 0
        if isinstance(source, Data):
            if source.name not in self._data:
                raise GraphError(f"data={source.name!r}, {where}: must be one of {', '.join(self._data)}")
            found, first = self._data[source.name]
            last = source.first + (self._graph.nodes[number].times - 1 if source.each else 0)
            if not 0 <= source.first <= last < len(self._graph.data[source.name]):
                raise GraphError(f"data={source.name!r}, {where}: row {last} of {len(self._graph.data[source.name])}")
            rows, step = first + source.first, int(source.each)
        else:
            if not 0 <= source.node < number:
                raise GraphError(f"node={source.node!r}, {where}: must be a node before it")
            other = self._numbers[source.node]
            if source.port not in self._cells.out_place[other]:
                raise GraphError(f"port={source.port!r}, {where}: must be an output of node {source.node}")
            place = self._cells.out_place[other][source.port]
            collected = source.port in self._graph.nodes[source.node].collect
            found, rows, step = self._cells.out_kinds[other][place], self._out[source.node][place], 0
            if collected:
                raise GraphError(
                    f"port={source.port!r}, {where}: all executions of it are kept, take its last otherwise"
                )
        if found != kind:
            raise GraphError(f"{where}: is {self._cells.kinds[found]}, must be {self._cells.kinds[kind]}")
        return rows, step

    def _edges(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return subgraphs, edges within and into them, and each node's targets."""
        nodes = self._graph.nodes
        before = [_sources(node) for node in nodes]
        root = list(range(len(nodes)))

        def find(one: int) -> int:
            while root[one] != one:
                root[one] = root[root[one]]
                one = root[one]
            return one

        for number, sources in enumerate(before):
            for source in sources:
                if self._numbers[source] == self._numbers[number]:
                    one, other = sorted((find(source), find(number)))
                    root[other] = one
        sub = _without_cycles([find(number) for number in range(len(nodes))], before)
        pending, external = np.zeros(len(nodes), np.int64), np.zeros(len(nodes), np.int64)
        targets: list[list[int]] = [[] for _ in nodes]
        for number, sources in enumerate(before):
            for source in sources:
                targets[source].append(number)
                if sub[source] == sub[number]:
                    pending[number] += 1
                else:
                    external[sub[number]] += 1
        starts = np.cumsum([0, *map(len, targets)])
        return sub, pending, external, np.array([t for one in targets for t in one], np.int64), starts

    def _longest(self) -> dict[int, int]:
        """Return the executions of each cell on the path with most of them."""
        paths: list[dict[int, int]] = []
        for number, node in enumerate(self._graph.nodes):
            path: dict[int, int] = dict(max((paths[source] for source in _sources(node)), key=_total, default={}))
            path[self._numbers[number]] = path.get(self._numbers[number], 0) + node.times
            paths.append(path)
        return max(paths, key=_total)

    def _result(self, name: str, outputs: tuple[Output, ...]) -> tuple[Result, ...]:
        found: list[Result] = []
        for of in outputs:
            if not 0 <= of.node < len(self._out) or of.port not in self._cells.out_place[self._numbers[of.node]]:
                raise GraphError(f"result={name!r}: must name an output of a node of the graph, not {of}")
            cell = self._numbers[of.node]
            place = self._cells.out_place[cell][of.port]
            collected = of.port in self._graph.nodes[of.node].collect
            found.append(
                Result(of.node, place, self._cells.out_kinds[cell][place], self._out[of.node][place], collected)
            )
        if not found or len({one.kind for one in found}) > 1:
            raise GraphError(f"result={name!r}: must be one output, or several of one kind")
        return tuple(sorted(found))


def _without_cycles(sub: list[int], before: list[set[int]]) -> Ints:
    """Return subgraphs none of which waits for itself: those that do, over nodes of others, fall apart into nodes.

    A residual connection around another cell makes such a one.
    """
    waits: dict[int, set[int]] = {}
    for number, sources in enumerate(before):
        waits.setdefault(sub[number], set()).update(sub[source] for source in sources if sub[source] != sub[number])
    feeds: dict[int, list[int]] = {}
    for one, others in waits.items():
        for other in others:
            feeds.setdefault(other, []).append(one)
    left = {one: len(others) for one, others in waits.items()}
    ready = [one for one, count in left.items() if not count]
    while ready:
        one = ready.pop()
        del left[one]
        for other in feeds.get(one, ()):
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    return np.array([number if one in left else one for number, one in enumerate(sub)])


def _sources(node: Node) -> set[int]:
    return {source.node for source in node.inputs.values() if isinstance(source, Output)}


def _several(of: Output | tuple[Output, ...]) -> tuple[Output, ...]:
    return (of,) if isinstance(of, Output) else of


def _total(path: Any) -> int:
    return int(sum(path.values()))
