"""Between values of the KV, fp32 and codes, for vectors of one width: LLVM instructions for `vectors`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from llvmlite import ir

from vllm_ext.kernels.kv_quant.format import ROUNDER

_FLOAT, _HALF = ir.FloatType(), ir.HalfType()
_BYTE, _SHORT, _WORD = (ir.IntType(bits) for bits in (8, 16, 32))


class Conversion:
    """Of one type of KV and one width.

    Two values of bfloat16 side by side are a word: one is in its upper half, as in fp32; the other one gets there by a
    shift. In the same way two codes become half a word. So nothing crosses the lanes of a vector but where 32 bits
    become 16.

    Args:
        dtype: Type of the KV.
        lanes: Values of a vector, a power of two.
    """

    def __init__(self, dtype: torch.dtype, lanes: int) -> None:
        self._dtype, self._lanes = dtype, lanes
        self._paired = dtype == torch.bfloat16 and lanes > 1
        self._floats, self._words, self._shorts, self._bytes, self._halves = (
            ir.VectorType(kind, lanes) for kind in (_FLOAT, _WORD, _SHORT, _BYTE, _HALF)
        )
        self._pairs = ir.VectorType(_WORD, max(1, lanes // 2))
        self._narrow_pairs = ir.VectorType(_SHORT, max(1, lanes // 2))

    def encode(self, builder: ir.IRBuilder, values: Any, minima: Any, factors: Any) -> Any:
        """Return the codes; not a fused multiplication and addition, as everywhere: see `format.INVERSES`."""
        code = builder.fmul(builder.fsub(self._to_floats(builder, values), minima), factors)
        return self._to_bytes(builder, builder.fadd(code, constant(self._floats, ROUNDER)))

    def decode(self, builder: ir.IRBuilder, codes: Any, minima: Any, scales: Any) -> Any:
        """Return the values, rounded to the nearest, halves to even."""
        return self._to_values(builder, builder.fadd(minima, builder.fmul(self._from_bytes(builder, codes), scales)))

    def arrange(self, builder: ir.IRBuilder, numbers: Any) -> Any:
        """Return fp32 in the order in which values become fp32."""
        if not self._paired:
            return numbers
        order = [*range(0, self._lanes, 2), *range(1, self._lanes, 2)]
        return builder.shuffle_vector(numbers, numbers, constants(order))

    def _to_floats(self, builder: ir.IRBuilder, values: Any) -> Any:
        if self._dtype == torch.float32:
            return builder.bitcast(values, self._floats)
        if self._dtype == torch.float16:
            return builder.fpext(builder.bitcast(values, self._halves), self._floats)
        if not self._paired:
            return builder.bitcast(self._shifted(builder, builder.zext(values, self._words), 16), self._floats)
        pairs = builder.bitcast(values, self._pairs)
        even, odd = self._shifted(builder, pairs, 16), self._masked(builder, pairs, 0xFFFF0000)
        return builder.bitcast(self._together(builder, even, odd), self._floats)

    def _to_values(self, builder: ir.IRBuilder, numbers: Any) -> Any:
        if self._dtype == torch.float32:
            return builder.bitcast(numbers, self._words)
        if self._dtype == torch.float16:
            return builder.bitcast(builder.fptrunc(numbers, self._halves), self._shorts)
        words = builder.bitcast(numbers, self._words)
        odd_bit = self._masked(builder, self._shifted(builder, words, -16), 1)
        words = builder.add(builder.add(words, constant(self._words, 0x7FFF)), odd_bit)
        if not self._paired:
            return builder.trunc(self._shifted(builder, words, -16), self._shorts)
        even, odd = self._apart(builder, words)
        both = builder.or_(self._shifted(builder, even, -16), self._masked(builder, odd, 0xFFFF0000))
        return builder.bitcast(both, self._shorts)

    def _to_bytes(self, builder: ir.IRBuilder, rounded: Any) -> Any:
        """Codes are the lowest bytes of numbers to which `ROUNDER` was added; its own bits end above them.

        An addition, where ``or`` would do: LLVM would make of it a permutation of bytes, which is slower.
        """
        words = builder.bitcast(rounded, self._words)
        if not self._paired:
            return builder.trunc(words, self._bytes)
        even, odd = self._apart(builder, words)
        both = builder.add(even, self._shifted(builder, odd, 8))
        return builder.bitcast(builder.trunc(both, self._narrow_pairs), self._bytes)

    def _from_bytes(self, builder: ir.IRBuilder, codes: Any) -> Any:
        if not self._paired:
            return builder.uitofp(codes, self._floats)
        both = builder.zext(builder.bitcast(codes, self._narrow_pairs), self._pairs)
        even, odd = self._masked(builder, both, 0xFF), self._shifted(builder, both, -8)
        return builder.sitofp(self._together(builder, even, odd), self._floats)

    def _together(self, builder: ir.IRBuilder, even: Any, odd: Any) -> Any:
        return builder.shuffle_vector(even, odd, constants(range(self._lanes)))

    def _apart(self, builder: ir.IRBuilder, words: Any) -> tuple[Any, Any]:
        middle = self._lanes // 2
        parts = (range(middle), range(middle, self._lanes))
        even, odd = (builder.shuffle_vector(words, words, constants(part)) for part in parts)
        return even, odd

    @staticmethod
    def _shifted(builder: ir.IRBuilder, words: Any, bits: int) -> Any:
        shift = builder.shl if bits > 0 else builder.lshr
        return shift(words, constant(words.type, abs(bits)))

    @staticmethod
    def _masked(builder: ir.IRBuilder, words: Any, mask: int) -> Any:
        return builder.and_(words, constant(words.type, mask))


def constant(kind: ir.VectorType, value: float) -> ir.Constant:
    """Return a vector of one number."""
    return ir.Constant(kind, [value] * kind.count)


def constants(values: Iterable[int]) -> ir.Constant:
    """Return a vector of 32-bit integers."""
    found = list(values)
    return ir.Constant(ir.VectorType(_WORD, len(found)), found)
