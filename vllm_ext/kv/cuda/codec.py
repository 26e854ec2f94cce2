"""What KV looks like in host memory, for KV on a CUDA device: as it is, or in 8 bits, by way of buffers on the device.

    store:  blocks of all layers --one kernel--> buffer --a copy for each run of chunks--> pool
    load:   pool --a copy for each run of chunks--> buffer --one kernel--> blocks of all layers

A buffer holds whole chunks as the pool does, so that what crosses the link is few and large. The four steps only put
work into the current stream, and order nothing: `kv.cuda.transfers` does. Needs no vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.host.codec import check_ids
from vllm_ext.kv.host.geometry import TierGeometry

Ids = npt.NDArray[np.int64]
STAGING_BYTES = 16 * 2**20
"""Most of one buffer, a third of a millisecond on a link of 50 GB/s.

There are two in each direction, so 64 MiB of the device in all. Larger ones would save launches (of 64 MiB three in
four), but take memory from the KV cache for good, and the link stands still while the first is packed and the last
unpacked.
"""


class Piece(NamedTuple):
    """Chunks that go through a buffer together."""

    tensors: tuple[int, ...]
    """Tensors of KV that take part."""
    chunks: Ids
    """Places in the pool, shape [n]."""
    blocks: Ids
    """Block of each chunk, shape [n]."""


def pieces_of(codec: DeviceCodec, tensors: tuple[int, ...], chunks: Ids, blocks: Ids) -> Iterator[Piece]:
    """Cut a job into pieces that fit into a buffer; arguments as of `Piece`."""
    for first in range(0, len(chunks), codec.chunks_per_piece):
        rows = slice(first, first + codec.chunks_per_piece)
        yield Piece(tensors, chunks[rows], blocks[rows])


@dataclass(frozen=True)
class Buffer:
    """On the device, for one piece at a time."""

    rows: torch.Tensor
    """Chunks, shape [chunks_per_piece, chunk_bytes], uint8."""
    block_ids: torch.Tensor
    """Shape [chunks_per_piece], int64."""
    holds: torch.Tensor
    """0 where a chunk must not be read, shape [chunks_per_piece], int32."""


@dataclass(frozen=True)
class StagingSlot:
    """The ids and flags of a `Buffer` on the host, pinned, for a piece from its launch until it is through.

    The device reads and writes them late. Made in advance, since a new piece of pinned memory may hold up all streams.
    """

    block_ids: torch.Tensor
    holds: torch.Tensor


class DeviceCodec(Protocol):
    """What `kv.cuda.transfers` needs of a `StagedCodec`."""

    chunks_per_piece: int
    piece_bytes: int

    def prepare(self, tensors_of_group: Sequence[Sequence[int]]) -> None:
        """Compile, at start, what copies these tensors."""
        ...

    def new_buffer(self) -> Buffer:
        """Return a buffer."""
        ...

    def new_slots(self, count: int) -> list[StagingSlot]:
        """Return staging slots."""
        ...

    def copies(self, piece: Piece) -> int:
        """Return how many copies over the link a piece takes."""
        ...

    def check(self, piece: Piece) -> None:
        """Raise ValueError if a block or a chunk does not exist: a kernel would write elsewhere."""
        ...

    def fill_in(self, slot: StagingSlot, piece: Piece) -> None:
        """Write a staging slot, on the host."""
        ...

    def pack(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:
        """First step of a store."""
        ...

    def send(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:
        """Second step of a store."""
        ...

    def fetch(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:
        """First step of a load."""
        ...

    def unpack(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:
        """Second step of a load."""
        ...

    def readable(self, piece: Piece, slot: StagingSlot) -> npt.NDArray[np.bool_]:
        """Return which chunks of a store that is through can be read."""
        ...


class StagedCodec:
    """What both kinds share: buffers, ids and the copies over the link.

    Args:
        tensors: KV, each of shape [num_blocks, page_bytes], int8, contiguous.
        pool: Host memory, shape [num_chunks, chunk_bytes], uint8, pinned, or copies are slow. Chunks may lie apart, as
            in memory that several workers share; only where they do not, those that follow each other are one copy.
        geometry: Of a chunk.
        staging_bytes: Of a buffer; at least one chunk is held.

    Attributes:
        chunks_per_piece: Chunks that a buffer holds.
        piece_bytes: Of a buffer full of chunks.

    Raises:
        ValueError: The pool is not of chunks, or a tensor's pages do not lie together.
    """

    _may_refuse = True
    """Whether ``holds`` says anything."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], pool: torch.Tensor, geometry: TierGeometry,
        *, staging_bytes: int = STAGING_BYTES,
    ) -> None:  # fmt: skip
        if pool.dim() != 2 or pool.shape[1] != geometry.chunk_bytes or pool.stride(1) != 1:
            allowed = f"must be [chunks, {geometry.chunk_bytes}], each without gaps"
            raise ValueError(f"pool: {allowed}, not {tuple(pool.shape)} with strides {pool.stride()}")
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"tensors: pages of shape {tuple(tensor.shape)} lie {tensor.stride(0)} bytes apart")
        self._tensors = list(tensors)
        self._device = tensors[0].device
        self._geometry = geometry
        self._pool = pool
        self.chunks_per_piece = max(1, staging_bytes // geometry.chunk_bytes)
        self.piece_bytes = self.chunks_per_piece * geometry.chunk_bytes
        self._num_blocks = min(map(len, tensors))
        self._which: dict[tuple[int, ...], torch.Tensor] = {}

    def prepare(self, tensors_of_group: Sequence[Sequence[int]]) -> None:
        """Compile what copies, which takes seconds, at start and not while the first request waits for its KV."""
        buffer, (slot,) = self.new_buffer(), self.new_slots(1)
        for tensors in {tuple(group) for group in tensors_of_group if group}:
            self._which[tensors] = torch.tensor(tensors, dtype=torch.int64, device=self._device)
            piece = Piece(tensors, np.zeros(1, np.int64), np.zeros(1, np.int64))
            self.fill_in(slot, piece)
            self.pack(piece, buffer, slot)
            self.unpack(piece, buffer, slot)

    def new_buffer(self) -> Buffer:
        """Return a buffer."""
        rows, device = self.chunks_per_piece, self._device
        return Buffer(
            torch.empty((rows, self._geometry.chunk_bytes), dtype=torch.uint8, device=device),
            torch.empty(rows, dtype=torch.int64, device=device),
            torch.empty(rows, dtype=torch.int32, device=device),
        )

    def new_slots(self, count: int) -> list[StagingSlot]:
        """Return staging slots, all of which lie together."""
        rows, pins = (count, self.chunks_per_piece), self._device.type == "cuda"
        block_ids = torch.empty(rows, dtype=torch.int64, pin_memory=pins)
        holds = torch.empty(rows, dtype=torch.int32, pin_memory=pins)
        return [StagingSlot(ids, flags) for ids, flags in zip(block_ids, holds, strict=True)]

    def check(self, piece: Piece) -> None:
        """Look at the ids of a piece.

        Raises:
            ValueError: A block or a chunk does not exist.
        """
        check_ids(piece.blocks, self._num_blocks, piece.chunks, len(self._pool))

    def copies(self, piece: Piece) -> int:
        """Return how many copies over the link a piece takes: one for each run of chunks."""
        return len(self._starts(piece.chunks))

    def fill_in(self, slot: StagingSlot, piece: Piece) -> None:
        """Write a staging slot, on the host."""
        slot.block_ids[: len(piece.blocks)] = torch.from_numpy(piece.blocks)

    def pack(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:
        """Bring blocks into a buffer."""
        self._pack(buffer, self._which[piece.tensors], self._block_ids(piece, buffer, slot))

    def send(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:
        """Copy a buffer into the pool, and with it what `readable` looks at."""
        for row, chunk, count in self._runs(piece.chunks):
            self._pool[chunk : chunk + count].copy_(buffer.rows[row : row + count], non_blocking=True)
        if self._may_refuse:
            count = len(piece.chunks)
            slot.holds[:count].copy_(buffer.holds[:count], non_blocking=True)

    def fetch(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:  # noqa: ARG002 - what each step is given
        """Copy chunks of the pool into a buffer."""
        for row, chunk, count in self._runs(piece.chunks):
            buffer.rows[row : row + count].copy_(self._pool[chunk : chunk + count], non_blocking=True)

    def unpack(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:
        """Bring a buffer into blocks."""
        self._unpack(buffer, self._which[piece.tensors], self._block_ids(piece, buffer, slot))

    def readable(self, piece: Piece, slot: StagingSlot) -> npt.NDArray[np.bool_]:
        """Return which chunks of a store that is through can be read, shape [n]."""
        if not self._may_refuse:
            return np.ones(len(piece.chunks), np.bool_)
        holds: npt.NDArray[np.bool_] = slot.holds[: len(piece.chunks)].numpy() != 0
        return holds

    def _block_ids(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> torch.Tensor:
        count = len(piece.chunks)
        return buffer.block_ids[:count].copy_(slot.block_ids[:count], non_blocking=True)

    def _runs(self, chunks: Ids) -> Iterator[tuple[int, int, int]]:
        """Yield what is one copy: the first chunk's place in the piece, the chunk, and how many follow each other."""
        starts = self._starts(chunks).tolist()
        for start, end in zip(starts, [*starts[1:], len(chunks)], strict=True):
            yield start, int(chunks[start]), end - start

    def _starts(self, chunks: Ids) -> Ids:
        """Return the places in a piece at which a copy starts."""
        if not self._pool.is_contiguous():
            return np.arange(len(chunks))
        return np.flatnonzero(np.diff(chunks, prepend=-2) != 1)

    def _pack(self, buffer: Buffer, which: torch.Tensor, block_ids: torch.Tensor) -> None:
        raise NotImplementedError

    def _unpack(self, buffer: Buffer, which: torch.Tensor, block_ids: torch.Tensor) -> None:
        raise NotImplementedError


class RawCudaCodec(StagedCodec):
    """Bytes as they are; arguments as for `StagedCodec`.

    Raises:
        ValueError: The tensors' pages take more than a chunk has; or see `StagedCodec`.
    """

    _may_refuse = False

    def __init__(
        self, tensors: Sequence[torch.Tensor], pool: torch.Tensor, geometry: TierGeometry,
        *, staging_bytes: int = STAGING_BYTES,
    ) -> None:  # fmt: skip
        from vllm_ext.kernels.kv_copy.gpu import ChunkLayout
        from vllm_ext.kernels.kv_quant.gpu import PagedCaches

        super().__init__(tensors, pool, geometry, staging_bytes=staging_bytes)
        self._layout = ChunkLayout(PagedCaches(tensors), geometry.chunk_bytes)

    def _pack(self, buffer: Buffer, which: torch.Tensor, block_ids: torch.Tensor) -> None:
        self._layout.gather(which, block_ids, buffer.rows)

    def _unpack(self, buffer: Buffer, which: torch.Tensor, block_ids: torch.Tensor) -> None:
        self._layout.scatter(which, block_ids, buffer.rows)


class QuantisedCudaCodec(StagedCodec):
    """8 bits: see `vllm_ext.kernels.kv_quant.format`.

    Args:
        tensors: See `StagedCodec`.
        pool: See `StagedCodec`.
        geometry: Of a chunk.
        layout: Of a page, the same for all tensors.
        staging_bytes: See `StagedCodec`.

    Raises:
        ValueError: Records of this layout are not of the size that the scheduler's side counts with, or pages not of
            the layout's; or see `StagedCodec`.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], pool: torch.Tensor, geometry: TierGeometry, layout: PageLayout,
        *, staging_bytes: int = STAGING_BYTES,
    ) -> None:  # fmt: skip
        from vllm_ext.kernels.kv_quant import gpu

        super().__init__(tensors, pool, geometry, staging_bytes=staging_bytes)
        self._gpu = gpu
        self._format = RecordFormat(layout)
        if self._format.record_bytes != geometry.record_bytes:
            raise ValueError(f"record_bytes={self._format.record_bytes}: must be {geometry.record_bytes}")
        sizes = {tensor.shape[1] for tensor in tensors}
        if sizes != {layout.page_bytes}:
            raise ValueError(f"tensors: pages of {sorted(sizes)} bytes, and their layout has {layout.page_bytes}")
        self._caches = gpu.PagedCaches([tensor.view(layout.dtype) for tensor in tensors])
        records_per_chunk = geometry.chunk_bytes // geometry.record_bytes
        self._slots = torch.arange(self.chunks_per_piece, device=self._device) * records_per_chunk

    def _pack(self, buffer: Buffer, which: torch.Tensor, block_ids: torch.Tensor) -> None:
        count = len(block_ids)
        holds, records = buffer.holds[:count].fill_(1), self._records(buffer)
        self._gpu.quantise_layers(
            self._caches, which, block_ids, records, self._slots[:count], holds, self._format
        )  # fmt: skip

    def _unpack(self, buffer: Buffer, which: torch.Tensor, block_ids: torch.Tensor) -> None:
        slots = self._slots[: len(block_ids)]
        self._gpu.dequantise_layers(self._records(buffer), slots, self._caches, which, block_ids, self._format)

    def _records(self, buffer: Buffer) -> torch.Tensor:
        return buffer.rows.view(-1, self._geometry.record_bytes)
