"""The queue of chunks that only the device holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from vllm_ext.kv.connector.ahead_stores import IdleChunk, IdleChunks

OWNER = ReqContext("owner")


class Pool:
    """Blocks that hold what `fill` says."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [SimpleNamespace(block_hash=None) for _ in range(num_blocks)]

    def fill(self, block: int, block_hash: BlockHash | None) -> None:
        filled = None if block_hash is None else make_block_hash_with_group_id(block_hash, 0)
        self.blocks[block].block_hash = filled


def chunk(number: int, block: int) -> IdleChunk:
    block_hash = BlockHash(bytes([number] * 32))
    return IdleChunk(make_offload_key(block_hash, 0), block, block_hash, OWNER, 0.0)


@pytest.fixture
def pool() -> Pool:
    return Pool(20)


@pytest.fixture
def chunks(pool: Pool) -> list[IdleChunk]:
    found = [chunk(0, 2), chunk(1, 4), chunk(2, 6)]
    for one in found:
        pool.fill(one.block, one.hash)
    return found


@pytest.fixture
def idle(pool: Any, chunks: list[IdleChunk]) -> IdleChunks:
    queue = IdleChunks(pool)
    queue.add(chunks)
    return queue


def test_chunks_come_out_in_the_order_they_came_in_and_once(idle: IdleChunks, chunks: list[IdleChunk]) -> None:
    assert idle.num_blocks == 3
    assert list(idle.oldest()) == chunks
    assert idle.num_blocks == 0
    assert list(idle.oldest()) == []


def test_taking_some_leaves_the_others(idle: IdleChunks, chunks: list[IdleChunk]) -> None:
    assert next(idle.oldest()) is chunks[0]
    assert idle.num_blocks == 2
    assert list(idle.oldest()) == chunks[1:]


def test_a_chunk_about_to_be_overwritten_is_returned_once(
    idle: IdleChunks, pool: Pool, chunks: list[IdleChunk]
) -> None:
    pool.fill(4, None)  # vLLM took the block, and forgot what it held
    assert idle.taken([4, 9]) == [chunks[1]]
    assert idle.taken([4]) == []
    assert list(idle.oldest()) == [chunks[0], chunks[2]]


def test_of_a_chunk_used_again_nothing_is_lost(idle: IdleChunks, chunks: list[IdleChunk]) -> None:
    assert idle.taken([4]) == []
    assert list(idle.oldest()) == [chunks[0], chunks[2]]


def test_what_the_device_forgot_is_passed_over(idle: IdleChunks, pool: Pool, chunks: list[IdleChunk]) -> None:
    pool.fill(2, BlockHash(b"other" * 6 + b".."))
    assert list(idle.oldest()) == chunks[1:]
    assert idle.num_blocks == 0


def test_a_block_that_holds_another_chunk_now_is_its_alone(
    idle: IdleChunks, pool: Pool, chunks: list[IdleChunk]
) -> None:
    newer = chunk(7, 4)
    pool.fill(newer.block, newer.hash)
    idle.add([newer])
    assert idle.num_blocks == 3, "chunk 1 is forgotten"
    assert list(idle.oldest()) == [chunks[0], chunks[2], newer]


def test_a_chunk_queued_again_goes_to_the_end(idle: IdleChunks, chunks: list[IdleChunk]) -> None:
    idle.add([again := chunk(0, 2)])
    assert list(idle.oldest()) == [chunks[1], chunks[2], again]


def test_the_queue_does_not_grow_with_what_is_queued_again(idle: IdleChunks, chunks: list[IdleChunk]) -> None:
    for _ in range(1000):
        idle.add([again := chunk(0, 2)])
    assert len(idle._queue) < 100
    assert list(idle.oldest()) == [chunks[1], chunks[2], again]


def test_everything_can_be_forgotten(idle: IdleChunks) -> None:
    idle.clear()
    assert idle.num_blocks == 0
    assert list(idle.oldest()) == []
    assert idle.taken([1, 2, 3]) == []
