"""The queue of chunks that only the device holds, against a plain record of who is where."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from vllm_ext.kv.connector.ahead_stores import IdleChunk, IdleChunks

BLOCKS = range(8)


class Queue:
    """The queue, what the blocks hold, and the chunks that it must know, the one in front that is taken first."""

    def __init__(self) -> None:
        self.blocks = [SimpleNamespace(block_hash=None) for _ in BLOCKS]
        pool: Any = self
        self.idle = IdleChunks(pool)
        self.known: dict[int, IdleChunk] = {}

    def fill(self, block: int, number: int) -> IdleChunk:
        found = BlockHash(number.to_bytes(32, "big"))
        self.blocks[block].block_hash = make_block_hash_with_group_id(found, 0)
        return IdleChunk(make_offload_key(found, 0), block, found, ReqContext("owner"), 0.0)

    def add(self, block: int, number: int) -> None:
        """What a block holds from now on is queued behind all others; of what it held before nothing is known."""
        self.known.pop(block, None)
        self.known[block] = self.fill(block, number)
        self.idle.add([self.known[block]])

    def there(self, chunk: IdleChunk) -> bool:
        return bool(self.blocks[chunk.block].block_hash == make_block_hash_with_group_id(chunk.hash, 0))

    def taken(self, blocks: list[int]) -> None:
        """What is taken to be used again is not lost; what is to be overwritten is returned, once."""
        gone = [self.known.pop(block, None) for block in blocks]
        assert self.idle.taken(blocks) == [chunk for chunk in gone if chunk is not None and not self.there(chunk)]

    def oldest(self, count: int) -> None:
        """Chunks come out in the order in which they came in; what the device forgot is passed over."""
        chunks = self.idle.oldest()
        for _ in range(count):
            expected = None
            while self.known and expected is None:
                chunk = self.known.pop(next(iter(self.known)))
                expected = chunk if self.there(chunk) else None
            assert next(chunks, None) is expected


@pytest.mark.parametrize("seed", range(6))
def test_it_holds_what_was_queued_last_of_each_block(seed: int) -> None:
    dice, queue = random.Random(seed), Queue()
    for number in range(500):
        blocks = dice.sample(BLOCKS, dice.randint(1, 3))
        action = dice.choice(("add", "add", "add", "again", "overwrite", "forget", "taken", "oldest", "clear"))
        if action in ("add", "again"):
            for block in blocks:
                queue.add(block, block if action == "again" else 100 + number)
        elif action == "overwrite":
            queue.fill(blocks[0], 100 + number)
        elif action == "forget":
            queue.blocks[blocks[0]].block_hash = None  # vLLM took the block
        elif action == "taken":
            queue.taken(blocks)
        elif action == "oldest":
            queue.oldest(len(blocks))
        elif dice.random() < 0.1:
            queue.known.clear()
            queue.idle.clear()
        assert queue.idle.num_blocks == len(queue.known)
    queue.oldest(len(BLOCKS) + 1)


def test_the_queue_does_not_grow_with_what_is_queued_again() -> None:
    queue = Queue()
    for number in range(1000):
        queue.add(number % 3, number % 3)
    assert len(queue.idle._queue) < 100
    queue.oldest(4)
