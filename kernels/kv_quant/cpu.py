"""The format on the CPU: one pass over the blocks for the ranges, one for the codes, compiled to vector instructions.

Ranges are found on the bits of the values: with the lower bits of negative numbers flipped they are in order as
integers, and what is not finite lies beyond infinity. Calls release the GIL, so that threads can share the groups of a
transfer. numba comes with vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba.extending import intrinsic

from vllm_ext.kernels.kv_quant import format as definition
from vllm_ext.kernels.kv_quant.format import INVERSES, SCALES, STEPS_PER_OCTAVE, THRESHOLDS, RecordFormat

_BITS = {torch.bfloat16: np.int16, torch.float16: np.int16, torch.float32: np.int32}
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
# As numpy's types: in compiled code Python's would make everything 64 bits wide.
_INVERSE_LEVELS, _ROUNDER = np.float32(definition.INVERSE_LEVELS), np.float32(definition.ROUNDER)
_FIRST_CODE = np.int32(definition.FIRST_CODE)
_0, _1, _2, _3, _4, _5, _6, _7 = THRESHOLDS
_Array = npt.NDArray[Any]
_inline = functools.partial(numba.njit, inline="always")


def quantise(pages: torch.Tensor, block_ids: _Array, records: torch.Tensor, slots: _Array, fmt: RecordFormat) -> _Array:
    """Write the records of groups of blocks.

    Args:
        pages: One layer's cache, shape [num_blocks, page_elements], in the layout's type, contiguous.
        block_ids: Blocks of each group, shape [groups, fmt.blocks], int64; -1 where a group lacks one.
        records: Where records go, shape [places, record_bytes], uint8, contiguous.
        slots: Place of each group's record, shape [groups], int64.
        fmt: What a record looks like.

    Returns:
        Which of the records hold, shape [groups], bool: see `reference.quantise`. The others are rubbish.
    """
    kernel = _kernels(fmt.layout.dtype)[0]
    bits, found = _views(pages, records, fmt)
    holds: _Array = kernel(bits, block_ids, *found, slots, *_geometry(fmt), INVERSES)
    return holds


def dequantise(records: torch.Tensor, slots: _Array, pages: torch.Tensor, block_ids: _Array, fmt: RecordFormat) -> None:
    """Write groups back into blocks; arguments as for `quantise`. A block id of -1 is a block that is not wanted."""
    kernel = _kernels(fmt.layout.dtype)[1]
    bits, found = _views(pages, records, fmt)
    kernel(bits, block_ids, *found, slots, *_geometry(fmt), SCALES)


def _views(pages: torch.Tensor, records: torch.Tensor, fmt: RecordFormat) -> tuple[_Array, tuple[_Array, _Array]]:
    kind = _BITS[fmt.layout.dtype]
    as_bytes = records.numpy()
    return pages.view(getattr(torch, np.dtype(kind).name)).numpy(), (as_bytes, as_bytes.view(kind))


@functools.cache
def _geometry(fmt: RecordFormat) -> tuple[Any, ...]:
    layout = fmt.layout
    sides, channels = [layout.k, layout.v], layout.head_dim
    if layout.k.channel_stride == layout.v.channel_stride == 1 and layout.v == layout.k.shifted(channels):
        sides, channels = [layout.k], 2 * channels  # rows of K and V are one row, which is faster
    table = np.array([(side.offset, side.token_stride, side.channel_stride) for side in sides], np.int64)
    item = np.dtype(_BITS[layout.dtype]).itemsize
    shape = (layout.num_heads, channels, np.uintp(layout.block_size), layout.head_stride)
    return (*shape, table, fmt.minima_at // item, fmt.scales_at)


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(_context: Any, bits: Any) -> Any:
    def generate(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return numba.float32(numba.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_bits(_context: Any, value: Any) -> Any:
    def generate(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return numba.int32(numba.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _half_to_float(_context: Any, bits: Any) -> Any:
    def generate(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return numba.float32(numba.int16), generate


@intrinsic  # type: ignore[untyped-decorator]
def _float_to_half(_context: Any, value: Any) -> Any:
    def generate(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return numba.int16(numba.float32), generate


@_inline
def _bfloat_to_float(bits: Any) -> Any:
    return _as_float(np.int32(bits) << np.int32(16))


@_inline
def _float_to_bfloat(value: Any) -> Any:
    bits = _as_bits(value)
    return np.int16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16))


@functools.cache
def _kernels(dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile the two directions for one type of KV: a few seconds, once per process."""
    loads = {torch.bfloat16: _bfloat_to_float, torch.float16: _half_to_float, torch.float32: _as_float}
    stores = {torch.bfloat16: _float_to_bfloat, torch.float16: _float_to_half, torch.float32: _as_bits}
    load, store = loads[dtype], stores[dtype]
    kind = _BITS[dtype]
    sign_shift, magnitude = kind(np.dtype(kind).itemsize * 8 - 1), kind(np.iinfo(kind).max)
    infinity = kind(_INFINITY[dtype])
    least = kind(~int(infinity))  # of minus infinity, in order
    lowest, highest = kind(np.iinfo(kind).min), kind(np.iinfo(kind).max)

    @_inline
    def ordered(bits: Any) -> Any:  # its own inverse
        return bits ^ ((bits >> sign_shift) & magnitude)

    @_inline
    def ranges_of_rows(page, at, stride, tokens, low, high):  # type: ignore[no-untyped-def]
        for token in range(tokens):
            start = at + token * stride
            for channel in range(np.uintp(len(low))):
                value = ordered(page[start + channel])
                low[channel] = min(low[channel], value)
                high[channel] = max(high[channel], value)

    @_inline
    def ranges_of_columns(page, at, stride, tokens, low, high):  # type: ignore[no-untyped-def]
        for channel in range(np.uintp(len(low))):
            start = at + channel * stride
            least_yet, most_yet = low[channel], high[channel]
            for token in range(tokens):
                value = ordered(page[start + token])
                least_yet, most_yet = min(least_yet, value), max(most_yet, value)
            low[channel], high[channel] = least_yet, most_yet

    @_inline
    def choose_scales(low, high, minima, chosen, lows):  # type: ignore[no-untyped-def]
        """Choose the code of each channel's scale; return the highest, above 255 if one has none. Without a branch."""
        highest_code = np.int32(0)
        for channel in range(np.uintp(len(low))):
            low[channel] += kind(low[channel] == kind(-1))  # -0.0 is stored as 0.0
            least_value, most_value = load(ordered(low[channel])), load(ordered(high[channel]))
            bits = _as_bits((most_value - least_value) * _INVERSE_LEVELS)
            mantissa = bits & np.int32(0x7FFFFF)
            steps = (
                np.int32(mantissa > _0) + np.int32(mantissa > _1) + np.int32(mantissa > _2) + np.int32(mantissa > _3)
            )
            steps += np.int32(mantissa > _4) + np.int32(mantissa > _5) + np.int32(mantissa > _6)
            steps += np.int32(mantissa > _7)
            code = (bits >> np.int32(23)) * np.int32(STEPS_PER_OCTAVE) + steps + _FIRST_CODE
            code = max(code, np.int32(1)) * np.int32(most_value != least_value)
            strange = np.int32(low[channel] <= least) | np.int32(high[channel] >= infinity)
            code = np.int32(code) | (strange << np.int32(16))
            minima[channel] = ordered(low[channel])
            lows[channel] = least_value
            chosen[channel] = code
            highest_code = max(highest_code, code)
        return highest_code

    @_inline
    def encode_rows(page, out, at, to, stride, tokens, low, factor):  # type: ignore[no-untyped-def]
        for token in range(tokens):
            start = token * stride
            for channel in range(np.uintp(len(low))):
                code = (load(page[at + start + channel]) - low[channel]) * factor[channel]
                out[to + start + channel] = np.uint8(_as_bits(code + _ROUNDER))

    @_inline
    def encode_columns(page, out, at, to, stride, tokens, low, factor):  # type: ignore[no-untyped-def]
        for channel in range(np.uintp(len(low))):
            start, least_value, per_value = channel * stride, low[channel], factor[channel]
            for token in range(tokens):
                code = (load(page[at + start + token]) - least_value) * per_value
                out[to + start + token] = np.uint8(_as_bits(code + _ROUNDER))

    @_inline
    def decode_rows(codes, page, at, to, stride, tokens, low, scale):  # type: ignore[no-untyped-def]
        for token in range(tokens):
            start = token * stride
            for channel in range(np.uintp(len(low))):
                value = low[channel] + np.float32(codes[at + start + channel]) * scale[channel]
                page[to + start + channel] = store(value)

    @_inline
    def decode_columns(codes, page, at, to, stride, tokens, low, scale):  # type: ignore[no-untyped-def]
        for channel in range(np.uintp(len(low))):
            start, least_value, step = channel * stride, low[channel], scale[channel]
            for token in range(tokens):
                page[to + start + token] = store(least_value + np.float32(codes[at + start + token]) * step)

    @numba.njit(nogil=True)
    def quantise_all(  # type: ignore[no-untyped-def]
        pages, block_ids, records, items, slots, heads, channels, tokens, head_stride, sides, minima_at, scales_at,
        inverses,
    ):  # fmt: skip
        low, high = np.empty(channels, pages.dtype), np.empty(channels, pages.dtype)
        lows, factors = np.empty(channels, np.float32), np.empty(channels, np.float32)
        chosen = np.empty(channels, np.int32)
        holds = np.ones(len(slots), np.bool_)
        for group in range(len(slots)):
            record, ids = records[slots[group]], block_ids[group]
            for which in range(len(sides) * heads):
                side = sides[which % len(sides)]
                at = np.uintp((which // len(sides)) * head_stride + side[0])
                by_rows = side[2] == 1
                stride = np.uintp(side[1] if by_rows else side[2])
                low[:], high[:] = highest, lowest
                for block in ids:
                    if block >= 0 and by_rows:
                        ranges_of_rows(pages[block], at, stride, tokens, low, high)
                    elif block >= 0:
                        ranges_of_columns(pages[block], at, stride, tokens, low, high)
                minima = items[slots[group], minima_at + which * channels :][:channels]
                codes = record[scales_at + which * channels :][:channels]
                if choose_scales(low, high, minima, chosen, lows) > 255:
                    holds[group] = False
                    continue
                for channel in range(channels):
                    codes[channel] = np.uint8(chosen[channel])
                    factors[channel] = inverses[chosen[channel]]
                for place in range(len(ids)):
                    block, to = ids[place], np.uintp(place * pages.shape[1]) + at
                    if block >= 0 and by_rows:
                        encode_rows(pages[block], record, at, to, stride, tokens, lows, factors)
                    elif block >= 0:
                        encode_columns(pages[block], record, at, to, stride, tokens, lows, factors)
        return holds

    @numba.njit(nogil=True)
    def dequantise_all(  # type: ignore[no-untyped-def]
        pages, block_ids, records, items, slots, heads, channels, tokens, head_stride, sides, minima_at, scales_at,
        scale_of,
    ):  # fmt: skip
        lows, factors = np.empty(channels, np.float32), np.empty(channels, np.float32)
        for group in range(len(slots)):
            record, ids = records[slots[group]], block_ids[group]
            for which in range(len(sides) * heads):
                side = sides[which % len(sides)]
                to = np.uintp((which // len(sides)) * head_stride + side[0])
                by_rows = side[2] == 1
                stride = np.uintp(side[1] if by_rows else side[2])
                for channel in range(channels):
                    lows[channel] = load(items[slots[group], minima_at + which * channels + channel])
                    factors[channel] = scale_of[record[scales_at + which * channels + channel]]
                for place in range(len(ids)):
                    block, at = ids[place], np.uintp(place * pages.shape[1]) + to
                    if block >= 0 and by_rows:
                        decode_rows(record, pages[block], at, to, stride, tokens, lows, factors)
                    elif block >= 0:
                        decode_columns(record, pages[block], at, to, stride, tokens, lows, factors)

    return quantise_all, dequantise_all
