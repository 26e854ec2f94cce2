"""Free blocks and free records side by side: new tokens get blocks, and only what leaves a block gets a record."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from vllm_ext.kv.eviction.free_queue import RetentionQueue


class TwoLanes:
    """What vLLM's block pool takes for its queue of free blocks; every block and record is in its own lane.

    All that is asked about free blocks, their number above all, is answered of blocks alone.

    Args:
        blocks: The queue that the pool had.
        records: Free ones, which hold nothing.
    """

    def __init__(self, blocks: FreeKVCacheBlockQueue, records: list[KVCacheBlock]) -> None:
        self.blocks = blocks
        self.by_value = isinstance(blocks, RetentionQueue)
        self.records = (
            RetentionQueue(records, blocks.clock, blocks.cost_s)
            if isinstance(blocks, RetentionQueue)
            else FreeKVCacheBlockQueue(records)
        )
        self._first_record = min(record.block_id for record in records)
        self._freed_s: dict[int, float] = {}
        """When the blocks that were taken last had been freed, where blocks go by value."""

    @property
    def num_free_blocks(self) -> int:
        """Free blocks."""
        count: int = self.blocks.num_free_blocks
        return count

    def popleft(self) -> KVCacheBlock:
        """Take one free block.

        Raises:
            ValueError: there is none.
        """
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take ``n`` free blocks; there must be so many."""
        if not isinstance(self.blocks, RetentionQueue):
            taken: list[KVCacheBlock] = self.blocks.popleft_n(n)
            return taken
        pairs = [self.blocks.take() for _ in range(n)]
        self._freed_s = {block.block_id: freed_s for block, freed_s in pairs}
        return [block for block, _ in pairs]

    def remove(self, block: KVCacheBlock) -> None:
        """Take out a block, or record, that is used again."""
        self._lane(block).remove(block)

    def append(self, block: KVCacheBlock) -> None:
        """Add one block or record."""
        self._lane(block).append(block)

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Add blocks and records that may be found again."""
        for lane, members in self._by_lane(blocks):
            lane.append_n(members)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Add blocks and records that hold nothing."""
        for lane, members in self._by_lane(blocks):
            lane.prepend_n(members)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Return the free blocks."""
        free: list[KVCacheBlock] = self.blocks.get_all_free_blocks()
        return free

    def take_record(self, in_place_of: KVCacheBlock | None = None) -> KVCacheBlock | None:
        """Take the record of least value, with what it holds.

        Args:
            in_place_of: A block that was taken last, whose content must be of more value than that; None: whatever is
                to be kept is.

        Returns:
            None: there is none, or all are of more value.
        """
        if not self.records.num_free_blocks:
            return None
        if isinstance(self.records, RetentionQueue) and in_place_of is not None:
            value = self.records.value(in_place_of, self._freed(in_place_of))
            if self.records.least_value() >= value:
                return None
        record: KVCacheBlock = self.records.popleft()
        return record

    def keep(self, record: KVCacheBlock, of: KVCacheBlock) -> None:
        """Add a record that holds what a block held that was taken last, and is as old."""
        if isinstance(self.records, RetentionQueue):
            self.records.append_n([record], self._freed(of))
        else:
            self.records.append(record)

    def _freed(self, block: KVCacheBlock) -> float:
        assert isinstance(self.records, RetentionQueue)
        freed_s = self._freed_s.get(block.block_id)
        return self.records.clock() if freed_s is None else freed_s

    def _lane(self, block: KVCacheBlock) -> FreeKVCacheBlockQueue:
        return self.records if block.block_id >= self._first_record else self.blocks

    def _by_lane(self, blocks: Iterable[KVCacheBlock]) -> Iterable[tuple[FreeKVCacheBlockQueue, list[KVCacheBlock]]]:
        of_blocks: list[KVCacheBlock] = []
        of_records: list[KVCacheBlock] = []
        for block in blocks:
            (of_records if block.block_id >= self._first_record else of_blocks).append(block)
        return (self.blocks, of_blocks), (self.records, of_records)
