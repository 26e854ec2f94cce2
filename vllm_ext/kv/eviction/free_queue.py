"""Which free block of the device is taken first: of least retention value, which is a conversation's leading end.

vLLM takes blocks in the order in which they were freed, and of one request the last ones first, since a prefix with a
hole in it is lost to it. Where gaps are crossed the leading ones are the cheapest to lose, for they are the cheapest to
compute again (Pensieve, section 4.3.1):

    V = Cost(l) / T     Cost(l): time to compute a block again with l tokens before it
                        T: time since the block was freed

Values change at different rates, so blocks can't be kept in their order. But those with about as many tokens before
them have about the same cost, and among those the oldest is worth least. So blocks are kept in classes by their place
in the sequence, and taking one compares the oldest of each class: two classes for each doubling of the length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from vllm_ext.kv.eviction.worth import LEAST_AGE_S, ClassCosts, class_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_COMPARED_FOR_S = 0.01
"""For so long a class is taken to be that of the least value, as long as its oldest is below what was second then."""
_NOT_COMPARED = (0, math.inf, -math.inf)


class RetentionQueue(FreeKVCacheBlockQueue):
    """vLLM's list of free blocks, which gives away those of least value; blocks that hold nothing go before all.

    The list itself stays as it was, so that a block can be taken out of the middle, and others can walk it.

    Args:
        blocks: Free ones, which hold nothing.
        clock: Returns the time, in seconds.
        cost_s: Seconds to compute a block again that ends after so many tokens.
    """

    def __init__(self, blocks: list[KVCacheBlock], clock: Callable[[], float], cost_s: Callable[[int], float]) -> None:
        super().__init__(blocks)
        self.clock, self.cost_s = clock, cost_s
        self._costs = ClassCosts(cost_s)
        self._classes: dict[int, dict[int, KVCacheBlock]] = {}
        """By class and block id: blocks with what they hold, the oldest first."""
        self._freed: dict[int, tuple[int, float]] = {}
        """By block id: their classes, and when they were freed."""
        self._chosen = _NOT_COMPARED
        """Class of least value, value of the second least when they were compared, and until when to go by that."""

    @classmethod
    def serve(cls, pool: BlockPool, clock: Callable[[], float], cost_s: Callable[[int], float]) -> None:
        """Let a pool in which nothing is cached yet take its blocks from such a queue, which hears what it evicts."""
        blocks = pool.free_block_queue.get_all_free_blocks()
        for block in blocks:
            block.prev_free_block = block.next_free_block = None
        queue = pool.free_block_queue = cls(blocks, clock, cost_s)
        evict = pool.evict_blocks

        def evict_blocks(block_ids: set[int]) -> None:
            evict(block_ids)
            queue.emptied(pool.blocks[block_id] for block_id in block_ids)

        pool.evict_blocks = evict_blocks

    def append_n(self, blocks: list[KVCacheBlock], freed_s: float | None = None) -> None:
        """Add blocks that may be found again; of one place those that stand first in their sequence are the older.

        Args:
            blocks: Which.
            freed_s: When their KV was used last, clock time in s; None: just now. What was taken out of another queue
                comes in about the order in which it had come there.
        """
        super().append_n(blocks)
        self._chosen = _NOT_COMPARED
        freed_s = self.clock() if freed_s is None else freed_s
        for block in sorted(blocks, key=_end):
            if block.block_hash is not None:
                number = class_of(_end(block))
                self._classes.setdefault(number, {})[block.block_id] = block
                self._freed[block.block_id] = number, freed_s

    def append(self, block: KVCacheBlock) -> None:
        """Add one block."""
        self.append_n([block])

    def remove(self, block: KVCacheBlock) -> None:
        """Take out a block that is used again."""
        super().remove(block)
        self._forget(block)

    def emptied(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Let those of the blocks go next that are free and hold nothing any more."""
        for block in blocks:
            if block.block_hash is None and block.block_id in self._freed:
                self.remove(block)
                super().prepend_n([block])

    def popleft(self) -> KVCacheBlock:
        """Take the block of least value.

        Raises:
            ValueError: there is none.
        """
        return self.take()[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the ``n`` blocks of least value; there must be so many."""
        return [self.popleft() for _ in range(n)]

    def take(self) -> tuple[KVCacheBlock, float]:
        """Take the block of least value; also returns when it was freed, clock time in s, or now if it holds nothing.

        Raises:
            ValueError: there is none.
        """
        block, freed_s = self._least(), self.clock()
        if block is None:
            block = super().popleft()
            self._forget(block)
        else:
            _, freed_s = self._freed[block.block_id]
            self.remove(block)
        return block, freed_s

    def value(self, block: KVCacheBlock, freed_s: float) -> float:
        """Return the retention value of what a block holds, if it was freed then."""
        return self._value(class_of(_end(block)), freed_s)

    def least_value(self) -> float:
        """Return the value of what is lost with the block that goes next; 0 if that holds nothing, or there is none."""
        block = self._least()
        return 0.0 if block is None else self._value(*self._freed[block.block_id])

    def _least(self) -> KVCacheBlock | None:
        """Return the block that goes next; None: the first one of the list, which holds nothing."""
        head = self.fake_free_list_head.next_free_block
        if not self._freed or (head is not None and head.block_hash is None):
            return None
        now, (number, second, until) = self.clock(), self._chosen
        if now >= until or number not in self._classes or self._value_of_oldest(number) > second:
            values = {number: self._value_of_oldest(number) for number in self._classes}
            number, *others = sorted(values, key=values.__getitem__)
            self._chosen = number, values[others[0]] if others else math.inf, now + _COMPARED_FOR_S
        return self._oldest(number)

    def _oldest(self, number: int) -> KVCacheBlock:
        return next(iter(self._classes[number].values()))

    def _value_of_oldest(self, number: int) -> float:
        return self._value(*self._freed[self._oldest(number).block_id])

    def _value(self, number: int, freed_s: float) -> float:
        return self._costs.of(number) / max(self.clock() - freed_s, LEAST_AGE_S)

    def _forget(self, block: KVCacheBlock) -> None:
        number, _ = self._freed.pop(block.block_id, (None, 0.0))
        if number is not None:
            members = self._classes[number]
            del members[block.block_id]
            if not members:
                del self._classes[number]


def _end(block: KVCacheBlock) -> int:
    return block.block_hash_num_tokens or 0
