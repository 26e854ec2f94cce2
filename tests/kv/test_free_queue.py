"""The order in which free blocks are taken, by hand and against trying everything."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_ext.kv.eviction.free_queue import RetentionQueue
from vllm_ext.simulation.virtual_clock import VirtualClock

BLOCK = 16


def linear(end: int) -> float:
    return 1.0 + end / 512


def hold(block: KVCacheBlock, end: int) -> KVCacheBlock:
    """Let a block hold tokens up to ``end`` of a sequence."""
    name = make_block_hash_with_group_id(BlockHash(f"{block.block_id}-{end}".encode()), 0)
    block.set_block_hash(name, end)
    return block


def queue(num_blocks: int, clock: VirtualClock) -> tuple[RetentionQueue, list[KVCacheBlock]]:
    blocks = [KVCacheBlock(number) for number in range(num_blocks)]
    return RetentionQueue(blocks, clock, linear), blocks


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_empty_blocks_then_the_leading_end_of_what_is_oldest_for_its_cost() -> None:
    clock = VirtualClock(0.0)
    free, blocks = queue(12, clock)
    assert ids(free.popleft_n(10)) == list(range(10))
    free.append_n([hold(blocks[n], (n + 1) * BLOCK) for n in (3, 2, 1, 0)])  # last ones first, as vLLM frees them
    clock.advance(1.0)
    free.append_n([hold(blocks[n], (n - 3) * BLOCK) for n in (7, 6, 5, 4)])
    clock.advance(1.0)
    assert free.num_free_blocks == 10
    assert ids(free.popleft_n(7)) == [10, 11, 0, 1, 2, 3, 4]
    free.remove(blocks[5])
    assert ids(free.popleft_n(2)) == [6, 7]
    assert free.num_free_blocks == 0
    assert free.get_all_free_blocks() == []


def test_a_block_that_is_costly_for_its_age_stays() -> None:
    clock = VirtualClock(0.0)
    free, blocks = queue(2, clock)
    free.popleft_n(2)
    free.append_n([hold(blocks[0], 8192)])  # cost 17
    clock.advance(10.0)
    free.append_n([hold(blocks[1], 16)])  # cost about 1
    clock.advance(1.0)
    assert ids(free.popleft_n(2)) == [1, 0], "1/1 < 17/11"
    clock = VirtualClock(0.0)
    free, blocks = queue(2, clock)
    free.popleft_n(2)
    free.append_n([hold(blocks[0], 8192)])
    clock.advance(100.0)
    free.append_n([hold(blocks[1], 16)])
    clock.advance(1.0)
    assert ids(free.popleft_n(2)) == [0, 1], "17/101 < 1/1"


def test_what_the_pool_evicts_goes_first() -> None:
    """It did only where it was the oldest of its class; else blocks went that held something."""
    clock = VirtualClock(0.0)
    pool: Any = BlockPool(num_gpu_blocks=5, enable_caching=True, hash_block_size=BLOCK)
    RetentionQueue.serve(pool, clock, linear)
    blocks = pool.get_new_blocks(4)
    for block in blocks:
        hold(block, 64 * BLOCK)
        pool.cached_block_hash_to_block.insert(block.block_hash, block)
    for block in blocks:
        clock.advance(1.0)
        pool.free_blocks([block])
    pool.touch([blocks[3]])
    pool.evict_blocks({blocks[2].block_id, blocks[3].block_id})
    assert ids(pool.get_new_blocks(3)) == ids([blocks[2], blocks[0], blocks[1]])
    assert pool.get_num_free_blocks() == 0
    pool.free_blocks([blocks[1], blocks[3]])
    assert sorted(ids(pool.get_new_blocks(2))) == sorted(ids([blocks[1], blocks[3]])), "in use when it was evicted"


@given(data=st.data())
def test_always_the_least_of_its_class(data: st.DataObject) -> None:
    """Against looking at every free block: what is taken is worth no more than any other, up to a class's breadth."""
    clock = VirtualClock(0.0)
    free, blocks = queue(12, clock)
    freed: dict[int, float] = {}
    empty: set[int] = set()
    held = free.popleft_n(12)
    for _ in range(data.draw(st.integers(1, 25))):
        clock.advance(data.draw(st.sampled_from([0.1, 1.0, 7.0])))
        action = data.draw(st.sampled_from(["free", "take", "touch", "empty"]))
        if action == "free" and held:
            some = [held.pop() for _ in range(data.draw(st.integers(1, len(held))))]
            for block in some:
                block.reset_hash()
                hold(block, BLOCK * data.draw(st.integers(1, 200)))
                freed[block.block_id] = clock()
            free.append_n(some)
        elif action == "empty" and freed:
            number = data.draw(st.sampled_from(sorted(freed)))
            blocks[number].reset_hash()
            free.emptied([blocks[number]])
            empty.add(number)
            del freed[number]
        elif action == "take" and empty:
            taken = free.popleft()
            empty.remove(taken.block_id)
            held.append(taken)
        elif action == "take" and freed:
            values = {
                n: linear(blocks[n].block_hash_num_tokens or 0) / max(clock() - t, 1e-6) for n, t in freed.items()
            }
            taken = free.popleft()
            assert values[taken.block_id] <= min(values.values()) * 2**0.5 * 1.0001
            del freed[taken.block_id]
            held.append(taken)
        elif action == "touch" and freed:
            number = data.draw(st.sampled_from(sorted(freed)))
            free.remove(blocks[number])
            del freed[number]
            held.append(blocks[number])
        assert free.num_free_blocks == len(freed) + len(empty) == len(free.get_all_free_blocks())


def test_in_vllms_pool() -> None:
    pool: Any = BlockPool(num_gpu_blocks=6, enable_caching=True, hash_block_size=BLOCK)
    RetentionQueue.serve(pool, VirtualClock(0.0), linear)
    blocks = pool.get_new_blocks(5)
    assert pool.get_num_free_blocks() == 0
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == 5
    assert len({block.block_id for block in pool.get_new_blocks(5)}) == 5
