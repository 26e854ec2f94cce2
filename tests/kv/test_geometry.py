"""How large chunks are, as both sides of the connector count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vllm_ext.config import ConfigError
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.host.geometry import TierGeometry

from .tier_worker_parts import offloading_config


def sized(bits: int, **options: Any) -> TierGeometry:
    """Of four layers, each of 8 heads of 64 channels in blocks of 32 tokens."""
    page_bytes = 2 * 8 * 64 * 32 * 2
    usual = {"layers": (4,), "block_sizes": (32,), "page_bytes": page_bytes}
    return TierGeometry.of(offloading_config({}, **{**usual, **options}), bits)


def test_chunks_as_they_are() -> None:
    geometry = sized(16, layers=(4, 3))
    assert (geometry.chunk_bytes, geometry.record_bytes) == (4 * 65_536, 0)
    assert sized(16, page_bytes=1001).chunk_bytes == 4032, "whole cache lines"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_records_are_as_large_as_their_format_says(dtype: str) -> None:
    """Though the scheduler's side knows neither heads nor strides."""
    layout = PageLayout.transposed_keys(getattr(torch, dtype), 8, 64, 32)
    geometry = sized(8, dtype=dtype)
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
        sized(8, **options)
    assert sized(16, **options).chunk_bytes > 0
