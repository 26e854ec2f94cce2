"""How large chunks are, as both sides of the connector count."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)

from vllm_ext.config import ConfigError, ExtConfig, parse, to_dict
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.host.geometry import TierGeometry


def offloading(
    layers: tuple[int, ...] = (4,), *, block_sizes: tuple[int, ...] = (32,), dtype: str = "bfloat16", dcp: int = 1,
    page_bytes: int = 2 * 8 * 64 * 32 * 2,
) -> OffloadingConfig:  # fmt: skip
    """What vLLM says of groups of so many layers, each of 8 heads of 64 channels in blocks of 32 tokens."""
    groups = tuple(
        OffloadingGroupConfig(tokens_per_block=size, layer_names=tuple(f"{g}.{i}" for i in range(count)), group_id=g)
        for g, (count, size) in enumerate(zip(layers, block_sizes * len(layers), strict=False))
    )
    parallel = OffloadingParallelConfig(0, 1, 1, 1, 1, dcp, 0, 1, None, True)
    return OffloadingConfig(
        groups=groups,
        worker_kv_bytes_per_block=max(layers) * page_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="test",
        model=OffloadingModelConfig(name="m", dtype=dtype),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=1),
        parallel=parallel,
    )


def test_chunks_as_they_are() -> None:
    geometry = TierGeometry.of(offloading((4, 3)), 16)
    assert geometry.chunk_bytes == 4 * 65_536
    assert geometry.record_bytes == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_records_are_as_large_as_their_format_says(dtype: str) -> None:
    """Though the scheduler's side knows neither heads nor strides."""
    layout = PageLayout.transposed_keys(getattr(torch, dtype), 8, 64, 32)
    geometry = TierGeometry.of(offloading(dtype=dtype), 8)
    assert geometry.record_bytes == RecordFormat(layout).record_bytes
    assert geometry.chunk_bytes == 4 * geometry.record_bytes
    assert 4 * layout.page_bytes / geometry.chunk_bytes == pytest.approx(16 / 9), "of 32 tokens"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "fp8_e4m3"}, "this model's is fp8_e4m3"),
        ({"layers": (2, 2), "block_sizes": (16, 32)}, r"\[16, 32\] tokens"),
        ({"dcp": 2}, "whole on each worker"),
        ({"page_bytes": 1001}, "K and V of one shape"),
    ],
)
def test_models_whose_kv_cannot_be_quantised_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_tier.bits=8: .*{said}.*; use 16"):
        TierGeometry.of(offloading(**options), 8)  # type: ignore[arg-type]
    assert TierGeometry.of(offloading(**options), 16).chunk_bytes > 0  # type: ignore[arg-type]


# --- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("gib", -1), ("gib", "4"), ("gib", float("inf")), ("bits", 4), ("bits", True), ("bits", "8"),
        ("policy", "fifo"), ("store", "never"), ("prompt_only", "yes"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"vllm_ext.kv_tier.{field}=") as caught:
        parse({"kv_tier": {field: value}})
    assert caught.value.field == f"kv_tier.{field}"


def test_options_survive_their_dictionary() -> None:
    config = parse({"kv_tier": {"gib": 2, "bits": 8, "policy": "arc", "store": "ahead", "prompt_only": True}})
    assert config.kv_tier == KvTierConfig(gib=2, bits=8, policy="arc", store="ahead", prompt_only=True)
    assert parse(to_dict(config)) == config
    assert ExtConfig().kv_tier.host_bytes == 0
    assert config.kv_tier.host_bytes == 2 * 2**30
