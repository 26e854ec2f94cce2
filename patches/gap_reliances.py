"""What continuing across gaps in kept KV relies on in vLLM's block manager without replacing it.

`vllm_ext.kv.partial_prefix.manager` is a subclass of vLLM's manager of full attention, brought in through its registry
of cache specs, and `vllm_ext.kv.eviction.free_queue` one of its queue of free blocks. Can go: when vLLM's manager finds
blocks behind a missing one.
"""

from __future__ import annotations

from vllm_ext.hooks.feature import Feature

FEATURE = Feature(
    name="gaps in kept KV",
    breaks_without="conversations are computed again from the first block that is missing",
    remove_when="vLLM's block manager finds blocks behind a missing one",
    leave_out="kv_tier.gaps",
    optional=True,
)
OVERRIDING = ("vllm_ext.kv.partial_prefix.manager:GapManager", "vllm_ext.kv.eviction.free_queue:RetentionQueue")
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager"
_SINGLE = f"{_MANAGER}:SingleTypeKVCacheManager"

HOOKS = FEATURE.relies(
    {
        f"{_SINGLE}.get_num_blocks_to_allocate": "counts blocks to admit a request; ours counts those that are kept "
        "behind gaps",
        f"{_SINGLE}.allocate_new_blocks": "extends a request's table of blocks; ours has filled it up to the end of "
        "what is kept",
        f"{_MANAGER}:FullAttentionManager.cache_blocks": "is called with a virtual number of tokens by us",
        f"{_SINGLE}.cache_blocks": "enters blocks from where it was the last time, which we set",
        "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit": "is asked once for each attempt to admit "
        "a request; its number of tokens is ours",
        "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead": "has the last word about the size of a "
        "chunk",
        "vllm.v1.core.block_pool:BlockPool.free_blocks": "tells blocks that hold something from others",
    }
)
