"""Cells and cell graphs that tests share; none of them computes anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm_ext.cellular.cells import CellType, Port
from vllm_ext.cellular.graphs import CellGraph, CellTable, Data, Held, Output, Zero
from vllm_ext.cellular.layout import CompiledGraph, compile_graph

TOKEN, STATE, DONE = Port("token", (), "int64"), Port("h", (2,)), Port("done", (), "bool")
LEFT, RIGHT = Port("h_left", (2,)), Port("h_right", (2,))
Tree = Any
"""A leaf is a token; else a pair of trees."""


def cell(name: str, inputs: Sequence[Port], outputs: Sequence[Port] = (STATE,), **more: Any) -> CellType:
    return CellType(name=name, inputs=tuple(inputs), outputs=tuple(outputs), **more)


def cells(max_batch: int = 4, min_batch: int = 1) -> CellTable:
    sizes = tuple(sorted({min_batch, max_batch}))
    return CellTable([
        cell("step", (TOKEN, STATE), batch_sizes=sizes),
        cell("decoder", (TOKEN, STATE), (STATE, TOKEN, DONE), batch_sizes=sizes, priority=1, until="done"),
        cell("leaf", (TOKEN,), batch_sizes=sizes),
        cell("internal", (LEFT, RIGHT), batch_sizes=sizes, priority=1),
        cell("shallow", (STATE,), (STATE, DONE), batch_sizes=sizes, until="done"),
        cell("deep", (STATE,), (STATE, DONE), batch_sizes=sizes, priority=2, until="done"),
    ])  # fmt: skip


def chain(length: int) -> CellGraph:
    graph = CellGraph(data={"tokens": np.arange(length)})
    node = graph.add("step", {"token": Data("tokens", each=True), "h": Zero()}, times=length, feedback={"h": "h"})
    graph.result["h"] = Output(node, "h")
    return graph


def translation(length: int, bound: int) -> CellGraph:
    graph = chain(length)
    inputs = {"token": Zero(), "h": Output(0, "h")}
    node = graph.add("decoder", inputs, times=bound, feedback={"h": "h", "token": "token"}, collect=["token"])
    graph.result = {"tokens": Output(node, "token")}
    return graph


def tree(shape: Tree) -> CellGraph:
    leaves: list[int] = []
    graph = CellGraph()

    def add(part: Tree) -> int:
        if isinstance(part, int):
            leaves.append(part)
            return graph.add("leaf", {"token": Data("tokens", first=len(leaves) - 1)})
        left, right = (add(one) for one in part)
        return graph.add("internal", {"h_left": Output(left, "h"), "h_right": Output(right, "h")})

    graph.result["h"] = Output(add(shape), "h")
    graph.data = {"tokens": np.array(leaves)}
    return graph


def complete_tree(leaves: int) -> Tree:
    return 0 if leaves == 1 else (complete_tree(leaves // 2), complete_tree(leaves // 2))


def layers(deep: Sequence[bool], times: int = 1) -> CellGraph:
    """Nodes one after the other, each of which can end the request."""
    graph = CellGraph()
    for number, one in enumerate(deep):
        source = Output(number - 1, "h") if number else Held("h")
        graph.add("deep" if one else "shallow", {"h": source}, times=times, feedback={"h": "h"}, exits=True)
    graph.result["h"] = tuple(Output(number, "h") for number in range(len(deep)))
    return graph


def compiled(graph: CellGraph, table: CellTable) -> CompiledGraph:
    return compile_graph(graph, table, {"h": 1})
