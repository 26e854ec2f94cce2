"""Graphs per cell and batch size, with a stand-in for CUDA's capture that computes into the same tensors."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.cellular.plain import Plain
from tests.support.extent import HANG_S
from vllm_ext.cellular.cells import Cell, Port
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.graphed import Captured, CudaCapture, GraphedCells
from vllm_ext.cellular.models import build, save
from vllm_ext.cellular.options import EngineOptions
from vllm_ext.cli import cellular


class Recorder:
    """Captures as CUDA would, but for what it is told to refuse."""

    def __init__(self, refused: Collection[tuple[str, int]] = ()) -> None:
        self.sizes: list[tuple[str, int]] = []
        self.inputs: list[Sequence[torch.Tensor]] = []
        self.refused = refused

    def __call__(self, cell: Cell, inputs: Sequence[torch.Tensor]) -> Captured:
        self.sizes.append((cell.name, len(inputs[0])))
        self.inputs.append(inputs)
        if self.sizes[-1] in self.refused:
            raise RuntimeError("injected: no capture")
        outputs = tuple(value.clone() for value in cell.call(inputs))

        def replay() -> None:
            for into, value in zip(outputs, cell.call(inputs), strict=True):
                into.copy_(value)

        return Captured(inputs=inputs, outputs=outputs, replay=replay)


def test_every_batch_size_is_captured_at_start_largest_first_and_none_while_serving() -> None:
    recorder, model = Recorder(), build("lstm", hidden=8)
    cell = model.cells[0]
    cells = GraphedCells("cpu", recorder)
    cells.prepare(model.cells)
    at_start = [("step", 512), ("head", 512), ("step", 64), ("step", 1), ("head", 1)]
    assert recorder.sizes == at_start
    kept: list[Any] = []
    for rows in (1, 3, 60, 64, 65, 2):
        inputs = cell.random_inputs(rows, seed=rows)
        kept.append((cells(cell, inputs), cell.call(inputs)))
    assert recorder.sizes == at_start
    assert cells.uncaptured == 0
    for found, want in kept:  # what was returned is not written over by later calls
        assert [len(value) for value in found] == [len(value) for value in want]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, want, strict=True))


def test_a_batch_is_padded_to_the_next_size() -> None:
    replayed: list[int] = []

    def counting(cell: Cell, inputs: Sequence[torch.Tensor]) -> Captured:
        return Captured(inputs=inputs, outputs=cell.call(inputs), replay=lambda: replayed.append(len(inputs[0])))

    cell = build("lstm", hidden=8).cells[0]
    cells = GraphedCells("cpu", counting)
    cells.prepare([cell])
    for rows in (1, 2, 64, 65, 512):
        cells(cell, cell.random_inputs(rows))
    assert replayed == [1, 64, 64, 512, 512]


def test_inputs_of_graphs_are_as_the_cell_declares_them() -> None:
    class Kinds(torch.nn.Module):
        def forward(self, token: torch.Tensor, done: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
            return state.float().sum(-1) + token + done

    ports = (Port("token", (), "int64"), Port("done", (), "bool"), Port("state", (2, 3), "float64"))
    cell = Cell(name="kinds", inputs=ports, outputs=(Port("out"),), batch_sizes=(2, 4), module=Kinds())
    recorder = Recorder()
    GraphedCells("cpu", recorder).prepare([cell])
    assert [[(str(value.dtype), tuple(value.shape)) for value in inputs] for inputs in recorder.inputs] == [
        [("torch.int64", (size,)), ("torch.bool", (size,)), ("torch.float64", (size, 2, 3))] for size in (4, 2)
    ]
    assert not any(value.requires_grad for inputs in recorder.inputs for value in inputs)


def test_a_size_without_a_graph_is_computed_without_one_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorder = Recorder(refused=[("step", 512)])
    cells, (cell, *_) = GraphedCells("cpu", recorder), build("lstm", hidden=8).cells
    with caplog.at_level("WARNING"):
        cells.prepare([cell])
    assert caplog.messages == ["cell step can't be captured at batch size 512: RuntimeError('injected: no capture')"]
    caplog.clear()
    captured = list(recorder.sizes)
    with caplog.at_level("WARNING"):
        for rows in (60, 65, 600):
            inputs = cell.random_inputs(rows)
            want = cell.call(inputs)
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(cells(cell, inputs), want, strict=True))
    assert cells.uncaptured == 2
    assert [message for message in caplog.messages if "without a CUDA graph" in message] == [
        "cell step is computed without a CUDA graph at batch size 65: none was captured at start (not logged again for "
        "this cell)"
    ]
    assert recorder.sizes == captured


def test_an_engine_captures_before_it_serves_and_answers_the_same_through_graphs() -> None:
    model = build("lstm", hidden=8)
    requests = [{"tokens": list(range(1, 2 + place))} for place in range(20)]
    options = EngineOptions(max_batch={"step": 8})
    recorder = Recorder()
    with CellularEngine(model, options, compute=GraphedCells("cpu", recorder)) as engine:
        at_start = list(recorder.sizes)
        handles = [engine.submit(request) for request in requests]
        labels = [handle.result(HANG_S)["label"] for handle in handles]
        assert engine.executors[0].uncaptured == 0
    assert [size for name, size in at_start if name == "step"] == [8, 4, 2, 1], "as the engine batches"
    assert recorder.sizes == at_start
    assert labels == [int(Plain(model).scores(request).argmax()) for request in requests]


def test_a_profile_is_of_graphs_at_each_batch_that_it_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    recorder = Recorder()
    cells = GraphedCells("cpu", recorder)
    monkeypatch.setattr(cellular, "_compute", lambda *_: cells)
    save(build("lstm", hidden=8), tmp_path / "m.safetensors")
    assert cellular.main(["profile", str(tmp_path / "m.safetensors"), "--batches", "2,1024", "--repeats", "1"]) == 0
    assert recorder.sizes == [("step", 1024), ("head", 1024), ("step", 2), ("head", 2)]
    assert cells.uncaptured == 0


class FakeCuda:
    """Stands for `torch.cuda`; notes how graphs are captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captures: list[dict[str, Any]] = []
        self.handles = itertools.count()
        none = contextlib.nullcontext
        for name, stand_in in {
            "CUDAGraph": SimpleNamespace, "Stream": Mock, "current_stream": Mock, "device": none, "stream": none,
            "graph": self._graph, "graph_pool_handle": lambda: next(self.handles),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextlib.contextmanager
    def _graph(self, graph: SimpleNamespace, **options: Any) -> Iterator[None]:
        graph.replay = lambda: None
        yield
        self.captures.append(options)


def test_graphs_share_one_pool_and_do_not_mind_what_other_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cell = FakeCuda(monkeypatch), build("lstm", hidden=8).cells[0]
    GraphedCells("cpu", CudaCapture()).prepare([cell])
    assert [options["pool"] for options in cuda.captures] == [0] * len(cell.batch_sizes)
    assert len({id(options["stream"]) for options in cuda.captures}) == 1, "torch shares memory within one stream only"
    assert {options["capture_error_mode"] for options in cuda.captures} == {"thread_local"}


def test_a_capture_that_fails_does_not_spoil_the_pool_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, capture = FakeCuda(monkeypatch), CudaCapture()
    good = build("lstm", hidden=8).cells[0]
    bad = replace(good, module=Mock(side_effect=RuntimeError("injected")))
    inputs = good.random_inputs(1)
    capture(good, inputs)
    with pytest.raises(RuntimeError, match="injected"):
        capture(bad, inputs)
    capture(good, inputs)
    assert [options["pool"] for options in cuda.captures] == [0, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_graphs_compute_the_cell_at_every_size_in_any_order() -> None:
    model = build("lstm", hidden=8)
    for module in model.modules.values():
        module.cuda()
    cell = model.cells[0]
    cells = GraphedCells("cuda")
    cells.prepare(model.cells)
    with torch.inference_mode():
        for rows in (5, 1, 300, 64, 512, 2):
            inputs = cell.random_inputs(rows, seed=rows)
            found = cells(cell, inputs)
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, cell.call(inputs), strict=True))
    assert cells.uncaptured == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_another_thread_may_pin_memory_while_cells_are_captured(caplog: pytest.LogCaptureFixture) -> None:
    model, over, errors = build("lstm", hidden=8), threading.Event(), set()
    for module in model.modules.values():
        module.cuda()

    def pin() -> None:
        cuda, memory = torch.cuda.cudart(), torch.zeros(2**22, dtype=torch.uint8)
        while not over.is_set():
            errors.add(int(cuda.cudaHostRegister(memory.data_ptr(), len(memory), 0)))
            errors.add(int(cuda.cudaHostUnregister(memory.data_ptr())))

    other = threading.Thread(target=pin)
    other.start()
    try:
        GraphedCells("cuda").prepare(model.cells)
    finally:
        over.set()
        other.join(HANG_S)
    assert not caplog.messages, "each size was captured"
    assert errors == {0}
