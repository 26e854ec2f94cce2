"""What is in the host tier: vLLM's own manager, which also forgets chunks that turn out to hold nothing readable."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from vllm_ext.kv.retention import RetentionCachePolicy


class TierManager(CPUOffloadingManager):
    """Chunks by the hash of the prefix they end: so only identical prefixes are found, with equal salt and LoRA."""

    def __init__(self, num_chunks: int, **options: Any) -> None:
        """Take vLLM's options."""
        super().__init__(num_chunks, **options)
        self.dropped_chunks = 0
        """Chunks forgotten since nothing readable was in them."""
        self._unreadable: set[int] = set()

    def mark_unreadable(self, chunk_ids: Iterable[int]) -> None:
        """Note chunks that a copy could not write, or not read; each goes when the copies that use it are through."""
        self._unreadable.update(chunk_ids)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Find places for chunks, or none."""
        if isinstance(self._policy, RetentionCachePolicy):
            self._policy.announce(keys, req_context)
        return super().prepare_store(keys, req_context)

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make chunks loadable, but for those that could not be written."""
        unreadable = self._take_unreadable(keys)
        super().complete_store([key for key in keys if key not in unreadable], req_context, success)
        super().complete_store(unreadable, req_context, success=False)
        self.dropped_chunks += len(unreadable)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Let go of chunks, and forget those that could not be read."""
        super().complete_load(keys, req_context)
        for key in self._take_unreadable(keys):
            chunk = self._policy.get(key)
            self._policy.mark_non_evictable(key)
            self._num_evictable_cache_chunks -= 1
            self._policy.remove(key)
            self._free_chunk(chunk)
            self.dropped_chunks += 1

    def reset_cache(self) -> None:
        """Forget everything."""
        super().reset_cache()
        self._unreadable.clear()

    def _take_unreadable(self, keys: Collection[OffloadKey]) -> list[OffloadKey]:
        """Return those of the keys whose chunk is unreadable and in nobody's use any more."""
        if not self._unreadable:
            return []
        found = []
        for key in keys:
            chunk = self._policy.get(key)
            if chunk is not None and chunk.chunk_id in self._unreadable and chunk.ref_cnt <= 0:
                self._unreadable.discard(chunk.chunk_id)
                found.append(key)
        return found
