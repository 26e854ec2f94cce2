"""Graphs per cell and batch size, with a stand-in for CUDA's capture that computes into the same tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.cellular.plain import Plain
from tests.extent import HANG_S
from vllm_ext.cellular.cells import Cell
from vllm_ext.cellular.engine import CellularEngine
from vllm_ext.cellular.graphed import Captured, GraphedCells, capture
from vllm_ext.cellular.models import build
from vllm_ext.cellular.options import EngineOptions


class Recorder:
    def __init__(self) -> None:
        self.sizes: list[tuple[str, int]] = []

    def __call__(self, cell: Cell, inputs: Sequence[torch.Tensor]) -> Captured:
        self.sizes.append((cell.name, len(inputs[0])))
        outputs = tuple(value.clone() for value in cell.call(inputs))

        def replay() -> None:
            for into, value in zip(outputs, cell.call(inputs), strict=True):
                into.copy_(value)

        return Captured(inputs=inputs, outputs=outputs, replay=replay)


def test_a_batch_is_padded_to_the_next_size_and_each_size_is_captured_once() -> None:
    recorder = Recorder()
    cells, (cell, *_) = GraphedCells(recorder), build("lstm", hidden=8).cells
    kept: list[Any] = []
    for rows in (1, 3, 60, 64, 65, 2):
        inputs = cell.random_inputs(rows, seed=rows)
        kept.append((cells(cell, inputs), cell.call(inputs)))
    assert recorder.sizes == [("step", 1), ("step", 64), ("step", 512)]
    for found, want in kept:  # what was returned is not written over by later calls
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, want, strict=True))


def test_an_engine_answers_the_same_through_graphs() -> None:
    model = build("lstm", hidden=8)
    requests = [{"tokens": list(range(1, 2 + place))} for place in range(20)]
    options = EngineOptions(max_batch={"step": 8})
    with CellularEngine(model, options, compute=GraphedCells(Recorder())) as engine:
        handles = [engine.submit(request) for request in requests]
        labels = [handle.result(HANG_S)["label"] for handle in handles]
    assert labels == [int(Plain(model).scores(request).argmax()) for request in requests]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_graph_computes_the_cell() -> None:
    model = build("lstm", hidden=8)
    for module in model.modules.values():
        module.cuda()
    cell = model.cells[0]
    inputs = cell.random_inputs(5)
    with torch.inference_mode():
        found = GraphedCells(capture)(cell, inputs)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, cell.call(inputs), strict=True))
