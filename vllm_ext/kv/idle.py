"""Chunks whose KV is on the device, whose request is gone, and which host memory does not hold.

vLLM reclaims such blocks lazily, those first that were given up first. So this is a queue: what is at its front is lost
next, and is copied ahead of that when the device runs short of blocks that can be taken without losing anything
(Pensieve, section 4.3.2). A chunk leaves the queue when it is copied, when somebody uses it again, or when its blocks
are taken all the same, which the caller is told while they still hold it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.kv_offload.base import OffloadKey, ReqContext


@dataclass(frozen=True, slots=True, eq=False)
class IdleChunk:
    """A chunk, the blocks that hold it, and the request whose it was."""

    key: OffloadKey
    blocks: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    """Of each block's prefix."""
    owner: ReqContext
    used_s: float
    """When its request left; clock time, s."""

    def is_in(self, pool: BlockPool) -> bool:
        """Whether all blocks hold the chunk, and none was given to somebody else since."""
        for block, expected in zip(self.blocks, self.hashes, strict=True):
            found = pool.blocks[block].block_hash  # with the id of its group at the end
            if found is None or found[: len(expected)] != expected:
                return False
        return True


class IdleChunks:
    """A queue of idle chunks.

    Args:
        pool: vLLM's blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_block: dict[int, IdleChunk] = {}
        self._queue: deque[IdleChunk] = deque()

    @property
    def num_blocks(self) -> int:
        """Blocks whose content would be lost."""
        return len(self._by_block)

    def add(self, chunks: Iterable[IdleChunk]) -> None:
        """Queue chunks, the one that vLLM reclaims first in front; blocks that are known already are theirs now."""
        for chunk in chunks:
            for block in chunk.blocks:
                if (other := self._by_block.get(block)) is not None:
                    self._forget(other)
            for block in chunk.blocks:
                self._by_block[block] = chunk
            self._queue.append(chunk)
        self._compact()

    def taken(self, blocks: Iterable[int]) -> list[IdleChunk]:
        """Forget chunks whose blocks a step takes.

        Returns:
            Those that the step will overwrite; a chunk that is taken to be used is not lost.
        """
        lost = []
        for block in blocks:
            if (chunk := self._by_block.get(block)) is not None:
                if not chunk.is_in(self._pool):
                    lost.append(chunk)
                self._forget(chunk)
        return lost

    def oldest(self) -> Iterator[IdleChunk]:
        """Take chunks out, the one that vLLM reclaims first in front; what is on the device no more is passed over."""
        while self._queue:
            chunk = self._queue.popleft()
            if self._by_block.get(chunk.blocks[0]) is not chunk:
                continue
            self._forget(chunk)
            if chunk.is_in(self._pool):
                yield chunk

    def clear(self) -> None:
        """Forget everything."""
        self._by_block.clear()
        self._queue.clear()

    def _forget(self, chunk: IdleChunk) -> None:
        for block in chunk.blocks:
            if self._by_block.get(block) is chunk:
                del self._by_block[block]

    def _compact(self) -> None:
        """Drop queued chunks that were forgotten, so that the queue is no longer than twice what it holds."""
        if len(self._queue) > 2 * len(self._by_block) + 64:
            self._queue = deque(c for c in self._queue if self._by_block.get(c.blocks[0]) is c)
