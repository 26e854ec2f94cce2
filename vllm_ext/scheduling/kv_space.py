"""KV block arithmetic on vLLM's manager: what is free, what an admission needs, what a preemption returns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


class KvSpace:
    """Counts KV blocks for one scheduler. Exact for full attention; other groups hold fewer blocks than counted."""

    def __init__(self, scheduler: Scheduler, reserve: float = 0.0) -> None:
        """Take the scheduler, and the share of the blocks that admissions leave to what runs, if vLLM has no larger."""
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        reserved = int(reserve * self._manager.block_pool.num_gpu_blocks)
        self._manager.watermark_blocks = max(self._manager.watermark_blocks, reserved)
        self._crosses_gaps = getattr(scheduler, "gaps", None) is not None
        groups = scheduler.kv_cache_config.kv_cache_groups
        self._block_sizes = [group.kv_cache_spec.block_size for group in groups]
        self.only_full_attention = all(isinstance(group.kv_cache_spec, FullAttentionSpec) for group in groups)
        """False for sliding-window, Mamba and hybrid models, where the counts here are upper bounds."""

    def free_blocks(self) -> int:
        """Return the blocks an admission may take now; vLLM keeps its watermark while anything runs."""
        free: int = self._manager.block_pool.get_num_free_blocks()
        watermark: int = self._manager.watermark_blocks
        return free - watermark if self._scheduler.running else free

    def blocks_to_admit(self, request: Request) -> int:
        """Return the blocks vLLM wants free to admit ``request``, as if nothing of it were cached.

        With ``scheduler_reserve_full_isl`` that is the whole sequence, else the chunk the token budget allows.
        """
        scheduler = self._scheduler
        tokens = request.num_tokens
        if not scheduler.scheduler_reserve_full_isl:
            tokens = min(tokens, scheduler.max_num_scheduled_tokens)
        return self.blocks_for(tokens)

    def total_blocks(self) -> int:
        """Return the blocks that requests can hold; vLLM keeps one, the null block, for itself."""
        blocks: int = self._manager.block_pool.num_gpu_blocks - 1
        return blocks

    @property
    def block_size(self) -> int:
        """Tokens of a KV block; of the smallest, where a model has several sizes."""
        return min(self._block_sizes, default=1)

    def unused_blocks(self) -> int:
        """Return the blocks that nobody holds, the watermark not taken off."""
        free: int = self._manager.block_pool.get_num_free_blocks()
        return free

    def cached_blocks_in_use(self, request: Request) -> int:
        """Return the blocks that a waiting request would share with those who hold them: it needs no room for these.

        Only full attention with one group of layers has prefixes that are told so simply; 0 for others.
        """
        if not self.only_full_attention or len(self._block_sizes) != 1 or not self._manager.enable_caching:
            return 0
        pool, shared = self._manager.block_pool, 0
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self._block_sizes[0]]:
            cached = pool.get_cached_block(block_hash, [0])
            if cached is None or cached[0].ref_cnt == 0:
                break  # an ancestor that nobody holds takes a free block, and so do those after it
            shared += 1
        return shared

    def blocks_for(self, tokens: int) -> int:
        """Return the blocks of a sequence of so many tokens, nothing of it shared."""
        scheduler = self._scheduler
        tokens = min(tokens + scheduler.num_lookahead_tokens, scheduler.max_model_len)
        return sum([-(-tokens // size) for size in self._block_sizes])

    def blocks_at_bound(self, requests: Iterable[Request], min_tokens: int) -> int:
        """Return the blocks of ``requests`` once each is as long as its client allows, and at least ``min_tokens``."""
        scheduler = self._scheduler
        ahead, longest = scheduler.num_lookahead_tokens, scheduler.max_model_len
        lengths = [min(max(r.num_prompt_tokens + r.max_tokens, min_tokens) + ahead, longest) for r in requests]
        return sum([-(-tokens // size) for size in self._block_sizes for tokens in lengths])

    def blocks_freed_by(self, request: Request) -> int:
        """Return the blocks that would be free after preempting ``request``; shared prefix blocks stay held."""
        freed = 0
        for blocks in self._manager.get_blocks(request.request_id).blocks:
            if self._crosses_gaps:
                freed += sum(block.ref_cnt <= 1 for block in blocks)
                continue
            shared = 0
            for block in blocks:  # what is shared is shared from the front
                if block.ref_cnt <= 1:
                    break
                shared += 1
            freed += len(blocks) - shared
        return freed
