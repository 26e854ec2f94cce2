"""Which block goes into which place of which chunk: vLLM's two lists of a transfer, group by group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec


class GroupTransfer(NamedTuple):
    """Blocks and chunks of one group of layers."""

    group: int
    chunks: npt.NDArray[np.int64]
    """Places in the pool, shape [n]."""
    blocks: npt.NDArray[np.int64]
    """Blocks of each chunk, shape [n, blocks_per_chunk]; -1 where none takes part."""


def group_transfers(
    device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec, blocks_per_chunk: int
) -> Iterator[GroupTransfer]:
    """Yield the parts of a transfer.

    vLLM lists the blocks of all groups one after the other, and likewise the chunks. A group's first block may lie in
    the middle of its first chunk, and its last one before the end of its last.

    Raises:
        ValueError: the lists do not fit each other, or a block's number is negative.
    """
    if len(device.block_ids) and int(device.block_ids.min()) < 0:
        raise ValueError(f"block_ids={device.block_ids.tolist()}: must be 0 or more")  # -1 would pass for none at all
    first_block = first_chunk = 0
    for group, (count, index) in enumerate(zip(device.group_sizes, device.block_indices, strict=True)):
        if not count:
            continue
        skipped = index % blocks_per_chunk
        num_chunks = -(-(skipped + count) // blocks_per_chunk)
        chunks = host.block_ids[first_chunk : first_chunk + num_chunks].astype(np.int64)
        blocks = np.full(num_chunks * blocks_per_chunk, -1, np.int64)
        found = device.block_ids[first_block : first_block + count]
        if len(chunks) != num_chunks or len(found) != count:
            raise ValueError(f"group_sizes={list(device.group_sizes)}: more than the transfer's blocks and chunks")
        blocks[skipped : skipped + count] = found
        first_block, first_chunk = first_block + count, first_chunk + num_chunks
        yield GroupTransfer(group, chunks, blocks.reshape(num_chunks, blocks_per_chunk))
    if first_block != len(device.block_ids) or first_chunk != len(host.block_ids):
        raise ValueError(f"group_sizes={list(device.group_sizes)}: less than the transfer's blocks and chunks")


def check_ids(blocks: npt.NDArray[np.int64], num_blocks: int, chunks: npt.NDArray[np.int64], num_chunks: int) -> None:
    """Look at the numbers of a copy before anything is written: whoever copies would write elsewhere.

    Args:
        blocks: Blocks of each chunk, any shape; -1 where none takes part.
        num_blocks: Blocks that there are.
        chunks: Places in the pool, any shape.
        num_chunks: Places that there are.

    Raises:
        ValueError: a block or a chunk does not exist.
    """
    for name, ids, least, end in (("blocks", blocks, -1, num_blocks), ("chunks", chunks, 0, num_chunks)):
        if ids.size and not least <= int(ids.min()) <= int(ids.max()) < end:
            raise ValueError(f"{name}: {ids.min()} to {ids.max()}, must be {least} to {end - 1}")
