"""Where an attention backend puts each value of a page: asked of the backend itself, by writing numbers through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels.kv_quant.format import ITEM_BYTES, PageLayout

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Writes keys and values, both of shape [tokens, heads, head_dim], into the slots given of a cache."""

_BASE = 256
"""Whole numbers below it are exact in every type of KV."""
_NOTHING = -1.0


@dataclass(frozen=True)
class PackedPages:
    """Pages that no strides describe, as of kernels that pack values in pairs or tiles; a permutation does.

    Args:
        rows: What a page looks like once its values are put in order.
        places: By element of such a page: where it lies in the real one, int64, as bytes.
    """

    rows: PageLayout
    places: bytes

    @classmethod
    def of(cls, dtype: torch.dtype, index: npt.NDArray[np.int64]) -> PackedPages:
        """Return what ``index`` says, of shape [H, 2, N, D] as in `PageLayout.from_index`."""
        heads, _, tokens, channels = index.shape
        rows = PageLayout.rows(dtype, heads, channels, tokens)
        order = np.empty(index.size, np.int64)
        order[rows.index.ravel()] = index.ravel()
        return cls(rows, order.tobytes())

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """Where each element of an ordered page lies in the real one, shape [page_elements]."""
        return np.frombuffer(self.places, np.int64)


class UnknownLayout(ValueError):
    """A backend's pages can't be described, so that their KV can only be kept as it is."""


def probe(
    write: Write, cache: torch.Tensor, num_heads: int, head_dim: int, block_size: int
) -> PageLayout | PackedPages:
    """Return the layout of a backend's pages.

    Every value is given a number, and the numbers are written digit by digit, each as what a model would write.

    Args:
        write: What the backend does with new keys and values.
        cache: A cache of one block, contiguous; overwritten.
        num_heads: KV heads of this worker.
        head_dim: Channels of a head, the same for K and V.
        block_size: Tokens of a block.

    Raises:
        UnknownLayout: Some value is not in the page, or not alone in its place, or its type can't be quantised.
    """
    if cache.dtype not in ITEM_BYTES:
        raise UnknownLayout(f"KV of type {cache.dtype} can't be quantised")
    shape = (block_size, num_heads, head_dim)
    values = np.arange(2 * num_heads * block_size * head_dim).reshape(num_heads, 2, block_size, head_dim)
    if cache.numel() != values.size:
        raise UnknownLayout(f"a page holds {cache.numel()} values, not {values.size} (K and V of a block)")
    slots = torch.arange(block_size, device=cache.device)
    found = np.zeros(values.size, np.int64)
    digit = 1
    while digit < values.size:
        cache.fill_(_NOTHING)
        written = torch.from_numpy(values // digit % _BASE).to(cache.device, cache.dtype)
        write(
            written[:, 0].transpose(0, 1).reshape(shape).contiguous(),
            written[:, 1].transpose(0, 1).reshape(shape).contiguous(),
            cache,
            slots,
        )
        read = cache.flatten().cpu().double().numpy()
        if read.min() < 0:
            raise UnknownLayout("a page has places that its backend does not write")
        found += read.astype(np.int64) * digit
        digit *= _BASE
    if not np.array_equal(np.sort(found), np.arange(values.size)):
        raise UnknownLayout("a backend's page does not hold each value once, as it was written")
    index = np.empty(values.size, np.int64)
    index[found] = np.arange(values.size)
    index = index.reshape(values.shape)
    try:
        return PageLayout.from_index(cache.dtype, index)
    except ValueError:
        return PackedPages.of(cache.dtype, index)


def layout_of(layer: Any, cache: torch.Tensor) -> PageLayout | PackedPages:
    """Return the layout of a layer's pages, as vLLM's attention layer writes them.

    Args:
        layer: vLLM's attention layer, as its model runner knows it.
        cache: The layer's KV cache, of logical shape [num_blocks, heads, block_size, 2 * head_dim]; not written.

    Raises:
        UnknownLayout: See `probe`; or the backend has no such shape, or no method that only writes.
    """
    update = getattr(layer.impl, "do_kv_cache_update", None)
    if update is None:
        raise UnknownLayout(f"{type(layer.impl).__name__} writes KV only while it computes attention")
    if cache.dim() != 4 or cache.shape[-1] % 2:
        raise UnknownLayout(f"a cache of shape {tuple(cache.shape)} is not [blocks, heads, tokens, K and V]")
    _, num_heads, block_size, width = cache.shape
    if cache.stride(0) != num_heads * block_size * width:
        allowed = "layouts with layers and heads outside of blocks are not known; VLLM_KV_CACHE_LAYOUT=LBHNC is"
        raise UnknownLayout(f"a block's values are not together: strides {cache.stride()} ({allowed})")
    one_block = torch.empty_strided((1, *cache.shape[1:]), cache.stride(), dtype=cache.dtype, device=cache.device)
    flat = one_block.as_strided((one_block.numel(),), (1,))

    def write(keys: torch.Tensor, values: torch.Tensor, _: torch.Tensor, slots: torch.Tensor) -> None:
        update(layer, keys, values, one_block, slots)

    return probe(write, flat, num_heads, width // 2, block_size)
