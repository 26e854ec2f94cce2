"""The queue of chunks that only the device holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from vllm_ext.kv.idle import IdleChunk, IdleChunks

OWNER = ReqContext("owner")


class Pool:
    """Blocks that hold what `fill` says."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [SimpleNamespace(block_hash=None) for _ in range(num_blocks)]
        self.num_gpu_blocks = num_blocks

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


FIRST_RECORD = 10


@pytest.fixture
def before_records(pool: Any, chunks: list[IdleChunk]) -> IdleChunks:
    """Blocks up to 9, and records."""
    pool.num_gpu_blocks = FIRST_RECORD
    queue = IdleChunks(pool)
    queue.behind_records(FIRST_RECORD)
    queue.add(chunks)
    return queue


def move(pool: Pool, source: int, target: int) -> None:
    pool.blocks[target].block_hash, pool.blocks[source].block_hash = pool.blocks[source].block_hash, None


def test_what_moves_into_a_record_is_lost_next_and_what_is_in_a_block_is_not(
    pool: Pool, before_records: IdleChunks, chunks: list[IdleChunk]
) -> None:
    assert before_records.num_blocks == 0
    move(pool, 4, 12)
    before_records.moved(4, 12)
    assert before_records.taken([4]) == []
    assert before_records.num_blocks == 1
    (found,) = before_records.oldest()
    assert (found.key, found.block) == (chunks[1].key, 12)


def test_a_record_that_makes_room_is_told_once_and_where_its_content_is(
    pool: Pool, before_records: IdleChunks, chunks: list[IdleChunk]
) -> None:
    """In the step in which it arrives it is still in its block; later it is in its record."""
    move(pool, 4, 12)
    before_records.moved(4, 12)
    before_records.dropped(12)
    assert before_records.take_dropped() == [chunks[1]]
    move(pool, 6, 12)
    before_records.moved(6, 12)
    assert before_records.take_dropped() == []
    before_records.dropped(12)
    assert [(found.key, found.block) for found in before_records.take_dropped()] == [(chunks[2].key, 12)]
    assert before_records.take_dropped() == []


def test_what_moves_back_into_a_block_is_used(pool: Pool, before_records: IdleChunks) -> None:
    move(pool, 4, 12)
    before_records.moved(4, 12)
    move(pool, 12, 5)
    before_records.moved(12, 5)
    assert before_records.num_blocks == 0
    assert before_records.taken([5, 12]) == []


@pytest.mark.parametrize("known", [True, False])
def test_another_content_is_never_taken_for_the_chunk(pool: Pool, before_records: IdleChunks, known: bool) -> None:
    """A block got something else before it moved, or a record something that nobody follows."""
    other = chunk(7, 4)
    if known:
        pool.fill(4, other.hash)
        move(pool, 4, 12)
        before_records.moved(4, 12)
    else:
        move(pool, 4, 12)
        before_records.moved(4, 12)
        pool.fill(12, other.hash)
        before_records.moved(3, 12)
    before_records.dropped(12)
    assert before_records.take_dropped() == []
    assert before_records.taken([12]) == []
    assert list(before_records.oldest()) == []


def test_a_record_that_a_request_reads_is_not_overwritten(pool: Pool, before_records: IdleChunks) -> None:
    move(pool, 4, 12)
    before_records.moved(4, 12)
    pool.fill(12, None)
    assert before_records.taken([12]) == []
