"""One tile: a head's K or V of a group, some 16 KiB, in compiled code. It is read twice, for ranges and for codes.

A tile lies in the blocks of its group: ``starts`` are where its parts begin in the pages, ``places`` where they begin
in the records. In rows the channels of a token are next to each other, in columns the tokens of a channel; ``stride``
is from one to the next. While codes are written, the next tile, at ``next_starts`` and ``next_places``, is brought
near: the processor does not foresee a jump to another block, and quantising is mostly waiting for memory. Stores that
pass the caches by, and a copy of codes that were collected first, were measured and are slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch

from vllm_ext.kernels.kv_quant import vectors
from vllm_ext.kernels.kv_quant.scales import BITS

_inline = functools.partial(numba.njit, inline="always")


@dataclass(frozen=True)
class Tiles:
    """What is done with tiles, for compiled code.

    A shape is channels, tokens and stride. Minima, factors and scales are fp32 by channel, and may be reordered.
    """

    ranges: Callable[..., Any]
    """(pages, starts, shape, least, most, most_unsigned): write the extremes of the bits of each channel."""
    encode: Callable[..., Any]
    """(pages, starts, next_starts, shape, records, places, next_places, minima, factors): write codes."""
    decode: Callable[..., Any]
    """(records, places, shape, pages, starts, minima, scales): write values."""


@functools.cache
def rows(dtype: torch.dtype, width: int, vectors_known: int) -> Tiles:
    """Return what is done with rows of so many vectors, or of any number if that is 0, each of ``width`` channels."""
    of, step, known = vectors.operations(dtype, width), np.uintp(width), np.uintp(width * vectors_known)
    load, load_codes, load_numbers, store, fetch = of.load, of.load_codes, of.load_numbers, of.store, of.fetch
    fetch_to_write, fill, least, most, most_unsigned = of.fetch_to_write, of.fill, of.least, of.most, of.most_unsigned
    arrange, encode_values, decode_codes = of.arrange, of.encode, of.decode
    zero, lowest, highest = _limits(dtype)

    @_inline
    def ranges(pages, starts, shape, least_of, most_of, most_unsigned_of):  # type: ignore[no-untyped-def]
        end, rest, stride = known if known else shape[0], shape[1], shape[2]
        for channel in range(np.uintp(0), end, step):
            low, high, unsigned = fill(highest), fill(lowest), fill(zero)
            for start in starts:
                for token in range(rest):
                    values = load(pages, start + channel + token * stride)
                    low, high, unsigned = least(low, values), most(high, values), most_unsigned(unsigned, values)
            store(least_of, channel, low)
            store(most_of, channel, high)
            store(most_unsigned_of, channel, unsigned)

    @_inline
    def arrange_all(numbers, end):  # type: ignore[no-untyped-def]
        for channel in range(np.uintp(0), end, step):
            store(numbers, channel, arrange(load_numbers(numbers, channel)))

    @_inline
    def encode(pages, starts, next_starts, shape, records, places, next_places, minima, factors):  # type: ignore[no-untyped-def]
        end, rest, stride = known if known else shape[0], shape[1], shape[2]
        arrange_all(minima, end)
        arrange_all(factors, end)
        for part in range(len(starts)):
            for token in range(rest):
                start, place = starts[part] + token * stride, places[part] + token * stride
                next_start, next_place = next_starts[part] + token * stride, next_places[part] + token * stride
                for channel in range(np.uintp(0), end, step):
                    fetch(pages, next_start + channel)
                    fetch_to_write(records, next_place + channel)
                    low, factor = load_numbers(minima, channel), load_numbers(factors, channel)
                    store(records, place + channel, encode_values(load(pages, start + channel), low, factor))

    @_inline
    def decode(records, places, shape, pages, starts, minima, scales):  # type: ignore[no-untyped-def]
        end, rest, stride = known if known else shape[0], shape[1], shape[2]
        arrange_all(minima, end)
        arrange_all(scales, end)
        for part in range(len(starts)):
            for token in range(rest):
                start, place = starts[part] + token * stride, places[part] + token * stride
                for channel in range(np.uintp(0), end, step):
                    low, scale = load_numbers(minima, channel), load_numbers(scales, channel)
                    store(pages, start + channel, decode_codes(load_codes(records, place + channel), low, scale))

    return Tiles(ranges, encode, decode)


@functools.cache
def columns(dtype: torch.dtype, width: int, vectors_known: int) -> Tiles:
    """Return the same for columns, each of so many vectors of ``width`` tokens, which divides the channels as well."""
    of, step, known = vectors.operations(dtype, width), np.uintp(width), np.uintp(width * vectors_known)
    load, load_codes, store, fetch, fetch_to_write = of.load, of.load_codes, of.store, of.fetch, of.fetch_to_write
    fill, least, most, most_unsigned = of.fill, of.least, of.most, of.most_unsigned
    least_of_each, most_of_each, most_unsigned_of_each = of.least_of_each, of.most_of_each, of.most_unsigned_of_each
    spread, encode_values, decode_codes = of.spread, of.encode, of.decode
    kind, size = BITS[dtype], width * width
    zero, lowest, highest = _limits(dtype)

    @_inline
    def ranges(pages, starts, shape, least_of, most_of, most_unsigned_of):  # type: ignore[no-untyped-def]
        end, rest, stride = shape[0], known if known else shape[1], shape[2]
        lows, highs, unsigneds = np.empty(size, kind), np.empty(size, kind), np.empty(size, kind)
        for first in range(np.uintp(0), end, step):
            for channel in range(step):
                low, high, unsigned = fill(highest), fill(lowest), fill(zero)
                for start in starts:
                    for token in range(np.uintp(0), rest, step):
                        values = load(pages, start + (first + channel) * stride + token)
                        low, high, unsigned = least(low, values), most(high, values), most_unsigned(unsigned, values)
                store(lows, channel * step, low)
                store(highs, channel * step, high)
                store(unsigneds, channel * step, unsigned)
            store(least_of, first, least_of_each(lows, np.uintp(0)))
            store(most_of, first, most_of_each(highs, np.uintp(0)))
            store(most_unsigned_of, first, most_unsigned_of_each(unsigneds, np.uintp(0)))

    @_inline
    def encode(pages, starts, next_starts, shape, records, places, next_places, minima, factors):  # type: ignore[no-untyped-def]
        end, rest, stride = shape[0], known if known else shape[1], shape[2]
        for part in range(len(starts)):
            for channel in range(end):
                low, factor = spread(minima[channel]), spread(factors[channel])
                start, place = starts[part] + channel * stride, places[part] + channel * stride
                next_start, next_place = next_starts[part] + channel * stride, next_places[part] + channel * stride
                for token in range(np.uintp(0), rest, step):
                    fetch(pages, next_start + token)
                    fetch_to_write(records, next_place + token)
                    store(records, place + token, encode_values(load(pages, start + token), low, factor))

    @_inline
    def decode(records, places, shape, pages, starts, minima, scales):  # type: ignore[no-untyped-def]
        end, rest, stride = shape[0], known if known else shape[1], shape[2]
        for part in range(len(starts)):
            for channel in range(end):
                low, scale = spread(minima[channel]), spread(scales[channel])
                start, place = starts[part] + channel * stride, places[part] + channel * stride
                for token in range(np.uintp(0), rest, step):
                    store(pages, start + token, decode_codes(load_codes(records, place + token), low, scale))

    return Tiles(ranges, encode, decode)


def _limits(dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """Zero, and the lowest and the highest integer, of the width of a type of KV."""
    kind = BITS[dtype]
    return kind(0), kind(np.iinfo(kind).min), kind(np.iinfo(kind).max)
