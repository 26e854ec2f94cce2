"""Models that are not among ours: what they do wrong is theirs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.support.extent import HANG_S
from vllm_ext.cellular.arena import Arena
from vllm_ext.cellular.cells import Cell, Port
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.graphs import CellGraph, CellTable, Data, GraphError, Held, Output
from vllm_ext.cellular.layout import compile_graph
from vllm_ext.cellular.models import Model, Parsed
from vllm_ext.cellular.requests import EngineError


class Add(torch.nn.Module):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return h + x


class Counter(Model):
    """Adds numbers up over the requests of a session, as many at a time as a request has."""

    kind = "counter"
    sizes: ClassVar[Mapping[str, int]] = {}
    fields = frozenset({"xs"})

    def __init__(self) -> None:
        super().__init__({})
        self.modules = {"add": Add()}
        self.held = {"sum": Port("sum", (1,))}

    @property
    def cells(self) -> tuple[Cell, ...]:
        x, h = Port("x", (1,)), Port("h", (1,))
        return (Cell(name="add", inputs=(x, h), outputs=(h,), module=self.modules["add"]),)

    def parse(self, request: Mapping[str, Any]) -> Parsed:
        values = np.array(request["xs"], np.float32)[:, None]
        return Parsed(shape=self.shape(len(values)), data={"xs": values})

    def shape(self, length: int) -> int:
        return length

    def unfold(self, parsed: Parsed) -> CellGraph:
        graph = CellGraph(data=parsed.data)
        inputs = {"x": Data("xs", each=True), "h": Held("sum")}
        node = graph.add("add", inputs, times=len(parsed.data["xs"]), feedback={"h": "h"}, into={"h": "sum"})
        graph.result["sum"] = Output(node, "h")
        return graph


class OneShape(Counter):
    """Says that all requests have one shape."""

    def shape(self, length: int) -> int:
        del length
        return 0


def test_requests_of_a_session_may_differ_in_length() -> None:
    with CellularEngine(Counter()) as engine:
        one, other = engine.open_session(), engine.open_session()
        found = [one.submit({"xs": xs}).result(HANG_S) for xs in ([1], [1, 1, 1], [2, 2], [5])]
        assert found == [{"sum": [1.0]}, {"sum": [4.0]}, {"sum": [8.0]}, {"sum": [13.0]}]
        assert other.submit({"xs": [7]}).result(HANG_S) == {"sum": [7.0]}
        for length in range(1, 40):
            one.submit({"xs": [0] * length}).result(HANG_S)
        assert len(one.templates) == 16


def test_data_that_is_not_of_the_shape_it_claims_fails_its_request_alone() -> None:
    with CellularEngine(OneShape()) as engine:
        session, other = engine.open_session(), engine.open_session()
        assert session.submit({"xs": [1, 1]}).result(HANG_S) == {"sum": [2.0]}
        with pytest.raises(EngineError, match=r"data='xs': float32\[3, 1\], must be float32\[2, 1\]"):
            session.submit({"xs": [1, 1, 1]})
        assert session.submit({"xs": [1, 2]}).result(HANG_S) == {"sum": [5.0]}
        assert other.submit({"xs": [1]}).result(HANG_S) == {"sum": [1.0]}
        assert engine.healthy


def test_storage_takes_only_values_that_a_graph_has_rows_for() -> None:
    model = Counter()
    table = CellTable(model.cells)
    graph = compile_graph(model.unfold(model.parse({"xs": [1, 2]})), table, {"sum": 9})
    arena = Arena(table.kinds)
    bases = arena.take(graph.regions)
    with pytest.raises(GraphError, match=r"data=\['xs', 'ys'\]: must be 1 arrays"):
        graph.with_data({"xs": np.zeros((2, 1), np.float32), "ys": np.zeros((2, 1), np.float32)})
    for values in (np.zeros((3, 1), np.float32), np.zeros((2, 2), np.float32), np.zeros((2, 1))):
        (kind, row, _), *_ = graph.inputs
        object.__setattr__(graph, "inputs", ((kind, row, values),))
        with pytest.raises(ValueError, match="data: float"):
            arena.write([graph], np.array([bases]))
