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
from vllm_ext.hooks.patch import Patch, Reliance

logger = logging.getLogger("vllm.vllm_ext.kv")
_VERSIONS = ("0.32.0",)
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
    from vllm_ext.kv.device.geometry import ArenaGeometry, with_arenas

    unpacks = chosen_kernel(vllm_config) != OWN
    divided = with_arenas(configs, share, vllm_config.model_config.max_model_len, unpacks=unpacks)
    geometry = ArenaGeometry.of(divided[0])
    assert geometry is not None
    logger.info(
        "KV memory: %d blocks, %d records of 8 bits and %d scratch pages, where %d blocks would have been",
        geometry.num_blocks, geometry.num_records, geometry.scratch_pages, configs[0].num_blocks,
    )  # fmt: skip
    return divided


def _facts(why: str, fingerprint: str) -> dict[str, Any]:
    return {
        "why": why,
        "feature": "KV in 8 bits on the device",
        "breaks_without": "what is evicted on the device is dropped, or goes to host memory",
        "remove_when": "vLLM lets a scheduler or an attention backend keep a part of the KV memory",
        "leave_out": "kv_tier.device_int8_share",
        "optional": True,
        "verified": dict.fromkeys(_VERSIONS, fingerprint),
    }


HOOKS = (
    Patch(
        target="vllm.v1.core.kv_cache_utils:get_kv_cache_configs",
        also_rebind=("vllm.v1.engine.core:get_kv_cache_configs",),
        replacement=_get_kv_cache_configs,
        **_facts("says how many blocks the memory of each worker is divided into", "4988dc18e3c7316b"),
    ),
    Reliance(
        target=f"{_POOL}.get_new_blocks", **_facts("evicts what the blocks hold that it gives away", "4fd973f686102289")
    ),
    Reliance(
        target=f"{_POOL}._maybe_evict_cached_block",
        **_facts("is called for each of them, and is where a block moves into a record", "a26b2091cc4164db"),
    ),
    Reliance(
        target=f"{_POOL}.move_block_hashes",
        **_facts("lets vLLM find a record where it found the block", "e619b9c1b372e697"),
    ),
    Reliance(
        target=f"{_POOL}.reset_prefix_cache",
        **_facts("forgets what all blocks hold, records among them", "416aaccb4b5016c6"),
    ),
    Reliance(
        target=f"{_MANAGER}._apply_cow",
        **_facts("copies a partly filled block for a request; a copy from a record becomes a move", "9e1789ea53781ef6"),
    ),
    Reliance(
        target="vllm.v1.kv_cache_interface:create_kv_cache_views",
        **_facts("lays out layers and blocks by the strides of the configuration", "3b010669e321153c"),
    ),
)
