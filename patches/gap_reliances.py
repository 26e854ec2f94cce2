"""What continuing across gaps in kept KV relies on in vLLM's block manager without replacing it.

`vllm_ext.kv.gaps.manager` is a subclass of vLLM's manager of full attention, brought in through its registry of cache
specs, and `vllm_ext.kv.free_queue` one of its queue of free blocks. Can go: when vLLM's manager finds blocks behind a
missing one.
"""

from __future__ import annotations

from vllm_ext.hooks.patch import Reliance
from vllm_ext.patches.gap_hooks import gap_reliance

_MANAGER = "vllm.v1.core.single_type_kv_cache_manager"
_SINGLE, _FULL = f"{_MANAGER}:SingleTypeKVCacheManager", f"{_MANAGER}:FullAttentionManager"
_QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
_POOL = "vllm.v1.core.block_pool:BlockPool"


def _reliance(target: str, why: str, *fingerprints: str) -> Reliance:
    made: Reliance = gap_reliance(
        target, why, *fingerprints, remove_when="vLLM's block manager finds blocks behind a missing one"
    )
    return made


HOOKS = (
    _reliance(
        f"{_SINGLE}.get_num_blocks_to_allocate",
        "counts blocks to admit a request; ours counts those that are kept behind gaps",
        "d8469238774abc79",
    ),
    _reliance(
        f"{_SINGLE}.allocate_new_blocks",
        "extends a request's table of blocks; ours has filled it up to the end of what is kept",
        "aad1093a46be09ee",
    ),
    _reliance(f"{_FULL}.cache_blocks", "is called with a virtual number of tokens by us", "87cfe37550740a11"),
    _reliance(
        f"{_SINGLE}.cache_blocks",
        "enters blocks from where it was the last time, which we set",
        *["fcf41c88a9e59339"] * 2,
        "ecf5c5d305179769",
    ),
    _reliance(
        f"{_SINGLE}.pop_blocks_for_free",
        "ends what is known of a request",
        *["b7517a841242dfdf"] * 2,
        "6914fc6eeef94bf4",
    ),
    _reliance(
        "vllm.v1.core.sched.scheduler:Scheduler._get_local_prefix_cache_hit",
        "is asked once for each attempt to admit a request; its number of tokens is ours",
        *["482bba5e0eb6143e"] * 2,
        "1bcc1b0a7b0646d0",
    ),
    _reliance(
        "vllm.v1.core.sched.scheduler:Scheduler._reserve_prefill_lookahead",
        "has the last word about the size of a chunk",
        "83426d8ee5ce4c3b",
    ),
    _reliance(
        f"{_QUEUE}.popleft_n",
        "is the one choice of a victim",
        "04d12ace9b2f8560",
        *["b5558bf0ec6f359d"] * 2,
    ),
    _reliance(
        f"{_QUEUE}.append_n",
        "is where blocks come back",
        "00e63b0dac240ae7",
        *["da40b12529c057ce"] * 2,
    ),
    _reliance(
        f"{_POOL}.free_blocks",
        "tells blocks that hold something from others",
        *["d2a858d46dacaa21"] * 2,
        "df7316205222b6d0",
    ),
)
