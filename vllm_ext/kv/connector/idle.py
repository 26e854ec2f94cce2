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
    """A chunk, the block that holds it, and the request whose it was."""

    key: OffloadKey
    block: int
    hash: BlockHash
    owner: ReqContext
    used_s: float
    """When its request left; clock time, s."""

    def is_in(self, pool: BlockPool) -> bool:
        """Whether the block holds the chunk, and was not given to somebody else since."""
        found = pool.blocks[self.block].block_hash  # with the id of its group at the end
        return found is not None and found[: len(self.hash)] == self.hash


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
            self._by_block[chunk.block] = chunk
            self._queue.append(chunk)
        self._compact()

    def taken(self, blocks: Iterable[int]) -> list[IdleChunk]:
        """Forget chunks whose blocks a step takes.

        Returns:
            Those that the step will overwrite; what is taken to be used is not lost.
        """
        chunks = [self._by_block.pop(block, None) for block in blocks]
        return [chunk for chunk in chunks if chunk is not None and not chunk.is_in(self._pool)]

    def oldest(self) -> Iterator[IdleChunk]:
        """Take chunks out, the one that vLLM reclaims first in front; what is on the device no more is passed over."""
        while self._queue:
            chunk = self._queue.popleft()
            if self._by_block.get(chunk.block) is not chunk:
                continue
            del self._by_block[chunk.block]
            if chunk.is_in(self._pool):
                yield chunk

    def clear(self) -> None:
        """Forget everything."""
        self._by_block.clear()
        self._queue.clear()

    def _compact(self) -> None:
        """Drop queued chunks that were forgotten, so that the queue is no longer than twice what it holds."""
        if len(self._queue) > 2 * len(self._by_block) + 64:
            self._queue = deque(c for c in self._queue if self._by_block.get(c.block) is c)
