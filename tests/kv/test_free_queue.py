"""The order in which free blocks are taken, against a search among all of them, and in vLLM's pool."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, make_block_hash_with_group_id

from vllm_ext.kv.eviction.free_queue import RetentionQueue
from vllm_ext.kv.eviction.worth import class_of, middle_of
from vllm_ext.simulation.engine.events import VirtualClock

BLOCK = 16


def linear(end: int) -> float:
    return 1.0 + end / 512


def hold(block: KVCacheBlock, end: int) -> KVCacheBlock:
    """Let a block hold tokens up to ``end`` of a sequence."""
    name = make_block_hash_with_group_id(BlockHash(f"{block.block_id}-{end}".encode()), 0)
    block.set_block_hash(name, end)
    return block


def ids(blocks: list[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_what_the_pool_evicts_goes_first() -> None:
    """It did only where it was the oldest of its class; else blocks went that held something."""
    clock = VirtualClock(0.0)
    pool: Any = BlockPool(num_gpu_blocks=5, enable_caching=True, hash_block_size=BLOCK)
    RetentionQueue.serve(pool, clock, linear)
    blocks = pool.get_new_blocks(4)
    assert pool.get_num_free_blocks() == 0
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
def test_empty_blocks_then_the_oldest_of_the_class_of_least_value(data: st.DataObject) -> None:
    """Of those freed together the one that stands first in its sequence goes first, however they were freed."""
    clock = VirtualClock(0.0)
    blocks = [KVCacheBlock(number) for number in range(12)]
    free = RetentionQueue(blocks, clock, linear)
    freed: dict[int, tuple[float, int, int]] = {}
    """When, by end, and in which order: of the blocks that hold something."""
    empty, held = list(range(12)), list[KVCacheBlock]()

    def value(number: int) -> float:
        return linear(middle_of(class_of(freed[number][1]))) / max(clock() - freed[number][0], 1e-6)

    for _ in range(data.draw(st.integers(1, 25))):
        clock.advance(data.draw(st.sampled_from([0.001, 0.1, 1.0, 7.0])))
        action = data.draw(st.sampled_from(["free", "take", "take", "touch", "empty"]))
        number = data.draw(st.sampled_from(sorted(freed))) if freed else None
        if action == "free" and held:
            some = [held.pop() for _ in range(data.draw(st.integers(1, len(held))))]
            for order, block in enumerate(some):
                block.reset_hash()
                hold(block, BLOCK * data.draw(st.integers(1, 200)))
                freed[block.block_id] = clock(), block.block_hash_num_tokens or 0, order
            free.append_n(some)
        elif action == "empty" and number is not None:
            blocks[number].reset_hash()
            free.emptied([blocks[number]])
            empty.insert(0, number)
            del freed[number]
        elif action == "touch" and number is not None:
            free.remove(blocks[number])
            del freed[number]
            held.append(blocks[number])
        elif action == "take" and empty:
            assert free.least_value() == 0.0
            held += free.popleft_n(1)
            assert held[-1].block_id == empty.pop(0)
        elif action == "take" and freed:
            worth, least = {number: value(number) for number in freed}, free.least_value()
            held.append(free.popleft())
            taken = held[-1].block_id
            alike = [number for number in freed if class_of(freed[number][1]) == class_of(freed[taken][1])]
            assert taken == min(alike, key=freed.__getitem__), "the oldest of its class"
            assert worth[taken] == least == free.value(held[-1], freed[taken][0])
            assert worth[taken] <= min(worth.values()) * 1.02, "compared 10 ms ago at most"
            del freed[taken]
        assert free.num_free_blocks == len(freed) + len(empty) == len(free.get_all_free_blocks())
