"""What is in the host tier: vLLM's own manager, which also forgets chunks that turn out to hold nothing readable."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from vllm_ext.kv.conversations.conversation import Turn
from vllm_ext.kv.eviction.retention import RetentionCachePolicy
from vllm_ext.kv.host.tally import QUOTA, RESET, ROOM, UNREADABLE, UNWRITTEN, ChunkTally

if TYPE_CHECKING:
    from vllm_ext.kv.eviction.tails import Tails


class TierManager(CPUOffloadingManager):
    """Chunks by the hash of the prefix they end: so only identical prefixes are found, with equal salt and LoRA.

    Attributes:
        num_chunks: Chunks that there is room for.
        policy: Who is evicted first.
        on_unreadable: Told of chunks that were found and could not be read.
    """

    def __init__(self, num_chunks: int, **options: Any) -> None:
        """Take vLLM's options."""
        super().__init__(num_chunks, **options)
        self.num_chunks = num_chunks
        self.policy: CachePolicy = self._policy
        self.tally = ChunkTally()
        self.on_unreadable: Callable[[list[OffloadKey]], None] | None = None
        self._unreadable: set[int] = set()

    @property
    def num_used(self) -> int:
        """Places that are taken, those of chunks that are being written included."""
        return self.num_chunks - int(self._get_num_free_chunks())

    @property
    def num_writing(self) -> int:
        """Chunks that are being written."""
        found: int = self._num_write_pending_chunks
        return found

    @property
    def num_reading(self) -> int:
        """Chunks that are being read."""
        return self.num_used - self.num_writing - int(self._num_evictable_cache_chunks)

    @property
    def dropped_chunks(self) -> int:
        """Chunks forgotten since nothing readable was in them."""
        return self.tally.gone[UNWRITTEN] + self.tally.gone[UNREADABLE]

    def peek(self, key: OffloadKey) -> LookupResult:
        """Say whether a chunk can be loaded, is being written, or is not there; changes nothing."""
        chunk = self._policy.get(key)
        if chunk is None:
            return LookupResult.MISS
        return LookupResult.HIT if chunk.is_ready else LookupResult.HIT_PENDING

    def forget(self, chunks: Iterable[tuple[OffloadKey, ChunkStatus]], reason: str) -> None:
        """Free chunks that the policy has let go of, none of them in use; say why (`tally.REASONS`)."""
        keys = []
        for key, chunk in chunks:
            self._num_evictable_cache_chunks -= 1
            self._free_chunk(chunk)
            keys.append(key)
        self.tally.gone[reason] += len(keys)
        if keys and self.events is not None:
            self.events.append(OffloadingEvent(keys=keys, medium=self.medium, removed=True))

    def mark_unreadable(self, chunk_ids: Iterable[int]) -> None:
        """Note chunks that a copy could not write, or not read; each goes when the copies that use it are through."""
        self._unreadable.update(chunk_ids)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Find places for chunks, or none; a salt that exceeds its quota loses its own, or stores less."""
        if isinstance(self._policy, RetentionCachePolicy):
            keys = self._within_quota(list(keys), req_context)
            self._policy.announce(req_context)
        output = super().prepare_store(keys, req_context)
        if output is None:
            self.tally.refused += sum(self._policy.get(key) is None for key in keys)
        else:
            self.tally.placed += len(output.keys_to_store)
            self.tally.gone[ROOM] += len(output.evicted_keys)
        return output

    def _within_quota(self, keys: list[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        turn, policy = req_context.get_state(Turn), self._policy
        if turn is None or policy.quotas.most is None:
            return keys
        salt_tag, quotas = turn.conversation.salt_tag, policy.quotas
        missing = [key for key in keys if policy.get(key) is None]
        over = quotas.over(salt_tag, len(missing))
        keys, missing = self._give_up(over, quotas.ends(salt_tag), keys, missing)
        short = len(missing) - int(self._get_num_free_chunks())
        over = min(short, quotas.new_over(salt_tag, len(missing)))
        return self._give_up(over, quotas.ends_of_new, keys, missing)[0]

    def _give_up(
        self, count: int, ends: Tails | None, keys: list[OffloadKey], missing: list[OffloadKey]
    ) -> tuple[list[OffloadKey], list[OffloadKey]]:
        """Forget so many of the chunks that end there, or else store as many fewer.

        Returns:
            What is to be stored, and what of it is missing.
        """
        if count <= 0:
            return keys, missing
        if (evicted := self._policy.evict_of(ends, count, set(keys))) is not None:
            self.forget(evicted, QUOTA)
            return keys, missing
        self.tally.refused += count
        left_out = set(missing[-count:])
        return [key for key in keys if key not in left_out], missing[:-count]

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make chunks loadable, but for those that could not be written."""
        unwritten = set(self.drop_unwritten(keys, req_context))
        self._finish_store([key for key in keys if key not in unwritten], req_context, success)

    def drop_unwritten(self, keys: Collection[OffloadKey], req_context: ReqContext) -> list[OffloadKey]:
        """Forget those of the chunks being stored that could not be written, and return them."""
        unwritten = self._take_unreadable(keys)
        self._finish_store(unwritten, req_context, success=False)
        return unwritten

    def _finish_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool) -> None:
        before = self._num_write_pending_chunks
        super().complete_store(keys, req_context, success)
        finished = before - self._num_write_pending_chunks
        if success:
            self.tally.stored += finished
        else:
            self.tally.gone[UNWRITTEN] += finished

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Keep chunks in place while a request's load reads them."""
        self.tally.loaded += len(keys)
        return super().prepare_load(keys, req_context)

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Let go of chunks, and forget those that could not be read."""
        super().complete_load(keys, req_context)
        unreadable = self._take_unreadable(keys)
        self.tally.gone[UNREADABLE] += len(unreadable)
        for key in unreadable:
            chunk = self._policy.get(key)
            self._policy.mark_non_evictable(key)
            self._num_evictable_cache_chunks -= 1
            self._policy.remove(key)
            self._free_chunk(chunk)
        if unreadable and self.on_unreadable is not None:
            self.on_unreadable(unreadable)

    def reset_cache(self) -> None:
        """Forget everything."""
        self.tally.gone[RESET] += self.num_used
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
