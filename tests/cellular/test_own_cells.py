"""Cells and graphs that are not among ours: answers are right or refused, whatever they do in the midst of a series."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.extent import HANG_S
from vllm_ext.cellular.arena import Arena
from vllm_ext.cellular.cells import Cell, CellError, Kind, Port
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.graphs import CellGraph, Data, Output, Zero
from vllm_ext.cellular.layout import Region
from vllm_ext.cellular.models import Model, Parsed
from vllm_ext.cellular.requests import EngineError

H, X, DONE = Port("h", (2,)), Port("x"), Port("done", (), "bool")
Tensors = tuple[torch.Tensor, ...]


class Fn(torch.nn.Module):
    """Computes a function; of the batches that are served, the ``fails``-th raises."""

    def __init__(self, function: Callable[..., Any], fails: int = 0) -> None:
        super().__init__()
        self.function, self.fails, self.served = function, fails, -1

    def forward(self, *inputs: torch.Tensor) -> Any:
        if self.served >= 0:
            self.served += 1
            if self.served == self.fails:
                raise RuntimeError("a passing trouble")
        return self.function(*inputs)


class Own(Model):
    """A model of cells and a function that makes a graph of a request's numbers ``x``."""

    kind = "own"
    fields = frozenset({"x"})

    def __init__(self, cells: list[Cell], graph: Callable[[CellGraph, int], None], streamed: str | None = None) -> None:
        self.sizes = {}  # type: ignore[misc]
        super().__init__({})
        self._cells, self._graph = tuple(cells), graph
        self.streamed = streamed  # type: ignore[misc]
        self.modules = {cell.name: cell.module for cell in cells}

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self._cells

    def parse(self, request: Mapping[str, Any]) -> Parsed:
        return Parsed(shape=len(request["x"]), data={"x": np.array(request["x"], np.float32)})

    def unfold(self, parsed: Parsed) -> CellGraph:
        graph = CellGraph(data=parsed.data)
        self._graph(graph, len(parsed.data["x"]))
        return graph


def answers(model: Own, xs: list[list[float]], *, ahead: bool = False) -> list[Any]:
    """Return h, or the error, of requests that are there at once, and see that nothing is left of them."""
    with CellularEngine(model) as engine:
        engine._ahead = ahead
        for module in model.modules.values():
            module.served = 0  # type: ignore[assignment]
        with engine._lock:
            handles = [engine.submit({"x": x}) for x in xs]
        found: list[Any] = []
        for handle in handles:
            try:
                found.append(handle.result(HANG_S)["h"][0])
            except EngineError as error:
                found.append(str(error))
        assert engine.open_requests == 0
    assert not any(ranges.taken for ranges in engine.arena._ranges)
    return found


def counter(fails: int = 0) -> Cell:
    """Counts up to x."""
    step = Fn(lambda h, x: (h + 1, h[:, 0] + 1 == x), fails)
    return Cell(name="count", inputs=(H, X), outputs=(H, DONE), until="done", module=step)


def tenfold() -> Cell:
    return Cell(name="tenfold", inputs=(H,), outputs=(H,), module=Fn(lambda h: h * 10))


def count(graph: CellGraph, _: int, *, source: Any = None) -> int:
    inputs = {"h": source or Zero(), "x": Data("x")}
    node = graph.add("count", inputs, times=5, feedback={"h": "h"})
    graph.result["h"] = Output(node, "h")
    return node


@pytest.mark.parametrize("ahead", [False, True])
def test_a_node_begins_where_the_one_before_has_ended_and_not_where_it_was_computed_again(ahead: bool) -> None:
    def two(graph: CellGraph, _: int) -> None:
        first = count(graph, 1)
        last = graph.add("count", {"h": Output(first, "h"), "x": Data("x", 1)})
        graph.result["h"] = Output(last, "h")

    assert answers(Own([counter()], two), [[2, 9], [3, 9]], ahead=ahead) == [3, 4]


@pytest.mark.parametrize("ahead", [False, True])
def test_who_has_ended_is_untouched_by_a_batch_that_raises_later_in_the_series(ahead: bool) -> None:
    def then_tenfold(graph: CellGraph, length: int) -> None:
        graph.result["h"] = Output(graph.add("tenfold", {"h": Output(count(graph, length), "h")}), "h")

    for fails in (1, 2, 3):
        assert answers(Own([counter(fails)], count), [[1], [4]], ahead=ahead) == [1, 4]
        assert answers(Own([counter(fails), tenfold()], then_tenfold), [[1], [4]], ahead=ahead) == [10, 40]


def test_what_is_computed_beyond_an_end_may_raise_without_harm() -> None:
    def strict(h: torch.Tensor, x: torch.Tensor) -> Tensors:
        if served and (h[:, 0] >= x).any():
            raise ArithmeticError("beyond its end")
        return h + 1, h[:, 0] + 1 >= x

    served = False
    cell = Cell(name="count", inputs=(H, X), outputs=(H, DONE), until="done", module=Fn(strict))
    model = Own([cell], count)
    with CellularEngine(model) as engine:
        served, engine._ahead = True, True
        assert engine.submit({"x": [2]}).result(HANG_S)["h"][0] == 2


def test_a_result_that_an_exit_has_left_out_is_an_error_and_nobody_elses_value() -> None:
    def exits(graph: CellGraph, _: int) -> None:
        first = graph.add("count", {"h": Zero(), "x": Data("x")}, exits=True)
        last = graph.add("tenfold", {"h": Output(first, "h")})
        graph.result["h"] = Output(last, "h")

    found = answers(Own([counter(), tenfold()], exits), [[9]])
    assert found == [10]
    assert answers(Own([counter(), tenfold()], exits), [[1]]) == [
        "result 'h': the request left before any node that has it"
    ]


def test_nothing_is_stored_of_a_batch_with_an_output_of_another_shape_or_type() -> None:
    """The state was stored before, and then computed once more from there."""
    wide = Port("wide", (1,))
    for wrong in (lambda y: torch.cat((y, y), 1), lambda y: y.double(), lambda y: y[:-1]):

        def step(h: torch.Tensor, x: torch.Tensor, wrong: Any = wrong) -> Tensors:
            return h + 1, wrong(x[:, None]) if (x == 13).any() and len(x) > 1 else x[:, None]

        cell = Cell(name="step", inputs=(H, X), outputs=(H, wide), module=Fn(step))

        def chain(graph: CellGraph, length: int) -> None:
            inputs = {"h": Zero(), "x": Data("x", each=True)}
            graph.result["h"] = Output(graph.add("step", inputs, times=length, feedback={"h": "h"}), "h")

        assert answers(Own([cell], chain), [[1, 1, 1, 1], [1, 1, 13, 1]]) == [4, 4]


def test_a_residual_connection_around_another_cell_is_served() -> None:
    """Nodes of one cell on both sides of it are one subgraph, which would wait for itself."""
    left, right = Port("h_left", (2,)), Port("h_right", (2,))
    add = Cell(name="add", inputs=(left, right), outputs=(H,), module=Fn(lambda a, b: a + b))
    read = Cell(name="read", inputs=(X,), outputs=(H,), module=Fn(lambda x: x[:, None].repeat(1, 2)))

    def residual(graph: CellGraph, _: int) -> None:
        x = Output(graph.add("read", {"x": Data("x")}), "h")
        before = Output(graph.add("add", {"h_left": x, "h_right": x}), "h")
        around = Output(graph.add("tenfold", {"h": before}), "h")
        graph.result["h"] = Output(graph.add("add", {"h_left": before, "h_right": around}), "h")

    assert answers(Own([add, read, tenfold()], residual), [[1], [3]]) == [22, 66]


def test_an_input_that_each_execution_reads_again_is_not_overwritten() -> None:
    read = Cell(name="read", inputs=(X,), outputs=(H,), module=Fn(lambda x: x[:, None].repeat(1, 2)))
    add = Cell(name="add", inputs=(H, X), outputs=(H,), module=Fn(lambda h, x: h + x[:, None]))

    def reads(graph: CellGraph, length: int) -> None:
        first = Output(graph.add("read", {"x": Data("x")}), "h")
        node = graph.add("add", {"h": first, "x": Data("x", 1, each=True)}, times=length - 1)
        graph.result["h"] = Output(node, "h")

    assert answers(Own([read, add], reads), [[100, 1, 2, 3]]) == [103]


def test_a_device_without_memory_fails_the_requests_that_need_it_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def resize(arena: Arena, kind: int, rows: int) -> None:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(Arena, "_resize", resize)
    chain = Cell(name="step", inputs=(H, X), outputs=(H,), module=Fn(lambda h, x: h + x[:, None]))

    def kept(graph: CellGraph, length: int) -> None:
        node = graph.add("step", {"h": Zero(), "x": Data("x", each=True)}, times=length, feedback={"h": "h"})
        graph.result["h"] = Output(node, "h")

    found = answers(Own([chain], kept), [[1.0] * 3, [1.0] * 2000, [1.0] * 4])
    assert found == [3, "the request needs more room than there is: no memory left", 4]


def test_streamed_values_go_on_while_a_batch_is_computed_one_by_one() -> None:
    def step(h: torch.Tensor, x: torch.Tensor) -> Tensors:
        if ((x == 13) & (h[:, 0] == 2)).any():
            raise ValueError("13")
        return h + 1, h[:, 0] + 1 >= 5

    cell = Cell(name="count", inputs=(H, X), outputs=(H, DONE), until="done", module=Fn(step))

    def collected(graph: CellGraph, _: int) -> None:
        node = graph.add("count", {"h": Zero(), "x": Data("x")}, times=8, feedback={"h": "h"}, collect=["h"])
        graph.result["h"] = Output(node, "h")

    streamed: list[Any] = []
    with CellularEngine(Own([cell], collected, streamed="h")) as engine:
        with engine._lock:
            good = engine.submit({"x": [1]}, on_output=streamed.append)
            bad = engine.submit({"x": [13]}, on_output=lambda _: None)
        assert good.result(HANG_S)["h"] == streamed == [[n, n] for n in range(1, 6)]
        with pytest.raises(EngineError, match="13"):
            bad.result(HANG_S)


@pytest.mark.parametrize("leak", [0.0, 1.0])
def test_a_cell_that_differs_from_call_to_call_is_refused(leak: float) -> None:
    wide = Port("h", (256,))
    module = Fn(lambda h: torch.nn.functional.dropout(h) + leak * h.mean(0))
    with pytest.raises(CellError, match=r"output h of cell noisy: differs from call to call .* needs eval\(\)"):
        Cell(name="noisy", inputs=(wide,), outputs=(wide,), module=module).check()


def test_the_share_taken_is_a_number_whatever_the_rows() -> None:
    for kind, most in ((Kind("float32", (3 << 20,)), 16 << 20), (Kind("float32", (0,)), 1 << 20)):
        arena = Arena([kind], max_bytes=most)
        assert arena.share_taken == 0
        if kind.shape != (0,):
            assert not arena.fits([Region(0, 1)])
