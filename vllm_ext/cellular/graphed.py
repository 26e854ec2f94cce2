"""Cells as CUDA graphs: one per cell and batch size, replayed instead of launching kernel by kernel.

All graphs are captured at start. To capture while serving would let requests wait for it. A batch is padded to the next
of the cell's batch sizes; what the padding rows hold is computed and thrown away.

Source: BatchMaker, section 2.6 (cells are materialised for each supported batch size), section 2.5 (launch gaps).
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ext.cellular.cells import Cell

logger = logging.getLogger(__name__)

_WARM_UP = 3
Outputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A graph with the tensors that it reads and writes."""

    inputs: Sequence[torch.Tensor]
    outputs: Outputs
    replay: Callable[[], None]


Capture = Callable[[Cell, Sequence[torch.Tensor]], Captured]


class CudaCapture:
    """Captures calls of cells on the device of their inputs, each after it has run on the stream that captures.

    All graphs share one memory pool, and for its sake one stream. They may, since they are replayed one at a time: what
    a graph leaves in the pool beside its outputs is of no use to another. Other threads may use CUDA meanwhile.
    """

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, cell: Cell, inputs: Sequence[torch.Tensor]) -> Captured:
        """Capture a call of a cell.

        Raises:
            Exception: Whatever the cell's module raises, or CUDA about what can't be captured. The graphs captured
                before stay as they are.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(inputs[0].device):
            try:
                outputs = self._captured(graph, cell, inputs)
            except Exception:
                self._pool = self._stream = None  # torch may take the pool to be in use from now on
                raise
        return Captured(inputs=inputs, outputs=outputs, replay=graph.replay)

    def _captured(self, graph: torch.cuda.CUDAGraph, cell: Cell, inputs: Sequence[torch.Tensor]) -> Outputs:
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP):
                cell.call(inputs)
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):  # fmt: skip
                outputs = cell.call(inputs)
        current.wait_stream(self._stream)
        return outputs


class GraphedCells:
    """Calls cells through graphs that `prepare` captured, and without one where there is none.

    Used by one thread at a time.

    Args:
        device: Where cells compute.
        capture: Makes a graph from a cell and inputs of its size.

    Attributes:
        uncaptured: Batches that were computed without a graph.
    """

    def __init__(self, device: str, capture: Capture | None = None) -> None:
        self._device, self._capture = device, capture or CudaCapture()
        self._graphs: dict[str, dict[int, Captured]] = {}
        self._told: set[str] = set()
        self.uncaptured = 0

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Capture each cell at each of its batch sizes, the largest first, so that the others fit into its memory.

        The modules must be on the device. A size that can't be captured is logged and left out.
        """
        self._graphs = {cell.name: {} for cell in cells}
        inputs = {cell.name: self._zeros(cell) for cell in cells}
        sizes = [(size, cell) for cell in cells for size in cell.batch_sizes]
        with torch.no_grad():
            for size, cell in sorted(sizes, key=lambda pair: -pair[0]):
                try:
                    graph = self._capture(cell, [value[:size] for value in inputs[cell.name]])
                except Exception as error:  # noqa: BLE001 - a user's module may do what no graph can hold
                    logger.warning("cell %s can't be captured at batch size %d: %r", cell.name, size, error)
                else:
                    self._graphs[cell.name][size] = graph

    def __call__(self, cell: Cell, inputs: Sequence[torch.Tensor]) -> Outputs:
        """Return the outputs of a batch; a later call does not change them."""
        rows = len(inputs[0])
        graph = self._graph(cell.name, rows)
        if graph is None:
            self._tell(cell.name, rows)
            return cell.call(inputs)
        for static_input, value in zip(graph.inputs, inputs, strict=True):
            static_input[:rows].copy_(value)
        graph.replay()
        return tuple(value[:rows].clone() for value in graph.outputs)

    def _zeros(self, cell: Cell) -> list[torch.Tensor]:
        """Return inputs of a cell's largest size, as its ports say; its smaller sizes use their first rows."""
        return [
            torch.zeros((cell.max_batch, *port.shape), dtype=getattr(torch, port.dtype), device=self._device)
            for port in cell.inputs
        ]

    def _graph(self, cell: str, rows: int) -> Captured | None:
        """Return the smallest graph that has room for so many rows."""
        graphs = self._graphs.get(cell, {})
        sizes = sorted(graphs)
        place = bisect.bisect_left(sizes, rows)
        return graphs[sizes[place]] if place < len(sizes) else None

    def _tell(self, cell: str, rows: int) -> None:
        self.uncaptured += 1
        if cell not in self._told:
            self._told.add(cell)
            logger.warning("cell %s is computed without a CUDA graph at batch size %d: none was captured at start (not "
                           "logged again for this cell)", cell, rows)  # fmt: skip
