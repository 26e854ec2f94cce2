"""Cell graphs: what one request computes, as nodes of cells and where each takes its inputs from.

A node may be executed many times, each time after the one before, so that a chain of any length is one node: `times`
says how often, or bounds it where a cell's output ends the chain (`CellType.until`). `layout.compile_graph` turns a
graph into arrays of storage rows; after that nothing looks at single nodes any more.

Source: BatchMaker, sections 2.4.1 (unfolding), 2.4.3 (subgraphs), 2.7.4 (a decoder that feeds its output back).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ext.cellular.cells import CellType, Kind

MAX_TIMES = 1_000_000
"""Executions that a node may have at most."""
Ints = NDArray[np.int64]


class GraphError(ValueError):
    """A cell graph that cannot be run; the message names node, port and what is allowed."""


@dataclass(frozen=True)
class Zero:
    """An input of zeros: the state before the first step."""


@dataclass(frozen=True)
class Data:
    """An input that the request brought: row ``first``, and with ``each`` the next row at every further execution."""

    name: str
    first: int = 0
    each: bool = False


@dataclass(frozen=True)
class Output:
    """The last value of a node's output."""

    node: int
    port: str


@dataclass(frozen=True)
class Held:
    """A value of a session, which lasts from one of its graphs to the next."""

    name: str


Source = Zero | Data | Output | Held


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a cell graph; see `CellGraph.add`."""

    cell: str
    inputs: Mapping[str, Source]
    times: int
    feedback: Mapping[str, str]
    collect: frozenset[str]
    into: Mapping[str, str]
    exits: bool


@dataclass
class CellGraph:
    """The graph of one request; nodes are added after those that they take inputs from."""

    data: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Name -> values, a row each along the first dimension."""
    result: dict[str, Output | tuple[Output, ...]] = field(default_factory=dict)
    """What the request returns: the last value of an output, or all of a collected one; of several outputs that of the
    last node that was computed."""
    nodes: list[Node] = field(default_factory=list)

    def add(
        self, cell: str, inputs: Mapping[str, Source], *, times: int = 1, feedback: Mapping[str, str] | None = None,
        collect: Sequence[str] = (), into: Mapping[str, str] | None = None, exits: bool = False,
    ) -> int:  # fmt: skip
        """Add a node and return its number.

        Args:
            cell: Name of its cell.
            inputs: Where the first execution takes each input from.
            times: How often it is executed, at most.
            feedback: Input -> the output of the execution before, from the second on.
            collect: Outputs of which every execution's value is kept, not the last only.
            into: Output -> the session's value that it replaces.
            exits: Whether the output that ends a chain of the cell (`CellType.until`) ends the whole request here:
                nothing else of it is computed.
        """
        node = Node(
            cell=cell, inputs=inputs, times=times, feedback=feedback or {}, collect=frozenset(collect),
            into=into or {}, exits=exits,
        )  # fmt: skip
        self.nodes.append(node)
        return len(self.nodes) - 1


class CellTable:
    """The cells of a model, by name and by number, and the kinds of values that they exchange."""

    def __init__(self, cells: Sequence[CellType]) -> None:
        self.cells = tuple(cells)
        self.number = {cell.name: number for number, cell in enumerate(cells)}
        if not cells or len(self.number) < len(cells):
            raise GraphError(f"cells={[cell.name for cell in cells]}: must be one or more, with different names")
        ports = [port for cell in cells for port in (*cell.inputs, *cell.outputs)]
        self.kinds: tuple[Kind, ...] = tuple(dict.fromkeys(port.kind for port in ports))
        kind = {one: number for number, one in enumerate(self.kinds)}
        self.kind_number: Mapping[Kind, int] = kind
        self.in_kinds = [[kind[port.kind] for port in cell.inputs] for cell in cells]
        self.out_kinds = [[kind[port.kind] for port in cell.outputs] for cell in cells]
        self.in_place = [{port.name: place for place, port in enumerate(cell.inputs)} for cell in cells]
        self.out_place = [{port.name: place for place, port in enumerate(cell.outputs)} for cell in cells]
        self.num_inputs = max(len(cell.inputs) for cell in cells)
        self.num_outputs = max(len(cell.outputs) for cell in cells)
