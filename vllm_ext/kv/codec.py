"""What KV looks like in host memory: as it is, or in 8 bits. On the CPU, without holding the GIL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numba
import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels.kv_quant import cpu
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.geometry import TierGeometry

Ids = npt.NDArray[np.int64]


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
        sizes = [geometry.blocks_per_chunk * pages.shape[1] for pages in self._pages]
        if sum(sizes) > geometry.chunk_bytes:
            raise ValueError(f"chunk_bytes={geometry.chunk_bytes}: this worker's blocks take {sum(sizes)}")
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        compile_now(self, geometry.blocks_per_chunk)

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> npt.NDArray[np.bool_]:
        """Copy blocks into chunks."""
        _copy(self._pages[tensor], blocks, self._pool, self._starts(tensor, chunks), True)
        return np.ones(len(chunks), np.bool_)

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        """Copy chunks into blocks."""
        _copy(self._pages[tensor], blocks, self._pool, self._starts(tensor, chunks), False)

    def _starts(self, tensor: int, chunks: Ids) -> Ids:
        return chunks * self._chunk_bytes + self._offsets[tensor]


class QuantisedCodec:
    """8 bits: see `vllm_ext.kernels.kv_quant.format`.

    Args:
        tensors: KV, each of shape [num_blocks, page_bytes], int8.
        pool: Host memory, shape [num_chunks * chunk_bytes], uint8.
        geometry: Of a chunk.
        layout: Of a page, the same for all tensors.

    Raises:
        ValueError: records of this layout are not of the size that the scheduler's side counts with.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], pool: torch.Tensor, geometry: TierGeometry, layout: PageLayout
    ) -> None:
        self._format = RecordFormat(layout, geometry.blocks_per_chunk)
        if self._format.record_bytes != geometry.record_bytes:
            raise ValueError(f"record_bytes={self._format.record_bytes}: must be {geometry.record_bytes}")
        self._pages = [tensor.view(layout.dtype) for tensor in tensors]
        self._records = pool.view(-1, geometry.record_bytes)
        self._records_per_chunk = geometry.chunk_bytes // geometry.record_bytes
        compile_now(self, geometry.blocks_per_chunk)

    def store(self, tensor: int, blocks: Ids, chunks: Ids) -> npt.NDArray[np.bool_]:
        """Quantise blocks into chunks."""
        slots = chunks * self._records_per_chunk + tensor
        return cpu.quantise(self._pages[tensor], blocks, self._records, slots, self._format)

    def load(self, tensor: int, chunks: Ids, blocks: Ids) -> None:
        """Dequantise chunks into blocks."""
        slots = chunks * self._records_per_chunk + tensor
        cpu.dequantise(self._records, slots, self._pages[tensor], blocks, self._format)


def compile_now(codec: Codec, blocks_per_chunk: int) -> None:
    """Compile what copies, which takes seconds, at start and not while the first request waits for its KV."""
    no_blocks, no_chunks = np.empty((0, blocks_per_chunk), np.int64), np.empty(0, np.int64)
    codec.store(0, no_blocks, no_chunks)
    codec.load(0, no_chunks, no_blocks)


@numba.njit(nogil=True)
def _copy(pages: Any, blocks: Any, pool: Any, starts: Any, to_pool: Any) -> None:
    """Copy blocks to where their chunks start in the pool, or back."""
    size = pages.shape[1]
    for chunk in range(len(starts)):
        for place in range(blocks.shape[1]):
            block = blocks[chunk, place]
            if block >= 0:
                at = starts[chunk] + place * size
                page, part = pages[block], pool[at : at + size]
                if to_pool:
                    part[:] = page
                else:
                    page[:] = part
