"""The format on a GPU, in Triton: gather and quantise, or dequantise and scatter, in one pass over paged blocks.

A program holds one head's K or V of a block (64 tokens of 128 channels are 16 KiB) in registers: each value is read
once and each code written once. One launch serves all layers, whose caches it finds by their addresses: a launch costs
the engine's thread some microseconds, and a model has dozens of layers. Multiplications and additions are not fused,
and divisions rounded as IEEE says, so that results are those of `reference`, bit for bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.kv_quant import format as definition
from vllm_ext.kernels.kv_quant.format import RecordFormat

_LEVELS = tl.constexpr(float(definition.LEVELS))
_LEAST_SCALE = tl.constexpr(definition.LEAST_SCALE)
_ROUNDER = tl.constexpr(definition.ROUNDER)
_VALUES_PER_WARP = 2048
_MOST_WARPS = 16
_VECTOR_BYTES = 16


class PagedCaches:
    """Caches of several layers on one device, and where they are, for kernels that serve all of them.

    Args:
        tensors: Each of shape [num_blocks, page_elements], in one type, contiguous.

    Attributes:
        addresses: Of the tensors, shape [tensors], int64, on their device.
        alignment: Bytes that every address is a multiple of, at most 16.

    Raises:
        ValueError: There is none, or they differ in type or device, or one is not contiguous.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        kinds = {(tensor.dtype, tensor.device) for tensor in tensors}
        if len(kinds) != 1:
            raise ValueError(f"tensors: must be of one type and on one device, not {sorted(map(str, kinds))}")
        for tensor in tensors:
            if not tensor.is_contiguous():
                raise ValueError(f"tensors: a cache's pages must lie together, and its strides are {tensor.stride()}")
        self.tensors = list(tensors)
        found = tuple(tensor.data_ptr() for tensor in tensors)
        self.addresses = _addresses(found, tensors[0].device)
        self.alignment = math.gcd(_VECTOR_BYTES, *found)


def quantise(
    pages: torch.Tensor, block_ids: torch.Tensor, records: torch.Tensor, slots: torch.Tensor, fmt: RecordFormat
) -> torch.Tensor:
    """Write the records of blocks, on the current stream.

    Args:
        pages: One layer's cache, shape [num_blocks, page_elements], in the layout's type, contiguous.
        block_ids: Blocks to quantise, shape [n], int64.
        records: Where records go, shape [places, record_bytes], uint8, contiguous; in device or mapped host memory.
        slots: Place of each block's record, shape [n], int64.
        fmt: What a record looks like.

    Returns:
        Which of the records hold, shape [n], bool: see `reference.quantise`. The others are rubbish.
    """
    holds = torch.ones(len(slots), dtype=torch.int32, device=pages.device)
    quantise_layers(PagedCaches([pages]), _first(pages.device), block_ids, records, slots, holds, fmt)
    return holds.bool()


def quantise_layers(
    caches: PagedCaches, which: torch.Tensor, block_ids: torch.Tensor, records: torch.Tensor, slots: torch.Tensor,
    holds: torch.Tensor, fmt: RecordFormat,
) -> None:  # fmt: skip
    """Write the records of the same blocks in several layers, in one launch on the current stream.

    Args:
        caches: Layers' caches, in the layout's type.
        which: Layers to write, shape [layers], int64. Layer i's record goes to place ``slots[block] + i``.
        block_ids: See `quantise`.
        records: See `quantise`.
        slots: Place of layer 0's record of each block, shape [n], int64.
        holds: Shape [n], int32; set to 0 where a layer's record of that block does not hold, else left alone.
        fmt: What a record looks like.
    """
    if len(slots) and len(which):
        most = torch.finfo(fmt.layout.dtype).max
        _quantise[_grid(fmt, slots, which)](
            caches.addresses, which, block_ids, records, records.view(fmt.layout.dtype), slots, holds,
            *_geometry(fmt), **_shape(fmt), MOST=most, ALIGNMENT=caches.alignment,
        )  # fmt: skip


def dequantise(
    records: torch.Tensor, slots: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor, fmt: RecordFormat
) -> None:
    """Write records back into blocks; arguments as for `quantise`."""
    dequantise_layers(records, slots, PagedCaches([pages]), _first(pages.device), block_ids, fmt)


def dequantise_layers(
    records: torch.Tensor, slots: torch.Tensor, caches: PagedCaches, which: torch.Tensor, block_ids: torch.Tensor,
    fmt: RecordFormat,
) -> None:  # fmt: skip
    """Write records back into blocks of several layers; arguments as for `quantise_layers`."""
    if len(slots) and len(which):
        _dequantise[_grid(fmt, slots, which)](
            caches.addresses, which, block_ids, records, records.view(fmt.layout.dtype), slots,
            *_geometry(fmt), **_shape(fmt), ALIGNMENT=caches.alignment,
        )  # fmt: skip


def _grid(fmt: RecordFormat, slots: torch.Tensor, which: torch.Tensor) -> tuple[int, int, int]:
    return len(slots), 2 * fmt.layout.num_heads, len(which)


def _geometry(fmt: RecordFormat) -> tuple[int, ...]:
    layout = fmt.layout
    item = definition.ITEM_BYTES[layout.dtype]
    sides = [n for s in (layout.k, layout.v) for n in (s.offset, s.token_stride, s.channel_stride)]
    places = (fmt.minima_offset // item, fmt.scales_offset // item, fmt.record_bytes, fmt.record_bytes // item)
    return (layout.page_elements, layout.head_stride, *sides, *places)


def _shape(fmt: RecordFormat) -> dict[str, Any]:
    layout = fmt.layout
    tokens, channels = triton.next_power_of_2(layout.block_size), triton.next_power_of_2(layout.head_dim)
    return {
        "HEAD_DIM": layout.head_dim,
        "BLOCK_SIZE": layout.block_size,
        "TOKENS": tokens,
        "CHANNELS": channels,
        "num_warps": min(_MOST_WARPS, max(4, tokens * channels // _VALUES_PER_WARP)),
        "enable_fp_fusion": False,
    }


@functools.lru_cache(maxsize=4096)
def _addresses(found: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(found, dtype=torch.int64, device=device)


@functools.cache
def _first(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int64, device=device)


@triton.jit  # type: ignore[untyped-decorator]
def _quantise(  # type: ignore[no-untyped-def]
    addresses, layers, block_ids, records, items, slots, holds,
    page_elements, head_stride, k_offset, k_token, k_channel, v_offset, v_token, v_channel,
    minima_at, scales_at, record_bytes, record_items,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    MOST: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    row, which = tl.program_id(0), tl.program_id(1)
    layer = tl.load(layers + tl.program_id(2))
    pages = tl.multiple_of(tl.load(addresses + layer).to(items.dtype), ALIGNMENT)
    is_v = which % 2 == 1
    offset = (which // 2) * head_stride + tl.where(is_v, v_offset, k_offset)
    token_stride, channel_stride = tl.where(is_v, v_token, k_token), tl.where(is_v, v_channel, k_channel)
    token, channel = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    real = channel < HEAD_DIM
    held = (token < BLOCK_SIZE)[:, None] & real[None, :]  # [TOKENS, CHANNELS]
    inside = (offset + token * token_stride)[:, None] + (channel * channel_stride)[None, :]
    block = tl.load(block_ids + row)
    values = tl.load(pages + block * page_elements + inside, mask=held, other=0.0).to(tl.float32)
    low = tl.min(tl.where(held, values, float("inf")), axis=0)  # [CHANNELS]
    high = tl.max(tl.where(held, values, float("-inf")), axis=0)
    low, high = tl.where(real & (low != 0.0), low, 0.0), tl.where(real, high, 0.0)  # never -0.0

    step = tl.maximum(tl.div_rn(high - low, _LEVELS), _LEAST_SCALE)
    scale = step.to(items.dtype.element_ty)
    if items.dtype.element_ty.primitive_bitwidth == 16:  # of fp32 it is exact
        bits = scale.to(tl.int16, bitcast=True) + (scale.to(tl.float32) < step).to(tl.int16)
        scale = bits.to(items.dtype.element_ty, bitcast=True)
    exact = tl.where(high == low, 0.0, scale.to(tl.float32))
    inverse = tl.where(exact > 0.0, tl.div_rn(1.0, tl.where(exact > 0.0, exact, 1.0)), 0.0)
    strange = tl.max(tl.where(held & ~(tl.abs(values) < float("inf")), 1, 0))
    beyond = tl.max(tl.where(low + _LEVELS * exact <= MOST, 0, 1))
    if (strange > 0) | (beyond > 0):
        tl.store(holds + row, 0)

    slot = tl.load(slots + row) + layer
    shifted = (values - low[None, :]) * inverse[None, :] + _ROUNDER
    codes = shifted.to(tl.int32, bitcast=True) & 255
    tl.store(records + slot * record_bytes + inside, codes.to(tl.uint8), mask=held)
    at = slot * record_items + which * HEAD_DIM + channel
    tl.store(items + at + minima_at, low.to(items.dtype.element_ty), mask=real)
    tl.store(items + at + scales_at, exact.to(items.dtype.element_ty), mask=real)


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise(  # type: ignore[no-untyped-def]
    addresses, layers, block_ids, records, items, slots,
    page_elements, head_stride, k_offset, k_token, k_channel, v_offset, v_token, v_channel,
    minima_at, scales_at, record_bytes, record_items,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):  # fmt: skip
    row, which = tl.program_id(0), tl.program_id(1)
    layer = tl.load(layers + tl.program_id(2))
    pages = tl.multiple_of(tl.load(addresses + layer).to(items.dtype), ALIGNMENT)
    is_v = which % 2 == 1
    offset = (which // 2) * head_stride + tl.where(is_v, v_offset, k_offset)
    token_stride, channel_stride = tl.where(is_v, v_token, k_token), tl.where(is_v, v_channel, k_channel)
    token, channel = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    real = channel < HEAD_DIM
    held = (token < BLOCK_SIZE)[:, None] & real[None, :]  # [TOKENS, CHANNELS]
    inside = (offset + token * token_stride)[:, None] + (channel * channel_stride)[None, :]
    block, slot = tl.load(block_ids + row), tl.load(slots + row) + layer
    at = slot * record_items + which * HEAD_DIM + channel
    low = tl.load(items + at + minima_at, mask=real, other=0.0).to(tl.float32)
    scale = tl.load(items + at + scales_at, mask=real, other=0.0).to(tl.float32)
    codes = tl.load(records + slot * record_bytes + inside, mask=held, other=0)
    values = low[None, :] + codes.to(tl.float32) * scale[None, :]
    tl.store(pages + block * page_elements + inside, values.to(items.dtype.element_ty), mask=held)
