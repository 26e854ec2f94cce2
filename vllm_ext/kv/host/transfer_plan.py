"""Which block goes into which chunk: vLLM's two lists of a transfer, group by group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec


class GroupTransfer(NamedTuple):
    """Blocks and chunks of one group of layers, a chunk for each block."""

    group: int
    chunks: npt.NDArray[np.int64]
    """Places in the pool, shape [n]."""
    blocks: npt.NDArray[np.int64]
    """Shape [n]."""


def group_transfers(device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> Iterator[GroupTransfer]:
    """Yield the parts of a transfer: vLLM lists the blocks of all groups one after the other, and likewise the chunks.

    Raises:
        ValueError: the lists do not fit each other; nothing was yielded.
    """
    num_blocks, num_chunks = len(device.block_ids), len(host.block_ids)
    if not sum(device.group_sizes) == num_blocks == num_chunks:
        allowed = f"must add up to the transfer's {num_blocks} blocks and {num_chunks} chunks"
        raise ValueError(f"group_sizes={list(device.group_sizes)}: {allowed}")
    blocks, chunks = device.block_ids.astype(np.int64), host.block_ids.astype(np.int64)
    first = 0
    for group, count in enumerate(device.group_sizes):
        if count:
            yield GroupTransfer(group, chunks[first : first + count], blocks[first : first + count])
        first += count


def check_ids(blocks: npt.NDArray[np.int64], num_blocks: int, chunks: npt.NDArray[np.int64], num_chunks: int) -> None:
    """Look at the numbers of a copy before anything is written: whoever copies would write elsewhere.

    Args:
        blocks: Block of each chunk, shape [n].
        num_blocks: Blocks that there are.
        chunks: Places in the pool, shape [n].
        num_chunks: Places that there are.

    Raises:
        ValueError: a block or a chunk does not exist, or there are more of one than of the other.
    """
    if blocks.shape != chunks.shape:
        raise ValueError(f"blocks: must be one for each of {len(chunks)} chunks, not of shape {blocks.shape}")
    for name, ids, end in (("blocks", blocks, num_blocks), ("chunks", chunks, num_chunks)):
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < end:
            raise ValueError(f"{name}: {ids.min()} to {ids.max()}, must be 0 to {end - 1}")
