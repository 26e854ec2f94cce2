"""Pages of vLLM's CUDA backends in each of vLLM's physical layouts: found by probing, or refused.

FlashAttention, Triton and FlashInfer write alike: the cache's logical view [blocks, heads, tokens, K and V], with
tokens before heads, split into K and V, and tokens put into slots. Their kernels need a GPU; here torch does the same.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kv.host.layout import UnknownLayout, layout_of

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 5, 4, 16, 8


def update(layer: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    for side, written in zip(cache.transpose(1, 2).split(DIM, dim=-1), (keys, values), strict=True):
        side[slots // TOKENS, slots % TOKENS] = written


def view_of_a_layer(layout: KVCacheLayout, layers: int = LAYERS, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    sizes = (layers, BLOCKS, HEADS, TOKENS, 2 * DIM)
    physical = torch.zeros([sizes[axis] for axis in layout.stride_order], dtype=dtype)
    logical = physical.permute([layout.stride_order.index(axis) for axis in range(5)])
    assert logical.shape == sizes
    return logical[0]


def find(cache: torch.Tensor) -> PageLayout:
    return layout_of(SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update)), cache)


def test_heads_before_tokens_are_rows() -> None:
    """The layout that vLLM's connector asks for."""
    assert find(view_of_a_layer(KVCacheLayout.LBHNC)) == PageLayout.rows(torch.bfloat16, HEADS, DIM, TOKENS)


def test_tokens_before_heads_are_found_too() -> None:
    found = find(view_of_a_layer(KVCacheLayout.LBNHC))
    assert (found.head_stride, found.k.token_stride, found.k.channel_stride) == (2 * DIM, HEADS * 2 * DIM, 1)
    assert (found.k.offset, found.v.offset) == (0, DIM)


@pytest.mark.parametrize("layout", [KVCacheLayout.LHBNC, KVCacheLayout.BLHNC, KVCacheLayout.BLNHC, KVCacheLayout.BHLNC])
def test_blocks_that_are_not_of_one_layer_and_together_are_refused(layout: KVCacheLayout) -> None:
    with pytest.raises(UnknownLayout, match="not together"):
        find(view_of_a_layer(layout))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn], ids=str)
def test_caches_that_are_quantised_already_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnknownLayout, match="can't be quantised"):
        find(view_of_a_layer(KVCacheLayout.LBHNC, dtype=dtype))
