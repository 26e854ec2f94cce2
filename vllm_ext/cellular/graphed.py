"""Cells as CUDA graphs: one per cell and batch size, replayed instead of launching kernel by kernel.

A batch is padded to the next of the cell's batch sizes. What the padding rows hold is computed and thrown away.

Source: BatchMaker, section 2.6 (cells are materialised for each supported batch size), section 2.5 (launch gaps).
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vllm_ext.cellular.cells import Cell

_WARM_UP = 3
Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A graph with the tensors that it reads and writes."""

    inputs: Sequence[torch.Tensor]
    outputs: Outputs
    replay: Callable[[], None]


def capture(cell: Cell, inputs: Sequence[torch.Tensor]) -> Captured:
    """Capture a call of a cell on the device of its inputs, after it has run on a stream of its own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):
            cell.call(inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = cell.call(inputs)
    return Captured(inputs=inputs, outputs=outputs, replay=graph.replay)


class GraphedCells:
    """Calls cells through captured graphs; each is captured when its size first comes up.

    Args:
        capture: Makes a graph from a cell and inputs of its size.
    """

    def __init__(self, capture: Callable[[Cell, Sequence[torch.Tensor]], Captured] = capture) -> None:
        self._capture = capture
        self._graphs: dict[tuple[str, int], Captured] = {}

    def __call__(self, cell: Cell, inputs: Sequence[torch.Tensor]) -> Outputs:
        """Return the outputs of a batch, at most the cell's largest; a later call does not change them."""
        rows = len(inputs[0])
        size = cell.batch_sizes[bisect.bisect_left(cell.batch_sizes, rows)]
        graph = self._graphs.get((cell.name, size))
        if graph is None:
            static = [value.new_zeros((size, *value.shape[1:])) for value in inputs]
            graph = self._graphs[cell.name, size] = self._capture(cell, static)
        for static_input, value in zip(graph.inputs, inputs, strict=True):
            static_input[:rows].copy_(value)
        graph.replay()
        return tuple(value[:rows].clone() for value in graph.outputs)
