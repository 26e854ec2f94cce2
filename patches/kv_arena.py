"""Leaves a part of the device's KV memory to records of 8 bits.

Upstream symbol: ``get_kv_cache_configs``, with which an engine core divides the memory of all its workers into blocks.
Its result is changed, and not that of the function that makes one worker's, since workers may have more or less memory,
and vLLM makes their numbers of blocks equal at the end. Seams tried: a backend may change its layers' KV specs, which
say how large a block is and not how many there are; ``--num-gpu-blocks-override`` makes the memory smaller, too.
Breaks without: nothing stays on the device in 8 bits. Can go: when vLLM lets a scheduler or a backend keep a part of
the KV memory.

It does nothing unless ``kv_tier.device_int8_share`` is greater than 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_ext.config.errors import KEY
from vllm_ext.hooks.feature import Feature

logger = logging.getLogger("vllm.vllm_ext.kv")
_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"


def _get_kv_cache_configs(original: Callable[..., Any], vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
    configs = original(vllm_config, *args, **kwargs)
    options = (vllm_config.additional_config or {}).get(KEY) or {}
    share = (options.get("kv_tier") or {}).get("device_int8_share") or 0.0
    if not share or not all(config.kv_cache_groups for config in configs):
        return configs
    from vllm_ext.attention.support import chosen_kernel
    from vllm_ext.config.attention import OWN
    from vllm_ext.kv.int8.geometry import ArenaGeometry, with_arenas

    unpacks = chosen_kernel(vllm_config) != OWN
    divided = with_arenas(configs, share, vllm_config.model_config.max_model_len, unpacks=unpacks)
    geometry = ArenaGeometry.of(divided[0])
    assert geometry is not None
    logger.info(
        "KV memory: %d blocks, %d records of 8 bits and %d scratch pages, where %d blocks would have been",
        geometry.num_blocks, geometry.num_records, geometry.scratch_pages, configs[0].num_blocks,
    )  # fmt: skip
    return divided


FEATURE = Feature(
    name="KV in 8 bits on the device",
    breaks_without="what is evicted on the device is dropped, or goes to host memory",
    remove_when="vLLM lets a scheduler or an attention backend keep a part of the KV memory",
    leave_out="kv_tier.device_int8_share",
    optional=True,
    only=("0.32.0",),
)
OVERRIDING = ("vllm_ext.kv.int8.manager:RecordManager",)
HOOKS = (
    FEATURE.patch(
        "vllm.v1.core.kv_cache_utils:get_kv_cache_configs",
        "says how many blocks the memory of each worker is divided into",
        _get_kv_cache_configs,
        also_rebind=("vllm.v1.engine.core:get_kv_cache_configs",),
    ),
    *FEATURE.relies(
        {
            f"{_POOL}.get_new_blocks": "evicts what the blocks hold that it gives away",
            f"{_POOL}._maybe_evict_cached_block": "is called for each of them; there a block moves into a record",
            f"{_POOL}.move_block_hashes": "lets vLLM find a record where it found the block",
            f"{_POOL}.reset_prefix_cache": "forgets what all blocks hold, records among them",
            f"{_MANAGER}._apply_cow": "copies a partly filled block for a request; a copy from a record becomes a move",
            "vllm.v1.kv_cache_interface:create_kv_cache_views": "lays out layers and blocks by the strides of the "
            "configuration",
        }
    ),
)
