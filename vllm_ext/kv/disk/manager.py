"""What is in host memory and on disk: vLLM's `TieringOffloadingManager` over our two tiers.

vLLM's copies each chunk that was stored on to the disk, and brings a chunk that is on disk only back into host memory
when a request asks for it, which waits meanwhile. Ours are: a chunk that could not be written is not copied on, a
request waits for a limited time, and what is brought back for it does not push out what it also needs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, PrepareStoreOutput, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, JobMetadata, TieringOffloadingManager

from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.conversations.conversation import Turn
from vllm_ext.kv.disk.files import DiskFiles
from vllm_ext.kv.disk.identity import format_facts
from vllm_ext.kv.disk.tier import DiskTier
from vllm_ext.kv.host.manager import TierManager
from vllm_ext.kv.host.tally import ROOM

if TYPE_CHECKING:
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

    from vllm_ext.config.kv_tier import KvTierConfig
    from vllm_ext.kv.disk.region import SharedRows
    from vllm_ext.kv.host.geometry import TierGeometry

logger = logging.getLogger("vllm.vllm_ext.kv")

PATIENCE_S = 5.0
"""How long a request waits for a chunk from disk, before it computes what the chunk holds."""


class HostTier(TierManager, CPUPrimaryTierOffloadingManager):
    """Host memory with another tier behind it."""

    def __init__(self, num_chunks: int, **options: Any) -> None:
        """Take vLLM's options."""
        super().__init__(num_chunks, **options)
        self.prepare_write = self._prepare_promotion

    def _prepare_promotion(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Find a place for a chunk from disk, or none: not at the cost of others that its request asked for.

        A prefix that is larger than host memory would otherwise chase its own chunks out, and be looked for forever.
        """
        wanted = len(keys) - self._get_num_free_chunks()
        if wanted > 0:
            evicted = None
            if wanted <= self._num_evictable_cache_chunks:
                evicted = self._policy.evict(wanted, _ChunksOf(req_context))
            if evicted is None:
                return None
            self.forget(evicted, ROOM)
        output = self.prepare_store(keys, req_context)
        return output if output is not None and output.keys_to_store else None  # a quota may have left them out


class _ChunksOf(set):  # type: ignore[type-arg]
    """The chunks of a request, as a set that is never built: there may be thousands."""

    def __init__(self, req_context: ReqContext) -> None:
        super().__init__()
        self._req_context = req_context

    def __contains__(self, key: object) -> bool:
        return self._req_context.get_offload_key_position(key) is not None


class DiskBackedManager(TieringOffloadingManager):
    """Both tiers; what is not said of the disk is host memory's, and as of `TierManager`.

    Args:
        host: The first.
        disk: The second.
        clock: Returns the time, in seconds.
    """

    def __init__(self, host: HostTier, disk: DiskTier, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(primary_tier=host, secondary_tiers=[disk])
        self.host, self.disk = host, disk
        self.num_chunks, self.policy, self.mark_unreadable = host.num_chunks, host.policy, host.mark_unreadable
        self._clock = clock
        self._awaited: dict[OffloadKey, float] = {}
        """Chunks that are being brought back, and since when."""
        host.on_unreadable = disk.forget

    def forget(self, chunks: Iterable[tuple[OffloadKey, ChunkStatus]], reason: str) -> None:
        """As `TierManager.forget`, and on disk, too: their conversation is over."""
        given_up = list(chunks)
        self.host.forget(given_up, reason)
        self.disk.forget(key for key, _ in given_up)

    def lookup(self, key: OffloadKey, req_context: ReqContext, *, exclude_tier_idx: int | None = None) -> LookupResult:
        """Say whether a chunk is there, is on its way, or must be computed, as one that is late."""
        return self._unless_late(key, super().lookup(key, req_context, exclude_tier_idx=exclude_tier_idx))

    def peek(self, key: OffloadKey) -> LookupResult:
        """Say whether a chunk can be loaded from host memory, is on its way there, or must be computed.

        Changes nothing: what is on disk only is not brought back, and what has come from there since the last look-up
        counts as on its way.
        """
        return self._unless_late(key, self.host.peek(key))

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Make chunks loadable, and copy them on to disk, but for those that are unwritten or for preemptions only."""
        unwritten = set(self.host.drop_unwritten(keys, req_context))
        written = [key for key in keys if key not in unwritten]
        turn, position = req_context.get_state(Turn), req_context.get_offload_key_position
        if turn is not None and turn.prompts_only:
            passing = [key for key in written if (position(key) or 0) > turn.prompt_tokens]
            self.host.complete_store(passing, req_context, success)
            written = [key for key in written if (position(key) or 0) <= turn.prompt_tokens]
        super().complete_store(written, req_context, success and bool(written))

    def reset_cache(self) -> None:
        """Forget everything, on disk too: the model's weights may have been replaced."""
        super().reset_cache()
        self._awaited.clear()
        self.disk.start_afresh()

    def _unless_late(self, key: OffloadKey, found: LookupResult) -> LookupResult:
        if found is LookupResult.HIT_PENDING and self._clock() - self._awaited.get(key, self._clock()) > PATIENCE_S:
            return LookupResult.MISS
        return found

    def _initiate_promotion(self, tier_idx: int, key: OffloadKey, req_context: ReqContext) -> bool:
        """Bring a chunk back, but not twice for the same request: two that push out each other's would never end."""
        if key in self._request_load_sources.get(req_context.req_id, ()):
            return False
        begun: bool = super()._initiate_promotion(tier_idx, key, req_context)
        if begun:
            self._awaited[key] = self._clock()
        return begun

    def _complete_promotion(self, job_metadata: JobMetadata, completed_job: JobResult) -> None:
        for key in job_metadata.transfer_job.keys:
            self._awaited.pop(key, None)
        super()._complete_promotion(job_metadata, completed_job)


def open_disk(
    spec: CPUOffloadingSpec, geometry: TierGeometry, rows: SharedRows, tier: KvTierConfig, **options: Any
) -> DiskBackedManager:
    """Return the books of both tiers, over the memory that the workers share.

    Raises:
        ConfigError: the disk can't be used, or not by all workers, or holds no chunk.
    """
    if tier.disk_bytes < rows.row_bytes:
        allowed = f"must be at least {rows.row_bytes / 2**30:.3g} for each replica, to hold one chunk"
        raise ConfigError("kv_tier.disk_gib", tier.disk_bytes / 2**30, allowed)
    root = os.path.join(tier.disk_dir, f"vllm-ext-kv-{spec.config.parallel.data_parallel_index}")
    files = DiskFiles(root, max_bytes=tier.disk_bytes, ttl_s=tier.ttl_s)
    try:
        host = HostTier(spec.num_chunks, mmap_region=rows.open_all(spec.num_chunks), **options)
        disk = DiskTier(spec, host.get_kv_memoryview(), files, format_facts(spec.config, geometry))
    except BaseException:
        files.close()
        raise
    logger.info("KV tier: at most %.2f GiB on disk, in %s", tier.disk_bytes / 2**30, root)
    return DiskBackedManager(host, disk)
