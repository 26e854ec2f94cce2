"""The scale of each channel, in compiled code: see `format`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic

from vllm_ext.kernels.kv_quant import format as definition
from vllm_ext.kernels.kv_quant.format import STEPS_PER_OCTAVE, THRESHOLDS

BITS: dict[torch.dtype, type[np.int16 | np.int32]] = {
    torch.bfloat16: np.int16,
    torch.float16: np.int16,
    torch.float32: np.int32,
}
"""Integers as wide as a type of KV."""
_INFINITY = {torch.bfloat16: 0x7F80, torch.float16: 0x7C00, torch.float32: 0x7F800000}
# As numpy's types: in compiled code Python's would make everything 64 bits wide.
_INVERSE_LEVELS, _FIRST_CODE = np.float32(definition.INVERSE_LEVELS), np.int32(definition.FIRST_CODE)
_0, _1, _2, _3, _4, _5, _6, _7 = THRESHOLDS
_inline = functools.partial(numba.njit, inline="always")


@intrinsic  # type: ignore[untyped-decorator]
def _as_float(_context: Any, _bits: Any) -> Any:
    def generate(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return numba.float32(numba.int32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _as_bits(_context: Any, _value: Any) -> Any:
    def generate(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return numba.int32(numba.float32), generate


@intrinsic  # type: ignore[untyped-decorator]
def _half_to_float(_context: Any, _bits: Any) -> Any:
    def generate(_: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return numba.float32(numba.int16), generate


@_inline
def _bfloat_to_float(bits: Any) -> Any:
    return _as_float(np.int32(bits) << np.int32(16))


def number_of(dtype: torch.dtype) -> Callable[..., Any]:
    """Return what makes fp32 of the bits of a value, for compiled code."""
    functions: dict[torch.dtype, Callable[..., Any]] = {
        torch.bfloat16: _bfloat_to_float,
        torch.float16: _half_to_float,
        torch.float32: _as_float,
    }
    return functions[dtype]


@functools.cache
def chooser(dtype: torch.dtype) -> Callable[..., Any]:
    """Return what chooses the scales of channels, for compiled code."""
    number, kind = number_of(dtype), BITS[dtype]
    magnitude, infinity = kind(np.iinfo(kind).max), kind(_INFINITY[dtype])
    negative_zero = kind(np.iinfo(kind).min)

    @_inline
    def choose_scales(least, most, most_unsigned, minima, chosen, lows):  # type: ignore[no-untyped-def]
        """Choose the code of each channel's scale; return the highest, above 255 if one has none. Without a branch.

        Bits of a number are its sign and its magnitude. So the lowest of several is the one with most bits, unsigned,
        if any is negative, and else the least; the highest is the one with most bits, signed, unless all are negative.
        """
        highest_code = np.int32(0)
        for channel in range(np.uintp(len(least))):
            low = most_unsigned[channel] if most_unsigned[channel] < 0 else least[channel]
            high = most[channel] if most[channel] >= 0 else least[channel]
            strange = np.int32((low & magnitude) >= infinity) | np.int32((high & magnitude) >= infinity)
            low = kind(0) if low == negative_zero else low  # -0.0 is stored as 0.0
            least_value, most_value = number(low), number(high)
            bits = _as_bits((most_value - least_value) * _INVERSE_LEVELS)
            mantissa = bits & np.int32(0x7FFFFF)
            steps = (
                np.int32(mantissa > _0) + np.int32(mantissa > _1) + np.int32(mantissa > _2) + np.int32(mantissa > _3)
            )
            steps += np.int32(mantissa > _4) + np.int32(mantissa > _5) + np.int32(mantissa > _6)
            steps += np.int32(mantissa > _7)
            code = (bits >> np.int32(23)) * np.int32(STEPS_PER_OCTAVE) + steps + _FIRST_CODE
            code = max(code, np.int32(1)) * np.int32(most_value != least_value)
            code = np.int32(code) | (strange << np.int32(16))
            minima[channel] = low
            lows[channel] = least_value
            chosen[channel] = code
            highest_code = max(highest_code, code)
        return highest_code

    compiled: Callable[..., Any] = choose_scales
    return compiled
