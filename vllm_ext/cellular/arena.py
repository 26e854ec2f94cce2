"""Where values between cells are stored: rows of one tensor per kind, gathered into batches and scattered from them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vllm_ext.cellular.cells import Kind
from vllm_ext.cellular.graphs import Ints
from vllm_ext.cellular.layout import CompiledGraph, Region
from vllm_ext.cellular.tables import Ranges

_FIRST_ROWS, _FIRST_BYTES = 1024, 16 << 20
"""What a kind has from the beginning: so many rows, or as many as these bytes hold."""
SPARE = 1
"""A row that nobody reads: where values go that nobody wants."""


class ArenaFull(RuntimeError):
    """There is no room for a graph's rows; the message says how much there is."""


@dataclass
class Traffic:
    """Bytes that were copied beside computing, running totals."""

    gathered: int = 0
    reused: int = 0
    """Not gathered, as a batch had the same rows as the one before."""
    scattered: int = 0


class Arena:
    """Storage on one device; `gather` and `scatter` may be called from any thread, the rest from one at a time.

    Row 0 is zeros and never written, row 1 is `SPARE`.

    Args:
        kinds: Of values.
        device: Of the tensors.
        max_bytes: How large all of them may get.
    """

    def __init__(self, kinds: Sequence[Kind], device: str = "cpu", max_bytes: int = 4 << 30) -> None:
        self._kinds, self.device, self._max_bytes = tuple(kinds), device, max_bytes
        self._ranges = [Ranges(SPARE + 1) for _ in kinds]
        sizes: list[int] = [torch.zeros(k.shape, dtype=getattr(torch, k.dtype)).nbytes for k in kinds]
        self._first = [max(SPARE + 1, min(_FIRST_ROWS, _FIRST_BYTES // max(size, 1))) for size in sizes]
        self._rows = [
            torch.zeros((count, *kind.shape), dtype=getattr(torch, kind.dtype), device=device)
            for count, kind in zip(self._first, kinds, strict=True)
        ]
        self._lock = threading.Lock()
        self.traffic = Traffic()

    @property
    def bytes(self) -> int:
        """Size of all tensors."""
        return sum(rows.nbytes for rows in self._rows)

    @property
    def share_taken(self) -> float:
        """Rows in use, of all that a kind may have beside what others use; of the kind where that is most."""
        return max(ranges.taken / max(self._most(kind) - SPARE - 1, 1) for kind, ranges in enumerate(self._ranges))

    def fits(self, regions: Sequence[Region]) -> bool:
        """Whether there would be room if nothing else were stored."""
        rows = [SPARE + 1] * len(self._kinds)
        for kind, count in regions:
            rows[kind] += count
        rows = [max(count, first) for count, first in zip(rows, self._first, strict=True)]
        needed = sum(count * values[0].nbytes for count, values in zip(rows, self._rows, strict=True))
        return rows == self._first or needed <= self._max_bytes

    def take(self, regions: Sequence[Region]) -> Ints:
        """Reserve rows and return the first of each kind.

        Tensors grow, and shrink to what is used of them where another kind needs the room.

        Raises:
            ArenaFull: the tensors would grow beyond their limit; nothing is reserved.
        """
        bases = np.zeros(len(self._kinds), np.int64)
        for place, (kind, rows) in enumerate(regions):
            try:
                if not self._room(kind, self._ranges[kind].end_with(rows)):
                    raise ArenaFull(f"{rows} rows of {self._kinds[kind]}: values of all requests take {self.bytes} of "
                                    f"{self._max_bytes} bytes")  # fmt: skip
            except Exception:  # full, or the device has less memory than it was to use
                self.give(regions[:place], bases)
                raise
            bases[kind] = self._ranges[kind].take(rows)
        return bases

    def give(self, regions: Sequence[Region], bases: Ints) -> None:
        """Take rows back."""
        for kind, rows in regions:
            self._ranges[kind].give(int(bases[kind]), rows)

    def write(self, graphs: Sequence[CompiledGraph], bases: Ints) -> None:
        """Store what requests brought.

        Raises:
            ValueError: a graph's values are not those that it has rows for; nothing is written.
        """
        for graph in graphs:
            self._check(graph)
        for kind, _ in enumerate(self._kinds):
            parts = [
                (b[kind] + row - 1, v)
                for g, b in zip(graphs, bases, strict=True)
                for k, row, v in g.inputs
                if k == kind
            ]
            if parts:
                rows = np.concatenate([np.arange(first, first + len(value)) for first, value in parts])
                self.scatter(kind, rows, torch.from_numpy(np.concatenate([value for _, value in parts])))

    def _check(self, graph: CompiledGraph) -> None:
        rows = dict(graph.regions)
        for kind, row, values in graph.inputs:
            of, last = self._kinds[kind], row + len(values) - 1
            if Kind(values.dtype.name, values.shape[1:]) != of or last > rows.get(kind, 0):
                raise ValueError(f"data: {values.dtype}{list(values.shape)} from row {row} on, must be rows of {of} up "
                                 f"to row {rows.get(kind, 0)}")  # fmt: skip

    def clear(self, kind: int, row: int) -> None:
        """Set a row to zeros."""
        self._rows[kind][row].zero_()

    def zeros(self, kind: int, count: int) -> torch.Tensor:
        """Return a batch of zeros of a kind, which is not stored."""
        return self._rows[kind].new_zeros((count, *self._kinds[kind].shape))

    def gather(self, kind: int, rows: Ints) -> torch.Tensor:
        """Return a batch of rows, a copy."""
        index = self.index(rows)
        with self._lock:
            found = self._rows[kind].index_select(0, index)
        self.traffic.gathered += found.nbytes
        return found

    def scatter(self, kind: int, rows: Ints, values: torch.Tensor, unwanted: torch.Tensor | None = None) -> None:
        """Store a batch of rows, but for those that are unwanted."""
        index, values = self.index(rows), values.to(self.device)
        if unwanted is not None:
            index = index.masked_fill(unwanted, SPARE)
        with self._lock:  # the tensor is not replaced meanwhile by a larger one
            self._rows[kind].index_copy_(0, index, values)
        self.traffic.scattered += values.nbytes

    def index(self, rows: Ints) -> torch.Tensor:
        """Return numbers on the device."""
        index = torch.from_numpy(np.ascontiguousarray(rows))
        return index if self.device == "cpu" else index.to(self.device, non_blocking=True)

    def _most(self, kind: int) -> int:
        """Return how many rows a kind may have at most, that of zeros included, beside what others use."""
        others = sum(self._used(other) * rows[0].nbytes for other, rows in enumerate(self._rows) if other != kind)
        return max(int((self._max_bytes - others) // max(self._rows[kind][0].nbytes, 1)), self._used(kind))

    def _used(self, kind: int) -> int:
        return max(self._ranges[kind].end, self._first[kind])

    def _room(self, kind: int, needed: int) -> bool:
        """Make room for so many rows; False if that would be too much."""
        old = self._rows[kind]
        if needed <= len(old):
            return True
        if needed > self._most(kind):
            return False
        row, more = old[0].nbytes, needed - len(old)
        if more * row > self._max_bytes - self.bytes:
            for other in range(len(self._kinds)):
                if other != kind:
                    self._resize(other, self._used(other))
        spare = (self._max_bytes - self.bytes) // row - more
        self._resize(kind, min(max(2 * len(old), needed), needed + spare // 2))  # others may grow, too
        return True

    def _resize(self, kind: int, count: int) -> None:
        """Replace a tensor by one of so many rows."""
        old = self._rows[kind]
        if count == len(old):
            return
        new = torch.zeros((count, *old.shape[1:]), dtype=old.dtype, device=self.device)
        kept = min(count, len(old))
        with self._lock:
            new[:kept] = old[:kept]
            self._rows[kind] = new
