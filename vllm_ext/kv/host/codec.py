"""What KV looks like in host memory: as it is, or in 8 bits. On the CPU, without holding the GIL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels.kv_quant import cpu
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.host.geometry import TierGeometry
from vllm_ext.kv.host.layout import PackedPages

Ids = npt.NDArray[np.int64]

_PAGES_AT_A_TIME = 8
"""Packed pages that are put in order together: the ordered copies should stay in the cache."""


def check_ids(blocks: Ids, num_blocks: int, chunks: Ids, num_chunks: int) -> None:
    """Look at the numbers of a copy, both of shape [n], before anything is written: else it would write elsewhere.

    Raises:
        ValueError: there is no such block or chunk, or there are more of one than of the other.
    """
    if blocks.shape != chunks.shape:
        raise ValueError(f"blocks: must be one for each of {len(chunks)} chunks, not of shape {blocks.shape}")
    for name, ids, end in (("blocks", blocks, num_blocks), ("chunks", chunks, num_chunks)):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < end:
            raise ValueError(f"{name}: {ids.min()} to {ids.max()}, must be 0 to {end - 1}")


class Codec(Protocol):
    """Moves the blocks of one tensor of KV into chunks of the pool, and back."""

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> npt.NDArray[np.bool_]:
        """Write chunks.

        Args:
            tensor: Which tensor of KV.
            blocks: Block of each chunk, shape [n].
            chunks: Places in the pool, shape [n].

        Returns:
            Which chunks can be read again, shape [n]: one with a value that is not finite can't be kept in 8 bits.

        Raises:
            ValueError: a block or a chunk does not exist; nothing is written.
        """
        ...

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        """Write the blocks of chunks; arguments as for `store`."""
        ...


class RawCodec:
    """Bytes as they are.

    Args:
        tensors: KV, each of shape [num_blocks, page_bytes], int8.
        pool: Host memory, uint8, one-dimensional.
        geometry: Of a chunk.
        row_bytes: From a chunk to the next in the pool; by default they follow each other.

    Raises:
        ValueError: the tensors' pages take more than a chunk has.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], pool: torch.Tensor, geometry: TierGeometry, *, row_bytes: int = 0
    ) -> None:
        self._pages = [tensor.numpy().view(np.uint8) for tensor in tensors]
        ends = np.cumsum([pages.shape[1] for pages in self._pages])
        if ends[-1] > geometry.chunk_bytes:
            raise ValueError(f"chunk_bytes={geometry.chunk_bytes}: this worker's blocks take {ends[-1]}")
        self._pool = pool.numpy()
        self._row_bytes = row_bytes or geometry.chunk_bytes
        self._num_chunks = -(-len(self._pool) // self._row_bytes)  # where workers share rows, the last is cut off
        self._offsets = [0, *ends.tolist()]

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> npt.NDArray[np.bool_]:
        """Copy blocks into chunks."""
        for page, place in self._pairs(tensor, blocks, chunks):
            place[:] = page  # numpy copies without the GIL
        return np.ones(len(chunks), np.bool_)

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        """Copy chunks into blocks."""
        for page, place in self._pairs(tensor, blocks, chunks):
            page[:] = place

    def _pairs(self, tensor: int, blocks: Ids, chunks: Ids) -> Iterator[tuple[npt.NDArray[np.uint8], ...]]:
        """Yield each block's page and its place in the pool."""
        pages = self._pages[tensor]
        check_ids(blocks, len(pages), chunks, self._num_chunks)
        starts = chunks * self._row_bytes + self._offsets[tensor]
        for block, start in zip(blocks.tolist(), starts.tolist(), strict=True):
            yield pages[block], self._pool[start : start + pages.shape[1]]


class QuantisedCodec:
    """8 bits: see `vllm_ext.kernels.kv_quant.format`.

    Args:
        tensors, pool, geometry, row_bytes: As of `RawCodec`.
        layout: Of a page, the same for all tensors. Values of packed pages are put in order first, and back.

    Raises:
        ValueError: records of this layout are not of the size that the scheduler's side counts with.
        CompilerMissing: there is no g++, which compiles the codec.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], pool: torch.Tensor, geometry: TierGeometry,
        layout: PageLayout | PackedPages, *, row_bytes: int = 0,
    ) -> None:  # fmt: skip
        packing = _Packing(layout) if isinstance(layout, PackedPages) else None
        rows: PageLayout = layout.rows if isinstance(layout, PackedPages) else layout
        record = RecordFormat(rows)
        if record.record_bytes != geometry.record_bytes:
            raise ValueError(f"record_bytes={record.record_bytes}: must be {geometry.record_bytes}")
        self._quantise = packing.quantise if packing else partial(cpu.quantise, fmt=record)
        self._dequantise = packing.dequantise if packing else partial(cpu.dequantise, fmt=record)
        self._pages = [tensor.view(rows.dtype) for tensor in tensors]
        self._records = pool.view(-1, geometry.record_bytes)
        self._records_per_row = (row_bytes or geometry.chunk_bytes) // geometry.record_bytes
        cpu.load()  # compiled at start, and not while the first request waits for its KV

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> npt.NDArray[np.bool_]:
        """Quantise blocks into chunks."""
        slots = self._slots(tensor, blocks, chunks)
        kept: npt.NDArray[np.bool_] = self._quantise(self._pages[tensor], blocks, self._records, slots)
        return kept

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        """Dequantise chunks into blocks."""
        self._dequantise(self._records, self._slots(tensor, blocks, chunks), self._pages[tensor], blocks)

    def _slots(self, tensor: int, blocks: Ids, chunks: Ids) -> Ids:
        """Return the record of each chunk."""
        check_ids(blocks, len(self._pages[tensor]), chunks, -(-len(self._records) // self._records_per_row))
        return chunks * self._records_per_row + tensor


class _Packing:
    """Ordered copies of a few packed pages, between these and records."""

    def __init__(self, layout: PackedPages) -> None:
        self._order = layout.order.astype(np.int32)
        self._pages = torch.empty((_PAGES_AT_A_TIME, layout.rows.page_elements), dtype=layout.rows.dtype)
        self._format = RecordFormat(layout.rows)

    def quantise(self, pages: torch.Tensor, blocks: Ids, records: torch.Tensor, slots: Ids) -> npt.NDArray[np.bool_]:
        """As `cpu.quantise`."""
        holds = np.ones(len(blocks), np.bool_)
        for part, places in self._parts(blocks):
            cpu.take(pages, blocks[part], self._order, self._pages)
            holds[part] = cpu.quantise(self._pages, places, records, slots[part], self._format)
        return holds

    def dequantise(self, records: torch.Tensor, slots: Ids, pages: torch.Tensor, blocks: Ids) -> None:
        """As `cpu.dequantise`."""
        for part, places in self._parts(blocks):
            cpu.dequantise(records, slots[part], self._pages, places, self._format)
            cpu.put(self._pages, pages, blocks[part], self._order)

    @staticmethod
    def _parts(blocks: Ids) -> Iterator[tuple[slice, Ids]]:
        """Yield as many blocks as there are ordered pages, and which of these are theirs."""
        for first in range(0, len(blocks), _PAGES_AT_A_TIME):
            part = slice(first, first + _PAGES_AT_A_TIME)
            yield part, np.arange(len(blocks[part]))
