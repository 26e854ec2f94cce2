"""An arena of 8-bit records in the KV memory of a model that is not there."""

from __future__ import annotations

from dataclasses import replace

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

from vllm_ext.config.errors import ConfigError
from vllm_ext.kernels.kv_quant.format import ITEM_BYTES
from vllm_ext.kv.int8.geometry import SHARE, with_arenas

_LAYERS = 32
"""Where nothing is known of the model: as many as most have."""
_CHANNELS = 1024
"""Likewise: of keys and values of a token in one layer."""


def simulated_arena(
    config: KVCacheConfig, share: float, max_model_len: int, *, bytes_per_block: int = 0, layers: int = _LAYERS,
    dtype: str = "bfloat16", unpacks: bool = True,
) -> KVCacheConfig:  # fmt: skip
    """Return the configuration of an engine that keeps a share of its KV memory for records.

    Args:
        config: One group of full attention, with as many blocks as the memory would hold.
        share: Of the memory.
        max_model_len: Tokens of the longest request.
        bytes_per_block: Of all layers; 0: nothing is known.
        layers: Of the model.
        dtype: Of its KV.
        unpacks: Whether a kernel that knows blocks only may serve.

    Raises:
        ConfigError: the memory can't be divided so.
    """
    (group,) = config.kv_cache_groups
    block_size, kind = group.kv_cache_spec.block_size, getattr(torch, dtype, None)
    if kind not in ITEM_BYTES:
        raise ConfigError(SHARE, share, f"needs KV of 16 or 32 bits, and this model's is {dtype}; use 0")
    page = (bytes_per_block or layers * block_size * _CHANNELS * ITEM_BYTES[kind]) // layers
    channels = page // (2 * block_size * ITEM_BYTES[kind])
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=channels, dtype=kind)
    names = [f"layer.{number}" for number in range(layers)]
    stride = config.num_blocks * spec.page_size_bytes
    tensor = KVCacheTensor(layers * stride, names, layer_stride=stride, block_stride=spec.page_size_bytes)
    whole = replace(config, kv_cache_tensors=[tensor], kv_cache_groups=[KVCacheGroupSpec(names, spec)])
    (divided,) = with_arenas([whole], share, max_model_len, unpacks=unpacks)
    return divided
