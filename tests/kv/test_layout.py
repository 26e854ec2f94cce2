"""What a backend's pages look like, found out by writing through it."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kv.host.layout import PackedPages, UnknownLayout, layout_of, probe

TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


class Backend:
    """Writes as a layout says."""

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout

    def write(self, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        tokens = slots.numpy()
        for side, source in enumerate((keys, values)):
            places = self.layout.index[:, side][:, tokens].transpose(1, 0, 2)
            cache[torch.from_numpy(np.ascontiguousarray(places))] = source


@TYPES
@pytest.mark.parametrize("make", [PageLayout.rows, PageLayout.transposed_keys], ids=["rows", "transposed-keys"])
@pytest.mark.parametrize(("heads", "dim", "tokens"), [(1, 2, 2), (3, 16, 8), (8, 128, 32)])
def test_any_strides_are_found(make, dtype: torch.dtype, heads: int, dim: int, tokens: int) -> None:  # type: ignore[no-untyped-def]
    """The largest page has 65,536 values, so that two digits are written, and three where it is one more."""
    layout = make(dtype, heads, dim, tokens)
    cache = torch.zeros(layout.page_elements, dtype=dtype)
    assert probe(Backend(layout).write, cache, heads, dim, tokens) == layout


@TYPES
@pytest.mark.parametrize(("isa", "tokens", "dim"), [("vec", 32, 64), ("vec16", 16, 32), ("vec16", 16, 48)])
def test_vllms_cpu_backend_transposes_keys(dtype: torch.dtype, isa: str, tokens: int, dim: int) -> None:
    heads = 2

    def update(
        layer: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        sides = cache.view(cache.shape[0], heads, 2 * tokens, dim).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(keys, values, *sides, slots, isa)

    layer = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update))
    cache = torch.zeros(4, heads, tokens, 2 * dim, dtype=dtype)
    assert layout_of(layer, cache) == PageLayout.transposed_keys(dtype, heads, dim, tokens)
    assert not cache.any(), "the model's own cache is not written"


def test_values_of_a_page_that_strides_cannot_describe_are_found_one_by_one() -> None:
    layout = PageLayout.rows(torch.float32, 1, 4, 4)
    order = torch.randperm(layout.page_elements, generator=torch.Generator().manual_seed(0))

    def shuffled(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        written = cache.clone()
        Backend(layout).write(keys, values, written, slots)
        cache[:] = written[order]

    found = probe(shuffled, torch.zeros(layout.page_elements), 1, 4, 4)
    assert isinstance(found, PackedPages)
    assert found.rows == layout
    page = torch.arange(layout.page_elements)
    assert torch.equal(page[order][torch.from_numpy(found.order.copy())], page), "ordered, it is the page again"
    assert found == probe(shuffled, torch.zeros(layout.page_elements), 1, 4, 4)


@pytest.mark.parametrize(
    ("keeps", "writes", "said"),
    [(slice(3, 4), 1, "does not write"), (slice(0), 2, "each value once")],
    ids=["a place for something else", "values that are rounded"],
)
def test_a_page_that_does_not_hold_each_value_is_refused(keeps: slice, writes: int, said: str) -> None:
    layout = PageLayout.rows(torch.float32, 1, 8, 8)

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        Backend(layout).write(keys // writes * writes, values, cache, slots)
        cache[keeps] = -1.0

    with pytest.raises(UnknownLayout, match=said):
        probe(write, torch.zeros(layout.page_elements), 1, 8, 8)


@pytest.mark.parametrize(
    ("cache", "said"),
    [
        (torch.zeros(4, 2, 16, 32, dtype=torch.float8_e4m3fn), "float8"),
        (torch.zeros(4, 16, 576), "shape"),
        (torch.zeros(4, 3, 2, 16, 32)[:, 1], "not together"),
        (None, "SimpleNamespace writes KV only while"),
    ],
)
def test_caches_and_backends_of_other_kinds_are_refused(cache: torch.Tensor | None, said: str) -> None:
    writes = {} if cache is None else {"do_kv_cache_update": lambda *_: None}
    layer = SimpleNamespace(impl=SimpleNamespace(**writes))
    with pytest.raises(UnknownLayout, match=said):
        layout_of(layer, torch.zeros(1, 1, 16, 32) if cache is None else cache)


# --- CUDA: FlashAttention, Triton and FlashInfer write alike; their kernels need a GPU, here torch does the same ------

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 5, 4, 16, 8


def write_as_on_cuda(
    layer: object, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
) -> None:
    for side, written in zip(cache.transpose(1, 2).split(DIM, dim=-1), (keys, values), strict=True):
        side[slots // TOKENS, slots % TOKENS] = written


def view_of_a_layer(layout: KVCacheLayout, layers: int = LAYERS, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    sizes = (layers, BLOCKS, HEADS, TOKENS, 2 * DIM)
    physical = torch.zeros([sizes[axis] for axis in layout.stride_order], dtype=dtype)
    logical = physical.permute([layout.stride_order.index(axis) for axis in range(5)])
    assert logical.shape == sizes
    return logical[0]


def find(cache: torch.Tensor) -> PageLayout:
    return layout_of(SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=write_as_on_cuda)), cache)


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
