"""Runs tasks: gathers inputs, computes a cell, scatters its outputs.

Within a series of tasks the outputs of one are the inputs of the next without a copy, if the batch has stayed the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ext.cellular.arena import Arena
from vllm_ext.cellular.cells import Cell
from vllm_ext.cellular.graphs import CellTable, Ints
from vllm_ext.cellular.scheduler import Task

logger = logging.getLogger(__name__)
Compute = Callable[[Cell, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
Bools = NDArray[np.bool_]


@runtime_checkable
class PreparedCompute(Protocol):
    """A `Compute` that has something to do at start, as to capture graphs."""

    uncaptured: int
    """Batches that it was not prepared for."""

    def prepare(self, cells: Sequence[Cell]) -> None:
        """Get ready for the batch sizes of cells, whose modules are on their device."""
        ...

    def __call__(self, cell: Cell, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute a batch."""
        ...


def prepare(compute: Compute, cells: Sequence[Cell]) -> None:
    """Let a way to call cells get ready for them, if it has anything to do at start."""
    if isinstance(compute, PreparedCompute):
        compute.prepare(cells)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a task, per node."""

    ended: Bools | None = None
    """Whether its output ends its chain; of cells whose outputs do that."""
    failed: Bools | None = None
    errors: tuple[Exception, ...] = ()
    """What the failed ones raised."""
    outputs: tuple[torch.Tensor, ...] = ()
    """Of the nodes that were computed."""


@dataclass
class Times:
    """Running totals of a worker, in CPU seconds of its thread.

    With a CUDA device that is launching and waiting for results, and says nothing of how long the device computes.
    """

    computing: list[float] = field(default_factory=list)
    """Tasks per cell, copies included."""
    copying: float = 0.0
    """Gathering and scattering."""


class Executor:
    """The work of one worker.

    Args:
        cells: With modules on the device, in the order of the table; ``compute`` is prepared for them here.
        table: Their kinds.
        arena: Where values are; shared by the workers of a device.
        compute: How a cell is called: as it is, compiled, or as a CUDA graph.
    """

    def __init__(self, cells: Sequence[Cell], table: CellTable, arena: Arena, compute: Compute = Cell.call) -> None:
        self._cells, self._table, self._arena, self._compute = cells, table, arena, compute
        self._before: list[tuple[int, Ints, torch.Tensor]] = []
        self.times = Times([0.0] * len(cells))
        prepare(compute, cells)

    @property
    def uncaptured(self) -> int:
        """Batches for which there was no graph, of all workers; 0 where cells are not called through graphs."""
        return self._compute.uncaptured if isinstance(self._compute, PreparedCompute) else 0

    def begin_series(self) -> None:
        """Forget the outputs of the task before: their rows may be others' by now."""
        self._before = []

    def run(self, task: Task, live: Bools) -> Outcome:
        """Compute the nodes of a task that are live; all others are left out."""
        begin = time.thread_time()
        with torch.inference_mode():
            outcome = self._run(task, live)
        self.times.computing[task.cell] += time.thread_time() - begin
        return outcome

    def _run(self, task: Task, live: Bools) -> Outcome:
        whole = bool(live.all())
        if not whole and not live.any() and not task.padding:
            return Outcome()
        in_rows, out_rows = (task.in_rows, task.out_rows) if whole else (task.in_rows[live], task.out_rows[live])
        try:
            outputs = self._batch(task.cell, in_rows, out_rows, task.padding)
        except Exception as error:  # noqa: BLE001 - whatever a user's module raises
            logger.warning("cell %s raised, its %d nodes are computed one by one: %r", self._cells[task.cell].name,
                           len(in_rows), error)  # fmt: skip
            return self._one_by_one(task, live)
        return Outcome(ended=self._ended(task.cell, live, outputs), outputs=outputs)

    def _batch(self, cell: int, in_rows: Ints, out_rows: Ints, padding: int = 0) -> tuple[torch.Tensor, ...]:
        """Compute a batch, with rows of zeros behind it whose outputs are thrown away."""
        begin = time.thread_time()
        inputs = [
            self._input(kind, in_rows[:, place], padding) for place, kind in enumerate(self._table.in_kinds[cell])
        ]
        gathered = time.thread_time()
        outputs = self._compute(self._cells[cell], inputs)
        computed = time.thread_time()
        self._before = []
        for place, kind in enumerate(self._table.out_kinds[cell]):
            rows = out_rows[:, place]
            self._arena.scatter(kind, rows, outputs[place][: len(rows)])
            self._before.append((kind, rows, outputs[place]))
        self.times.copying += gathered - begin + time.thread_time() - computed
        return outputs

    def _input(self, kind: int, rows: Ints, padding: int) -> torch.Tensor:
        for other, known, value in self._before:
            if other == kind and len(value) == len(rows) + padding and np.array_equal(known, rows):
                self._arena.traffic.reused += value.nbytes
                return value
        return self._arena.gather(kind, np.pad(rows, (0, padding)) if padding else rows)

    def _ended(self, cell: int, live: Bools, outputs: tuple[torch.Tensor, ...]) -> Bools | None:
        until = self._cells[cell].until
        if until is None:
            return None
        ended = np.zeros(len(live), bool)
        said = outputs[self._table.out_place[cell][until]][: int(live.sum())]
        ended[live] = said.cpu().numpy()
        return ended

    def _one_by_one(self, task: Task, live: Bools) -> Outcome:
        """Find out whose inputs a cell cannot take; only these fail."""
        ended, failed, errors = np.zeros(len(live), bool), np.zeros(len(live), bool), []
        until = self._cells[task.cell].until
        self.begin_series()
        for place in np.flatnonzero(live).tolist():
            try:
                outputs = self._batch(task.cell, task.in_rows[place : place + 1], task.out_rows[place : place + 1])
            except Exception as error:  # noqa: BLE001 - whatever a user's module raises
                failed[place] = True
                errors.append(error)
                continue
            if until is not None:
                ended[place] = bool(outputs[self._table.out_place[task.cell][until]])
        self.begin_series()
        return Outcome(ended=None if until is None else ended, failed=failed, errors=tuple(errors))
