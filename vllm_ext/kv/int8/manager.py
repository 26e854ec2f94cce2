"""vLLM's block manager of full attention, for requests whose block tables may name records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from vllm_ext.kv.int8.records import Records
from vllm_ext.kv.partial_prefix.manager import GapManager, with_manager


class RecordManager(GapManager):
    """The manager of the one group of a model that `with_record_manager` names.

    Attributes:
        records: Those of its pool; set before the first request.
        reading: By request that holds blocks: the records in its table.
    """

    records: Records

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take vLLM's arguments."""
        super().__init__(*args, **kwargs)
        self.reading: dict[str, tuple[int, ...]] = {}
        self._placed: set[str] = set()

    def reads(self, req_ids: Iterable[str]) -> set[int]:
        """Return the records in the block tables of some requests."""
        if not self.reading:
            return set()
        return {record for req_id in req_ids for record in self.reading.get(req_id, ())}

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        """As vLLM's; what the request found in records is moved into blocks where there is room."""
        return self._allocated(super().allocate_new_blocks, request_id, num_tokens, *args, **kwargs)

    def allocate_new_blocks_with_gaps(self, request_id: str, *args: Any, **kwargs: Any) -> list[KVCacheBlock]:
        """The same, while somebody has gaps."""
        return self._allocated(super().allocate_new_blocks_with_gaps, request_id, *args, **kwargs)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """As vLLM's; whoever frees them gives records back to their own lane."""
        self.reading.pop(request_id, None)
        self._placed.discard(request_id)
        return super().pop_blocks_for_free(request_id)

    def _get_num_evictable_blocks(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Return how many free blocks are fewer once these are held: a record takes none."""
        first = self.records.first_record
        return sum(block.ref_cnt == 0 and not block.is_null and block.block_id < first for block in blocks)

    def _allocated(
        self, allocate: Callable[..., list[KVCacheBlock]], request_id: str, *args: Any, **kwargs: Any
    ) -> list[KVCacheBlock]:
        if request_id in self._placed:  # every running request in every step
            return allocate(request_id, *args, **kwargs)
        hit = self._partial_hit_reqs.get(request_id)
        blocks = allocate(request_id, *args, **kwargs)
        records, table = self.records, self.req_to_blocks[request_id]
        if hit is not None:
            records.adopted(request_id, hit[1])
        records.forget(request_id)
        records.promote(table, self.block_size)
        self._placed.add(request_id)
        if reading := tuple(block.block_id for block in table if records.is_record(block)):
            self.reading[request_id] = reading
        return blocks


@dataclass(frozen=True, kw_only=True)
class RecordSpec(FullAttentionSpec):
    """Full attention whose manager knows records; the same in all else, and known to the scheduler's process only."""


def with_record_manager(kv_cache_config: KVCacheConfig) -> KVCacheConfig:
    """Return a model's KV cache configuration with our manager for its one group of full attention."""
    return with_manager(kv_cache_config, RecordSpec, RecordManager)
