"""How the device's memory is divided, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)

from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.int8.geometry import ArenaGeometry, with_arenas

SHAPE: dict[str, Any] = {"block_size": 64, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}
SPEC = FullAttentionSpec(**SHAPE)
PAGE = SPEC.page_size_bytes


def config(num_blocks: int = 40, num_layers: int = 4, spec: Any = SPEC, **tensor: Any) -> KVCacheConfig:
    layers = [f"layer-{i}" for i in range(num_layers)]
    page = spec.page_size_bytes
    placed = KVCacheTensor(
        size=num_layers * num_blocks * page, layers=layers, layer_stride=num_blocks * page, block_stride=page
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[replace(placed, **tensor)],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec)],
    )


def divided(share: float, **given: Any) -> ArenaGeometry:
    (made,) = with_arenas([config(**given)], share, max_model_len=256)
    geometry = ArenaGeometry.of(made)
    assert geometry is not None
    return geometry


def test_sixteen_pages_hold_thirty_records() -> None:
    """Of 8192 values in 16 bits: 8192 codes, and a minimum and a scale for each of 128 channels."""
    geometry = ArenaGeometry(
        num_blocks=24, arena_pages=16, scratch_pages=30, num_layers=4, page_bytes=16384, record_bytes=8704
    )
    assert geometry.num_records == 30
    assert (geometry.stride_pages, geometry.total_bytes) == (40, (4 * 40 + 30) * 16384)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("layers", [1, 4, 32])
def test_no_more_memory_is_taken_and_every_record_has_a_scratch_page(share: float, layers: int) -> None:
    before = config(num_blocks=400, num_layers=layers)
    (made,) = with_arenas([before], share, max_model_len=256)
    geometry, (tensor,) = ArenaGeometry.of(made), made.kv_cache_tensors
    assert geometry is not None
    assert geometry.num_blocks == made.num_blocks
    assert tensor.size == geometry.total_bytes <= before.kv_cache_tensors[0].size
    assert geometry.scratch_pages == geometry.num_records
    assert geometry.arena_pages == pytest.approx(share * geometry.stride_pages, abs=2)
    lost = before.kv_cache_tensors[0].size - tensor.size
    assert lost < (layers + 2) * PAGE, "no more than what layers of whole pages leave over"


@pytest.mark.parametrize("layers", [1, 4])
def test_where_only_our_kernel_serves_nothing_is_kept_for_unpacking(layers: int) -> None:
    before = config(num_blocks=400, num_layers=layers)
    (made,) = with_arenas([before], 0.25, max_model_len=256, unpacks=False)
    geometry = ArenaGeometry.of(made)
    assert geometry is not None
    assert (geometry.num_blocks, geometry.arena_pages, geometry.scratch_pages) == (300, 100, 0)
    assert geometry.total_bytes == before.kv_cache_tensors[0].size
    assert geometry.num_records > divided(0.25, num_blocks=400, num_layers=layers).num_records


def test_workers_with_other_numbers_of_layers_get_as_many_blocks_and_records() -> None:
    """Pipeline stages: ids mean the same to all of them."""
    made = with_arenas([config(num_layers=4), config(num_layers=3)], 0.4, max_model_len=256)
    first, second = map(ArenaGeometry.of, made)
    assert first is not None
    assert second is not None
    assert (first.num_blocks, first.num_records) == (second.num_blocks, second.num_records)
    assert second.total_bytes <= config(num_layers=3).kv_cache_tensors[0].size


def test_without_an_arena_there_is_no_geometry() -> None:
    assert ArenaGeometry.of(config()) is None


@pytest.mark.parametrize(
    ("given", "share", "message"),
    [
        ({"spec": SlidingWindowSpec(**SHAPE, sliding_window=128)}, 0.4, "KV is SlidingWindowSpec; use 0"),
        ({"spec": replace(SPEC, dtype=torch.float8_e4m3fn)}, 0.4, "float8_e4m3fn; use 0"),
        ({"spec": replace(SPEC, head_size_v=64)}, 0.4, "needs keys and values of one shape; use 0"),
        ({"layer_stride": PAGE, "block_stride": 4 * PAGE}, 0.4, "VLLM_KV_CACHE_LAYOUT=LBHNC"),
        ({}, 0.001, "device_int8_share=0.001: must be more"),
        ({"num_blocks": 10}, 0.5, r"must be less, .* leaves \d+, and one request of 256 tokens needs 5"),
    ],
)  # fmt: skip
def test_what_can_not_be_divided_is_refused(given: dict[str, Any], share: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_arenas([config(**given)], share, max_model_len=256)


def test_an_arena_without_a_record_is_an_error() -> None:
    with pytest.raises(ValueError, match="arena_pages=0"):
        ArenaGeometry(num_blocks=2, arena_pages=0, scratch_pages=0, num_layers=1, page_bytes=64, record_bytes=64)
