"""Runs tasks: gathers inputs, computes a cell, scatters its outputs.

Within a series of tasks the outputs of one are the inputs of the next without a copy, if the batch has stayed the same;
so is an input that stays, such as the frames that a decoder hears.

A CUDA device is given all tasks of a series before the first result is read, so that it does not idle between them. A
node may have ended by then: it is computed once more, and what comes of that is stored nowhere.

Source: BatchMaker, sections 2.4.4 and 2.5.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_ext.cellular.arena import Arena
from vllm_ext.cellular.cells import Cell, CellError
from vllm_ext.cellular.graphs import CellTable, Ints
from vllm_ext.cellular.scheduler import Task

logger = logging.getLogger(__name__)
Compute = Callable[[Cell, Sequence[torch.Tensor]], tuple[torch.Tensor, ...]]
Bools = NDArray[np.bool_]
P = ParamSpec("P")
T = TypeVar("T")
_POLL_S = 20e-6
"""Between two looks whether the device is done."""


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
    """Of the nodes that were computed; zeros of those that failed."""


@dataclass
class Times:
    """Running totals of a worker, in CPU seconds of its thread.

    With a CUDA device that is launching and waiting for results, and says nothing of how long the device computes.
    """

    computing: list[float] = field(default_factory=list)
    """Tasks per cell, copies included."""
    copying: float = 0.0
    """Gathering and scattering."""


@dataclass(frozen=True, kw_only=True)
class _Launched:
    """A task whose results are not read yet."""

    outcome: Outcome
    said: torch.Tensor | None = None
    """What the cell's `until` says, of the nodes that were computed; on its way to the host."""
    done: torch.cuda.Event | None = None


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
        self._over: torch.Tensor | None = None
        """Node -> whether it has ended in this series; None where that is known before a task begins."""
        self._nodes = np.empty(0, np.int64)
        """Of the task before, where that matters."""
        self._outputs = [
            [(getattr(torch, port.dtype), torch.Size(port.shape)) for port in cell.outputs] for cell in cells
        ]
        self.times = Times([0.0] * len(cells))
        prepare(compute, cells)

    @property
    def uncaptured(self) -> int:
        """Batches for which there was no graph, of all workers; 0 where cells are not called through graphs."""
        return self._compute.uncaptured if isinstance(self._compute, PreparedCompute) else 0

    def begin_series(self) -> None:
        """Forget the values of the task before: their rows may be others' by now."""
        self._before = []

    def run(
        self, tasks: Sequence[Task], live: Callable[[Ints], Bools], *, ahead: bool = False
    ) -> Iterator[tuple[Task, Bools, Outcome]]:
        """Compute a series of tasks.

        Args:
            tasks: All of one cell.
            live: Says of nodes whether they have not ended, which changes as tasks are completed; others are left out.
            ahead: Whether all tasks are begun before the first is read.

        Yields:
            A task, which of its nodes were computed, and what came of them.
        """
        self._over = None
        if ahead and self._cells[tasks[0].cell].until is not None:
            size = 1 + max(int(task.nodes.max()) for task in tasks)
            self._over = torch.zeros(size, dtype=torch.bool, device=self._arena.device)
        launched: list[tuple[Task, Bools, _Launched]] = []
        for task in tasks:
            if task.delay_s:
                time.sleep(task.delay_s)
            computed = live(task.nodes)
            if ahead:
                launched.append((task, computed, self._timed(task, self._launch, task, computed)))
            else:
                yield task, computed, self._timed(task, self._run, task, computed)
        for task, computed, one in launched:
            yield task, computed, self._timed(task, self._outcome, computed, one)

    def _timed(self, task: Task, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        begin = time.thread_time()
        with torch.inference_mode():
            found = work(*args, **kwargs)
        self.times.computing[task.cell] += time.thread_time() - begin
        return found

    def _run(self, task: Task, live: Bools) -> Outcome:
        return self._outcome(live, self._launch(task, live))

    def _launch(self, task: Task, live: Bools) -> _Launched:
        whole = bool(live.all())
        if not whole and not live.any() and not task.padding:
            return _Launched(outcome=Outcome())
        if whole:
            nodes, in_rows, out_rows = task.nodes, task.in_rows, task.out_rows
        else:
            nodes, in_rows, out_rows = task.nodes[live], task.in_rows[live], task.out_rows[live]
        try:
            outputs = self._batch(task.cell, nodes, in_rows, out_rows, task.padding)
        except Exception as error:  # noqa: BLE001 - whatever a user's module raises
            logger.warning("cell %s raised, its %d nodes are computed one by one: %r", self._cells[task.cell].name,
                           len(in_rows), error)  # fmt: skip
            return _Launched(outcome=self._one_by_one(task, live))
        return self._launched(task.cell, nodes, outputs)

    def _launched(self, cell: int, nodes: Ints, outputs: tuple[torch.Tensor, ...]) -> _Launched:
        """Have what a cell says of ends copied to the host, and do not wait for it."""
        outcome, until = Outcome(outputs=outputs), self._cells[cell].until
        if until is None:
            return _Launched(outcome=outcome)
        said = outputs[self._table.out_place[cell][until]][: len(nodes)]
        if self._over is not None:
            self._over[self._arena.index(nodes)] |= said
        if not said.is_cuda:
            return _Launched(outcome=outcome, said=said)
        copy = torch.empty(len(nodes), dtype=torch.bool, pin_memory=True)
        copy.copy_(said, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        return _Launched(outcome=outcome, said=copy, done=done)

    def _outcome(self, live: Bools, launched: _Launched) -> Outcome:
        """Wait for what a task's nodes say, without keeping the interpreter from others."""
        if launched.said is None:
            return launched.outcome
        while launched.done is not None and not launched.done.query():
            time.sleep(_POLL_S)
        ended = np.zeros(len(live), bool)
        ended[live] = launched.said.numpy()
        return replace(launched.outcome, ended=ended)

    def _batch(
        self, cell: int, nodes: Ints, in_rows: Ints, out_rows: Ints, padding: int = 0
    ) -> tuple[torch.Tensor, ...]:
        """Compute a batch, with rows of zeros behind it whose outputs are thrown away, as are those of ended nodes."""
        begin = time.thread_time()
        unwanted = None
        if self._over is not None:
            unwanted = self._over[self._arena.index(nodes)]
            if not np.array_equal(nodes, self._nodes):  # what ended nodes have left was not stored
                self._before = []
            self._nodes = nodes
        inputs = [
            self._input(kind, in_rows[:, place], padding) for place, kind in enumerate(self._table.in_kinds[cell])
        ]
        gathered = time.thread_time()
        outputs = self._compute(self._cells[cell], inputs)
        self._check(cell, outputs, len(in_rows) + padding)
        computed = time.thread_time()
        self._before = [
            (kind, in_rows[:, place], inputs[place])
            for place, kind in enumerate(self._table.in_kinds[cell]) if kind not in self._table.out_kinds[cell]
        ]  # fmt: skip
        for place, kind in enumerate(self._table.out_kinds[cell]):
            rows = out_rows[:, place]
            self._arena.scatter(kind, rows, outputs[place][: len(rows)], unwanted)
            self._before.append((kind, rows, outputs[place]))
        self.times.copying += gathered - begin + time.thread_time() - computed
        return outputs

    def _check(self, cell: int, outputs: tuple[torch.Tensor, ...], rows: int) -> None:
        """Raise CellError before anything is stored if outputs are not what the cell says."""
        wanted = self._outputs[cell]
        if len(outputs) != len(wanted):
            raise CellError(f"returned {len(outputs)} tensors for {len(wanted)} outputs")
        for value, (dtype, shape) in zip(outputs, wanted, strict=True):
            if value.dtype != dtype or value.shape[1:] != shape or value.shape[0] < rows:
                raise CellError(f"returned {value.dtype}{list(value.shape)}, must be {dtype}{[rows, *shape]}")

    def _input(self, kind: int, rows: Ints, padding: int) -> torch.Tensor:
        for other, known, value in self._before:
            if other == kind and len(value) == len(rows) + padding and np.array_equal(known, rows):
                self._arena.traffic.reused += value.nbytes
                return value
        return self._arena.gather(kind, np.pad(rows, (0, padding)) if padding else rows)

    def _one_by_one(self, task: Task, live: Bools) -> Outcome:
        """Find out whose inputs a cell cannot take; only these fail."""
        ended, failed, errors = np.zeros(len(live), bool), np.zeros(len(live), bool), []
        until = self._cells[task.cell].until
        made = [self._arena.zeros(kind, int(live.sum())) for kind in self._table.out_kinds[task.cell]]
        self.begin_series()
        for row, place in enumerate(np.flatnonzero(live).tolist()):
            one, node = slice(place, place + 1), int(task.nodes[place])
            if self._over is not None and bool(self._over[node]):
                continue  # it has ended, whatever comes of it now
            try:
                outputs = self._batch(task.cell, task.nodes[one], task.in_rows[one], task.out_rows[one])
            except Exception as error:  # noqa: BLE001 - whatever a user's module raises
                failed[place] = True
                errors.append(error)
                continue
            for into, value in zip(made, outputs, strict=True):
                into[row] = value[0]
            if until is not None:
                ended[place] = bool(outputs[self._table.out_place[task.cell][until]])
                if self._over is not None:
                    self._over[node] = bool(ended[place])
        self.begin_series()
        return Outcome(ended=None if until is None else ended, failed=failed, errors=tuple(errors), outputs=tuple(made))
