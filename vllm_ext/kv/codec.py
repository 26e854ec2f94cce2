"""What KV looks like in host memory: as it is, or in 8 bits. On the CPU, without holding the GIL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeGuard

import numba
import numpy as np
import numpy.typing as npt
import torch
from numba.core import cgutils
from numba.extending import intrinsic

from vllm_ext.kernels.kv_quant import cpu
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.geometry import TierGeometry
from vllm_ext.kv.layout import PackedPages
from vllm_ext.kv.transfer_plan import check_ids

Ids = npt.NDArray[np.int64]

_CHUNKS_AT_A_TIME = 4
"""Of packed pages: their ordered copies should stay in the cache."""


class Codec(Protocol):
    """Moves the blocks of one tensor of KV into chunks of the pool, and back."""

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> npt.NDArray[np.bool_]:
        """Write chunks.

        Args:
            tensor: Which tensor of KV.
            blocks: Blocks of each chunk, shape [n, blocks_per_chunk]; -1 where a chunk lacks one.
            chunks: Places in the pool, shape [n].

        Returns:
            Which chunks can be read again, shape [n]: one with a value that is not finite can't be kept in 8 bits.

        Raises:
            ValueError: a block or a chunk does not exist; nothing is written.
        """
        ...

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        """Write the blocks of chunks; arguments as for `store`, with -1 where a block is not wanted."""
        ...


class RawCodec:
    """Bytes as they are.

    Args:
        tensors: KV, each of shape [num_blocks, page_bytes], int8.
        pool: Host memory, shape [num_chunks * chunk_bytes], uint8.
        geometry: Of a chunk.

    Raises:
        ValueError: the tensors' pages take more than a chunk has.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], pool: torch.Tensor, geometry: TierGeometry) -> None:
        self._pages = [tensor.numpy().view(np.uint8) for tensor in tensors]
        self._pool = pool.numpy()
        self._chunk_bytes = geometry.chunk_bytes
        self._num_chunks = -(-len(self._pool) // geometry.chunk_bytes)  # where workers share rows, the last is cut off
        sizes = [geometry.blocks_per_chunk * pages.shape[1] for pages in self._pages]
        if sum(sizes) > geometry.chunk_bytes:
            raise ValueError(f"chunk_bytes={geometry.chunk_bytes}: this worker's blocks take {sum(sizes)}")
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        compile_now(self, geometry.blocks_per_chunk)

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> npt.NDArray[np.bool_]:
        """Copy blocks into chunks."""
        check_ids(blocks, len(self._pages[tensor]), chunks, self._num_chunks)
        _copy(self._pages[tensor], blocks, self._pool, self._starts(tensor, chunks), True)
        return np.ones(len(chunks), np.bool_)

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        """Copy chunks into blocks."""
        check_ids(blocks, len(self._pages[tensor]), chunks, self._num_chunks)
        _copy(self._pages[tensor], blocks, self._pool, self._starts(tensor, chunks), False)

    def _starts(self, tensor: int, chunks: Ids) -> Ids:
        starts: Ids = chunks * self._chunk_bytes + self._offsets[tensor]
        return starts


class QuantisedCodec:
    """8 bits: see `vllm_ext.kernels.kv_quant.format`.

    Args:
        tensors: KV, each of shape [num_blocks, page_bytes], int8.
        pool: Host memory, shape [num_chunks * chunk_bytes], uint8.
        geometry: Of a chunk.
        layout: Of a page, the same for all tensors. Values of packed pages are put in order first, and back.

    Raises:
        ValueError: records of this layout are not of the size that the scheduler's side counts with.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        pool: torch.Tensor,
        geometry: TierGeometry,
        layout: PageLayout | PackedPages,
    ) -> None:
        self._packing = _Packing(tensors, layout, geometry.blocks_per_chunk) if is_packed(layout) else None
        rows: PageLayout = layout.rows if is_packed(layout) else layout
        self._format = RecordFormat(rows, geometry.blocks_per_chunk)
        if self._format.record_bytes != geometry.record_bytes:
            raise ValueError(f"record_bytes={self._format.record_bytes}: must be {geometry.record_bytes}")
        self._pages = [tensor.view(rows.dtype) for tensor in tensors]
        self._records = pool.view(-1, geometry.record_bytes)
        self._records_per_chunk = geometry.chunk_bytes // geometry.record_bytes
        self._num_chunks = -(-len(self._records) // self._records_per_chunk)
        compile_now(self, geometry.blocks_per_chunk)

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> npt.NDArray[np.bool_]:
        """Quantise blocks into chunks."""
        check_ids(blocks, len(self._pages[tensor]), chunks, self._num_chunks)
        slots = chunks * self._records_per_chunk + tensor
        kept: npt.NDArray[np.bool_]
        if self._packing is None:
            kept = cpu.quantise(self._pages[tensor], blocks, self._records, slots, self._format)
            return kept
        kept = np.ones(len(chunks), np.bool_)
        for part, pages, places in self._packing.pieces(blocks):
            self._packing.take(tensor, blocks[part])
            kept[part] = cpu.quantise(pages, places, self._records, slots[part], self._format)
        return kept

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        """Dequantise chunks into blocks."""
        check_ids(blocks, len(self._pages[tensor]), chunks, self._num_chunks)
        slots = chunks * self._records_per_chunk + tensor
        if self._packing is None:
            cpu.dequantise(self._records, slots, self._pages[tensor], blocks, self._format)
            return
        for part, pages, places in self._packing.pieces(blocks):
            cpu.dequantise(self._records, slots[part], pages, places, self._format)
            self._packing.put(tensor, blocks[part])


class _Packing:
    """Puts the values of packed pages in order, a few chunks at a time."""

    def __init__(self, tensors: Sequence[torch.Tensor], layout: PackedPages, blocks_per_chunk: int) -> None:
        kind = torch.int16 if layout.rows.dtype.itemsize == 2 else torch.int32
        self._real = [tensor.view(kind).numpy() for tensor in tensors]
        self._order = layout.order
        self._ordered = torch.empty((_CHUNKS_AT_A_TIME * blocks_per_chunk, layout.rows.page_elements), dtype=kind)
        self._pages = self._ordered.view(layout.rows.dtype)
        nothing = np.empty(0, np.int64)
        _reorder(self._real[0], nothing, self._ordered.numpy(), self._order, True)

    def pieces(self, blocks: Ids) -> Iterator[tuple[slice, torch.Tensor, Ids]]:
        """Yield parts of so many chunks, with ordered pages and where each block's is among them."""
        for first in range(0, len(blocks), _CHUNKS_AT_A_TIME):
            part = slice(first, first + _CHUNKS_AT_A_TIME)
            wanted = blocks[part]
            places = np.arange(wanted.size, dtype=np.int64).reshape(wanted.shape)
            yield part, self._pages, np.where(wanted >= 0, places, -1)

    def take(self, tensor: int, blocks: Ids) -> None:
        """Fill ordered pages from blocks."""
        _reorder(self._real[tensor], blocks.ravel(), self._ordered.numpy(), self._order, True)

    def put(self, tensor: int, blocks: Ids) -> None:
        """Fill blocks from ordered pages."""
        _reorder(self._real[tensor], blocks.ravel(), self._ordered.numpy(), self._order, False)


def is_packed(layout: PageLayout | PackedPages) -> TypeGuard[PackedPages]:
    """Whether values have to be put in order."""
    return isinstance(layout, PackedPages)


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _reorder(real: Any, blocks: Any, ordered: Any, order: Any, take: Any) -> None:
    for place in range(len(blocks)):
        block = blocks[place]
        if block >= 0:
            page, row = real[block], ordered[place]
            if take:
                for element in range(len(order)):
                    row[element] = page[order[element]]
            else:
                for element in range(len(order)):
                    page[order[element]] = row[element]


def compile_now(codec: Codec, blocks_per_chunk: int) -> None:
    """Compile what copies, which takes seconds, at start and not while the first request waits for its KV."""
    no_blocks, no_chunks = np.empty((0, blocks_per_chunk), np.int64), np.empty(0, np.int64)
    codec.store(0, no_blocks, no_chunks)
    codec.load(0, no_chunks, no_blocks)


@intrinsic  # type: ignore[untyped-decorator]
def _copy_bytes(_context: Any, target: Any, _target_at: Any, source: Any, _source_at: Any, _count: Any) -> Any:
    """The C library's copy, which is several times faster than the loop that an assignment of slices becomes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, start = (
            builder.gep(context.make_array(signature.args[i])(context, builder, args[i]).data, [args[i + 1]])
            for i in (0, 2)
        )
        cgutils.raw_memcpy(builder, to, start, args[4], 1)
        return context.get_dummy_value()

    return numba.void(target, numba.intp, source, numba.intp, numba.intp), generate


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _copy(pages: Any, blocks: Any, pool: Any, starts: Any, to_pool: Any) -> None:
    """Copy blocks to where their chunks start in the pool, or back."""
    size, step = pages.shape[1], pages.strides[0]
    for chunk in range(len(starts)):
        for place in range(blocks.shape[1]):
            block = blocks[chunk, place]
            if block >= 0:
                at = starts[chunk] + place * size
                if to_pool:
                    _copy_bytes(pool, at, pages, block * step, size)
                else:
                    _copy_bytes(pages, block * step, pool, at, size)
