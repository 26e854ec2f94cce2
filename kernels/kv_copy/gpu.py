"""Gather pages of several layers into a buffer of chunks, or scatter them back, in Triton.

A chunk holds a block's pages, layer by layer:

    chunk:  page of layer 0 | page of layer 1 | ...

so that a chunk, or several that follow each other, is one copy over the link, whatever the number of layers. A program
copies 1024 items of one page; items are as wide as all addresses and sizes allow, at most 8 bytes, two to a vector.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.kv_quant.gpu import PagedCaches

_ITEMS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_WIDTH = 1024
"""Items of a program: 64 bytes for each of 128 threads."""


class ChunkLayout:
    """Where each layer's pages lie in a chunk.

    Args:
        caches: Layers' caches, each of shape [num_blocks, page_bytes], of one byte an element.
        chunk_bytes: From one chunk to the next; what layers leave of it is not touched.

    Raises:
        ValueError: The layers' pages take more than a chunk has, or elements are not bytes.
    """

    def __init__(self, caches: PagedCaches, chunk_bytes: int) -> None:
        pages = [tensor.shape[1] for tensor in caches.tensors]
        if caches.tensors[0].element_size() != 1:
            raise ValueError(f"caches: elements must be bytes, not {caches.tensors[0].dtype}")
        if sum(pages) > chunk_bytes:
            raise ValueError(f"chunk_bytes={chunk_bytes}: this worker's blocks take {sum(pages)}")
        self.caches = caches
        together = math.gcd(caches.alignment, chunk_bytes, *pages)
        self._item = max(size for size in _ITEMS if together % size == 0)
        self._vector = together // self._item
        self._chunk_items = chunk_bytes // self._item
        self._parts = triton.cdiv(max(pages) // self._item, _WIDTH)
        self._sizes = self._table(pages)
        self._offsets = self._table([sum(pages[:i]) for i in range(len(pages))])

    def gather(self, which: torch.Tensor, block_ids: torch.Tensor, chunks: torch.Tensor) -> None:
        """Copy blocks of layers into chunks, on the current stream.

        Args:
            which: Layers, shape [layers], int64.
            block_ids: Block of each chunk, shape [n], int64.
            chunks: Buffer, shape [at least n, chunk_bytes], uint8, contiguous; chunk i goes to row i.
        """
        self._copy(which, block_ids, chunks, True)

    def scatter(self, which: torch.Tensor, block_ids: torch.Tensor, chunks: torch.Tensor) -> None:
        """Copy chunks into blocks of layers; arguments as for `gather`."""
        self._copy(which, block_ids, chunks, False)

    def _copy(self, which: torch.Tensor, block_ids: torch.Tensor, chunks: torch.Tensor, gather: bool) -> None:
        if len(block_ids) and len(which):
            _copy_pages[(len(block_ids), self._parts, len(which))](
                self.caches.addresses, which, block_ids, chunks.view(_ITEMS[self._item]), self._sizes, self._offsets,
                self._chunk_items,
                GATHER=gather, WIDTH=_WIDTH, VECTOR=self._vector, ALIGNMENT=self.caches.alignment, num_warps=4,
            )  # fmt: skip

    def _table(self, in_bytes: Sequence[int]) -> torch.Tensor:
        return torch.tensor(in_bytes, dtype=torch.int64, device=self.caches.addresses.device) // self._item


@triton.jit  # type: ignore[untyped-decorator]
def _copy_pages(  # type: ignore[no-untyped-def]
    addresses, layers, block_ids, chunks, sizes, offsets, chunk_items,
    GATHER: tl.constexpr, WIDTH: tl.constexpr, VECTOR: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    block = tl.load(block_ids + row)
    layer = tl.load(layers + tl.program_id(2))
    size = tl.multiple_of(tl.load(sizes + layer), VECTOR)
    offset = tl.multiple_of(tl.load(offsets + layer), VECTOR)
    page = tl.multiple_of(tl.load(addresses + layer).to(chunks.dtype), ALIGNMENT) + block * size
    place = chunks + row.to(tl.int64) * chunk_items + offset
    at = part * WIDTH + tl.arange(0, WIDTH)
    if GATHER:
        tl.store(place + at, tl.load(page + at, mask=at < size), mask=at < size)
    else:
        tl.store(page + at, tl.load(place + at, mask=at < size), mask=at < size)
