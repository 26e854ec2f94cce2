"""The format on the CPU: one pass over the blocks for the ranges, one for the codes, compiled to vector instructions.

Ranges are found on the bits of the values (see `scales`). One head's K or V of a group is a tile (see `tiles`): the
second pass finds it in the cache, and meanwhile the next tile, also of the next group, is fetched from memory. Calls
release the GIL, so that threads can share the groups of a transfer. numba comes with vLLM.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels.kv_quant import machine_code, scales, tiles
from vllm_ext.kernels.kv_quant.format import INVERSES, SCALES, RecordFormat
from vllm_ext.kernels.kv_quant.scales import BITS

_WIDTHS = (64, 32, 16, 1)
"""Values that are handled at once, at most as many as are next to each other. Few, since each is compiled anew."""
_WIDEST_COLUMN = 32
_LINE_BYTES = 64
_Array = npt.NDArray[Any]
_inline = functools.partial(numba.njit, inline="always")


def quantise(pages: torch.Tensor, block_ids: _Array, records: torch.Tensor, slots: _Array, fmt: RecordFormat) -> _Array:
    """Write the records of groups of blocks.

    Args:
        pages: One layer's cache, shape [num_blocks, page_elements], in the layout's type; each page contiguous.
        block_ids: Blocks of each group, shape [groups, fmt.blocks], int64; -1 where a group lacks one.
        records: Where records go, shape [places, record_bytes], uint8, contiguous.
        slots: Place of each group's record, shape [groups], int64.
        fmt: What a record looks like.

    Returns:
        Which of the records hold, shape [groups], bool: see `reference.quantise`. The others are rubbish.
    """
    holds = np.ones(len(slots), np.bool_)
    _call(0, pages, block_ids, records, slots, fmt, holds)
    return holds


def dequantise(records: torch.Tensor, slots: _Array, pages: torch.Tensor, block_ids: _Array, fmt: RecordFormat) -> None:
    """Write groups back into blocks; arguments as for `quantise`. A block id of -1 is a block that is not wanted."""
    _call(1, pages, block_ids, records, slots, fmt, np.empty(0, np.bool_))


def _call(
    which: int, pages: torch.Tensor, block_ids: _Array, records: torch.Tensor, slots: _Array, fmt: RecordFormat,
    holds: _Array,
) -> None:  # fmt: skip
    block_ids, slots = np.ascontiguousarray(block_ids, np.int64), np.ascontiguousarray(slots, np.int64)
    heads, channels, tokens, size, head_stride, sides, minima_at, scales_at = _geometry(fmt)
    table = (INVERSES, SCALES)[which]
    _compiled(fmt)[which](
        pages.data_ptr(), len(pages), pages.stride(0), records.data_ptr(), records.data_ptr(), *records.shape,
        block_ids.ctypes.data, slots.ctypes.data, *block_ids.shape, heads, channels, tokens, size, head_stride,
        sides.ctypes.data, len(sides), minima_at, scales_at, table.ctypes.data, holds.ctypes.data,
    )  # fmt: skip


@functools.cache
def _geometry(fmt: RecordFormat) -> tuple[Any, ...]:
    """Return heads; channels and tokens of a tile; values of a page; head stride; sides; where minima and scales are.

    A side is its offset, its stride across what is next to each other, and whether it is rows.
    """
    layout = fmt.layout
    sides, channels = [layout.k, layout.v], layout.head_dim
    if layout.k.channel_stride == layout.v.channel_stride == 1 and layout.v == layout.k.shifted(channels):
        sides, channels = [layout.k], 2 * channels  # rows of K and V are one row, which is faster
    rows = [side.channel_stride == 1 for side in sides]
    table = [
        (side.offset, side.token_stride if by_rows else side.channel_stride, by_rows)
        for side, by_rows in zip(sides, rows, strict=True)
    ]
    item = np.dtype(BITS[layout.dtype]).itemsize
    shape = (layout.num_heads, channels, layout.block_size, layout.page_elements, layout.head_stride)
    return (*shape, np.array(table, np.uintp), fmt.minima_at // item, fmt.scales_at)


@functools.cache
def _compiled(fmt: RecordFormat) -> tuple[Callable[..., Any], Callable[..., Any]]:
    _, channels, tokens, _, _, sides, *_ = _geometry(fmt)
    row, column = _width(channels, max(_WIDTHS)), _width(math.gcd(channels, tokens), _WIDEST_COLUMN)
    if sides[:, 2].all():
        column = 1
    return _kernels(fmt.layout.dtype, row, _known(channels, row), column, _known(tokens, column))


def _known(count: int, width: int) -> int:
    """Vectors next to each other, for which a loop is unrolled; 0: values one by one, in a loop for any number."""
    return count // width if width > 1 else 0


def _width(count: int, most: int) -> int:
    return next(width for width in _WIDTHS if width <= most and count % width == 0)


@_inline
def _numbers(count):  # type: ignore[no-untyped-def]
    """fp32 from the start of a cache line: a vector in two lines takes twice as long."""
    room = np.empty(count + np.uintp(_LINE_BYTES), np.float32)
    return room[(_LINE_BYTES - room.ctypes.data % _LINE_BYTES) // 4 :][:count]


@_inline
def _locate(number, block_ids, slots, sides, tiles_per_group, head_stride, sizes, starts, places):  # type: ignore[no-untyped-def]
    """Find where the parts of a tile are, in the pages and in the records; return how many there are.

    Tiles are numbered through all groups. Sizes are those of a page in the cache, of its codes, and of a record.
    """
    group, tile, count = number // tiles_per_group, number % tiles_per_group, 0
    inside = np.uintp(tile // len(sides)) * head_stride + sides[tile % len(sides), 0]
    page, codes, record = sizes
    for place in range(block_ids.shape[1]):
        if block_ids[group, place] >= 0:
            starts[count] = np.uintp(block_ids[group, place]) * page + inside
            places[count] = np.uintp(slots[group]) * record + np.uintp(place) * codes + inside
            count += 1
    return count


@functools.cache
def _kernels(
    dtype: torch.dtype, row: int, vectors_of_row: int, column: int, vectors_of_column: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the two directions for one type of KV and widths of vectors; they take some seconds to compile."""
    of_rows, of_columns = tiles.rows(dtype, row, vectors_of_row), tiles.columns(dtype, column, vectors_of_column)
    ranges_of_rows, encode_rows, decode_rows = of_rows.ranges, of_rows.encode, of_rows.decode
    ranges_of_columns, encode_columns, decode_columns = of_columns.ranges, of_columns.encode, of_columns.decode
    choose_scales, number_of = scales.chooser(dtype), scales.number_of(dtype)

    @_inline
    def quantise_all(  # type: ignore[no-untyped-def]
        pages, records, items, block_ids, slots, heads, channels, tokens, size, head_stride, sides, minima_at,
        scales_at, inverses, holds,
    ):  # fmt: skip
        least, most = np.empty(channels, pages.dtype), np.empty(channels, pages.dtype)
        most_unsigned, chosen = np.empty(channels, pages.dtype), np.empty(channels, np.int32)
        lows, factors = _numbers(channels), _numbers(channels)
        room = np.zeros((4, block_ids.shape[1]), np.uintp)
        sizes = (np.uintp(pages.strides[0] // pages.itemsize), size, np.uintp(records.shape[1]))
        per_group = len(sides) * heads
        for number in range(len(slots) * per_group):
            group, tile = number // per_group, number % per_group
            count = _locate(number, block_ids, slots, sides, per_group, head_stride, sizes, room[0], room[1])
            following = min(number + 1, len(slots) * per_group - 1)
            _locate(following, block_ids, slots, sides, per_group, head_stride, sizes, room[2], room[3])
            starts, places, next_starts, next_places = room[0, :count], room[1, :count], room[2], room[3]
            _, stride, by_rows = sides[tile % len(sides)]
            shape = (channels, tokens, stride)
            if by_rows:
                ranges_of_rows(pages, starts, shape, least, most, most_unsigned)
            else:
                ranges_of_columns(pages, starts, shape, least, most, most_unsigned)
            first = np.uintp(tile) * channels
            minima = items[slots[group], np.uintp(minima_at) + first :][:channels]
            codes = records[slots[group], np.uintp(scales_at) + first :][:channels]
            if choose_scales(least, most, most_unsigned, minima, chosen, lows) > 255:
                holds[group] = False
                continue
            for channel in range(channels):
                codes[channel] = np.uint8(chosen[channel])
                factors[channel] = inverses[chosen[channel]]
            if by_rows:
                encode_rows(pages, starts, next_starts, shape, records, places, next_places, lows, factors)
            else:
                encode_columns(pages, starts, next_starts, shape, records, places, next_places, lows, factors)

    @_inline
    def dequantise_all(  # type: ignore[no-untyped-def]
        pages, records, items, block_ids, slots, heads, channels, tokens, size, head_stride, sides, minima_at,
        scales_at, scale_of, _holds,
    ):  # fmt: skip
        lows, factors = _numbers(channels), _numbers(channels)
        room = np.zeros((2, block_ids.shape[1]), np.uintp)
        sizes = (np.uintp(pages.strides[0] // pages.itemsize), size, np.uintp(records.shape[1]))
        per_group = len(sides) * heads
        for number in range(len(slots) * per_group):
            slot, tile = slots[number // per_group], number % per_group
            count = _locate(number, block_ids, slots, sides, per_group, head_stride, sizes, room[0], room[1])
            starts, places, first = room[0, :count], room[1, :count], np.uintp(tile) * channels
            _, stride, by_rows = sides[tile % len(sides)]
            shape = (channels, tokens, stride)
            for channel in range(channels):
                lows[channel] = number_of(items[slot, np.uintp(minima_at) + first + channel])
                factors[channel] = scale_of[records[slot, np.uintp(scales_at) + first + channel]]
            if by_rows:
                decode_rows(records, places, shape, pages, starts, lows, factors)
            else:
                decode_columns(records, places, shape, pages, starts, lows, factors)

    kernels = {"quantise": quantise_all, "dequantise": dequantise_all}
    key = (str(dtype), row, vectors_of_row, column, vectors_of_column)
    quantise, dequantise = (
        machine_code.function(name, _entry(kernel, np.dtype(BITS[dtype]).itemsize), _signature(BITS[dtype]), key)
        for name, kernel in kernels.items()
    )
    return quantise, dequantise


def _signature(kind: Any) -> Any:
    """Of `_entry`, whose numbers are as wide as addresses; what is added to offsets has no sign."""
    kinds = (numba.from_dtype(np.dtype(kind)), numba.uint8, numba.int64, numba.uintp, numba.float32, numba.boolean)
    values, codes, ids, sides, table, holds = map(numba.types.CPointer, kinds)
    number, offset = numba.intp, numba.uintp
    return numba.void(
        values, number, number, codes, values, number, number, ids, ids, number, number,
        number, offset, offset, offset, offset, sides, number, number, number, table, holds,
    )  # fmt: skip


def _entry(kernel: Callable[..., Any], item: int) -> Callable[..., Any]:
    """Make arrays of addresses, for a kernel."""
    carray = numba.carray

    def entry(  # type: ignore[no-untyped-def]
        pages, num_pages, page_stride, records, items, num_records, record_bytes, block_ids, slots, groups, blocks,
        heads, channels, tokens, size, head_stride, sides, num_sides, minima_at, scales_at, table, holds,
    ):  # fmt: skip
        kernel(
            carray(pages, (num_pages, page_stride)), carray(records, (num_records, record_bytes)),
            carray(items, (num_records, record_bytes // item)), carray(block_ids, (groups, blocks)),
            carray(slots, (groups,)), heads, channels, tokens, size, head_stride, carray(sides, (num_sides, 3)),
            minima_at, scales_at, carray(table, (256,)), carray(holds, (groups,)),
        )  # fmt: skip

    return entry
