"""Chunks whose KV is on the device, whose request is gone, and which host memory does not hold.

vLLM reclaims such blocks lazily, those first that were given up first. So this is a queue: what is at its front is lost
next, and is copied ahead of that when the device runs short of blocks that can be taken without losing anything
(Pensieve, section 4.3.2). A chunk leaves the queue when it is copied, when somebody uses it again, or when its blocks
are taken all the same, which the caller is told while they still hold it.

With records of 8 bits on the device (`kv.device`) that copies are made from, blocks move into these when they are
taken, and what is lost next is in a record.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
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
    """Or the record."""
    hash: BlockHash
    owner: ReqContext
    used_s: float
    """When its request left; clock time, s."""

    def is_in(self, pool: BlockPool) -> bool:
        """Whether the block holds the chunk, and was not given to somebody else since."""
        found = pool.blocks[self.block].block_hash  # with the id of its group at the end
        return found is not None and found[: len(self.hash)] == self.hash

    def where_kept(self, pool: BlockPool) -> IdleChunk | None:
        """Return the chunk where the device holds it: in its block, or in a record of 8 bits; None: nowhere."""
        if self.is_in(pool):
            return self
        if len(pool.blocks) == pool.num_gpu_blocks:
            return None
        found = pool.get_cached_block(self.hash, [0])
        if found is None or found[0].block_id < pool.num_gpu_blocks:
            return None
        return replace(self, block=found[0].block_id)


class IdleChunks:
    """A queue of idle chunks.

    Args:
        pool: vLLM's blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_block: dict[int, IdleChunk] = {}
        self._queue: deque[IdleChunk] = deque()
        self._first = 0
        """Id of the first block, or record, whose content is lost when it is taken."""
        self._safe: dict[int, IdleChunk] = {}
        """By block: what moves into a record when the block is taken."""
        self._moved: dict[int, IdleChunk] = {}
        """By record: what this step moves into it, where it was before."""
        self._dropped: list[IdleChunk] = []

    @property
    def num_blocks(self) -> int:
        """Blocks, or records if blocks move into these, whose content would be lost."""
        return len(self._by_block)

    def behind_records(self, first_record: int) -> None:
        """Take it that blocks move into records when they are taken, whose ids begin there."""
        self._first = first_record

    def add(self, chunks: Iterable[IdleChunk]) -> None:
        """Queue chunks, the one that vLLM reclaims first in front; blocks that are known already are theirs now."""
        for chunk in chunks:
            if chunk.block < self._first:
                self._safe[chunk.block] = chunk
            else:
                self._by_block[chunk.block] = chunk
                self._queue.append(chunk)
        self._compact()

    def moved(self, source: int, target: int) -> None:
        """Follow a chunk into a record. Into a block it moves to be used: it comes back when its request has left."""
        chunk, _ = self._pop(source), self._pop(target)
        if chunk is None or target < self._first:
            return
        arrived = replace(chunk, block=target)
        if arrived.is_in(self._pool):  # and not what the block got since, in this same step
            self._moved[target] = chunk
            self.add([arrived])

    def dropped(self, record: int) -> None:
        """Note that what a record held is lost in this step; what it was to get in this step is where it was."""
        chunk = self._pop(record)
        before = self._moved.pop(record, chunk)
        if chunk is not None and before is not None and chunk.is_in(self._pool):
            self._dropped.append(before)

    def taken(self, blocks: Iterable[int]) -> list[IdleChunk]:
        """Forget chunks whose blocks a step takes.

        Returns:
            Those that the step will overwrite; what is taken to be used, or was moved into a record, is not lost, and
            neither is a record that a request reads.
        """
        lost = []
        for block in blocks:
            chunk = self._pop(block)
            written = not self._first or block < self._first
            if chunk is not None and written and chunk.where_kept(self._pool) is None:
                lost.append(chunk)
        return lost

    def take_dropped(self) -> list[IdleChunk]:
        """Return what the step overwrites in records, each once; call it once a step."""
        dropped, self._dropped = self._dropped, []
        self._moved.clear()
        return dropped

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
        for held in (self._by_block, self._safe, self._moved, self._queue, self._dropped):
            held.clear()

    def _pop(self, block: int) -> IdleChunk | None:
        return (self._safe if block < self._first else self._by_block).pop(block, None)

    def _compact(self) -> None:
        """Drop queued chunks that were forgotten, so that the queue is no longer than twice what it holds."""
        if len(self._queue) > 2 * len(self._by_block) + 64:
            self._queue = deque(c for c in self._queue if self._by_block.get(c.block) is c)
