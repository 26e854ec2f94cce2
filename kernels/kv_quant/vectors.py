"""Vectors of values of the KV in compiled code: what `tiles` is written in.

numba's own vectorisation keeps to 256 bits, widens every value alone and can't fetch ahead. These are LLVM's vectors,
of any power of two of values, which it splits or pads to what the machine has: AVX-512, AVX2, NEON.

Values become fp32 in the order that is cheapest to reach (of bfloat16 those at even places, then those at odd ones, so
that no value moves), and their codes, one byte each, go back to the order of the values. `Operations.arrange` brings
fp32 of channels into that order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic, models, register_model

from vllm_ext.kernels.kv_quant.conversion import Conversion, constants

_ELEMENTS = {"int8": ir.IntType(8), "int16": ir.IntType(16), "int32": ir.IntType(32), "float32": ir.FloatType()}
_INTEGERS = {torch.bfloat16: "int16", torch.float16: "int16", torch.float32: "int32"}
_LINE_BYTES = 64


class Vector(types.Type):
    """So many numbers of one type, in registers."""

    def __init__(self, element: str, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vector({lanes} x {element})")

    @property
    def ir(self) -> ir.VectorType:
        """The type as LLVM's."""
        return ir.VectorType(_ELEMENTS[self.element], self.lanes)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.ir)


@dataclass(frozen=True)
class Operations:
    """What compiled code can do with vectors of one width. Arrays are contiguous; an index counts from their start."""

    load: Callable[..., Any]
    """(bits, at): values."""
    load_codes: Callable[..., Any]
    """(bytes, at): codes."""
    load_numbers: Callable[..., Any]
    """(fp32, at): numbers."""
    store: Callable[..., Any]
    """(array, at, vector)."""
    fetch: Callable[..., Any]
    """(bits, at): bring near what `load` will want; any index may be given."""
    fetch_to_write: Callable[..., Any]
    """(bytes, at): bring near where codes will be stored."""
    fill: Callable[..., Any]
    """(bits): values, all the same."""
    least: Callable[..., Any]
    """(values, values): the lower ones, as signed integers."""
    most: Callable[..., Any]
    """(values, values): the higher ones, as signed integers."""
    most_unsigned: Callable[..., Any]
    """(values, values): the higher ones, as unsigned integers."""
    least_of_each: Callable[..., Any]
    """(bits, at): the least of each of as many vectors as one has values."""
    most_of_each: Callable[..., Any]
    """(bits, at)."""
    most_unsigned_of_each: Callable[..., Any]
    """(bits, at)."""
    arrange: Callable[..., Any]
    """(numbers): in the order of `encode` and `decode`."""
    spread: Callable[..., Any]
    """(fp32): numbers, all the same."""
    encode: Callable[..., Any]
    """(values, minima, factors): codes."""
    decode: Callable[..., Any]
    """(codes, minima, scales): values."""


@functools.cache
def operations(dtype: torch.dtype, lanes: int) -> Operations:
    """Return the operations on ``lanes`` values, a power of two, of a type of KV."""
    values, codes, numbers = (Vector(kind, lanes) for kind in (_INTEGERS[dtype], "int8", "float32"))
    conversion = Conversion(dtype, lanes)
    size = values.ir.element.width // 8 * lanes
    pick = {
        "least": lambda b, x, y: b.select(b.icmp_signed("<", x, y), x, y),
        "most": lambda b, x, y: b.select(b.icmp_signed(">", x, y), x, y),
        "most_unsigned": lambda b, x, y: b.select(b.icmp_unsigned(">", x, y), x, y),
    }
    of_each = {
        f"{name}_of_each": _operation(values, functools.partial(_of_each, of=values.ir, pick=choose), 2)
        for name, choose in pick.items()
    }
    return Operations(
        load=_operation(values, functools.partial(_load, kind=values.ir), 2),
        load_codes=_operation(codes, functools.partial(_load, kind=codes.ir), 2),
        load_numbers=_operation(numbers, functools.partial(_load, kind=numbers.ir), 2),
        store=_operation(types.void, _store, 3),
        fetch=_operation(types.void, functools.partial(_fetch, size=size, to_write=False), 2),
        fetch_to_write=_operation(types.void, functools.partial(_fetch, size=lanes, to_write=True), 2),
        fill=_operation(values, functools.partial(_spread, lanes=lanes), 1),
        **{name: _operation(values, choose, 2) for name, choose in pick.items()},
        **of_each,
        arrange=_operation(numbers, conversion.arrange, 1),
        spread=_operation(numbers, functools.partial(_spread, lanes=lanes), 1),
        encode=_operation(codes, conversion.encode, 3),
        decode=_operation(values, conversion.decode, 3),
    )


def _operation(result: types.Type, generate: Callable[..., Any], arity: int) -> Any:
    """Return an intrinsic whose code ``generate`` makes, from LLVM values; for an array it gets its address."""

    def typed(*arguments: Any) -> Any:
        def code(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            plain = [
                context.make_array(kind)(context, builder, value).data if isinstance(kind, types.Array) else value
                for kind, value in zip(signature.args, values, strict=True)
            ]
            made = generate(builder, *plain)
            return context.get_dummy_value() if result is types.void else made

        return result(*arguments), code

    # numba reads from the signature how many arguments there are
    def unary(_context: Any, a: Any) -> Any:
        return typed(a)

    def binary(_context: Any, a: Any, b: Any) -> Any:
        return typed(a, b)

    def ternary(_context: Any, a: Any, b: Any, c: Any) -> Any:
        return typed(a, b, c)

    return intrinsic((unary, binary, ternary)[arity - 1])


def _load(builder: ir.IRBuilder, items: Any, at: Any, *, kind: ir.VectorType) -> Any:
    return builder.load(builder.bitcast(builder.gep(items, [at]), kind.as_pointer()), align=1)


def _store(builder: ir.IRBuilder, items: Any, at: Any, vector: Any) -> None:
    builder.store(vector, builder.bitcast(builder.gep(items, [at]), vector.type.as_pointer()), align=1)


def _fetch(builder: ir.IRBuilder, items: Any, at: Any, *, size: int, to_write: bool) -> None:
    word, address = ir.IntType(32), builder.bitcast(builder.gep(items, [at]), ir.IntType(8).as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [address.type, word, word, word])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    how = [ir.Constant(word, value) for value in (int(to_write), 3 if to_write else 2, 1)]
    for line in range(0, size, _LINE_BYTES):
        builder.call(prefetch, [builder.gep(address, [ir.Constant(word, line)]), *how])


def _spread(builder: ir.IRBuilder, value: Any, *, lanes: int) -> Any:
    kind = ir.VectorType(value.type, lanes)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(first, first, constants([0] * lanes))


def _of_each(builder: ir.IRBuilder, items: Any, at: Any, *, of: ir.VectorType, pick: Callable[..., Any]) -> Any:
    """Reduce vectors that lie one after the other: halves of two become one, until one value of each is left."""
    found = [
        _load(builder, items, builder.add(at, ir.Constant(at.type, n * of.count)), kind=of) for n in range(of.count)
    ]
    width = of.count
    while len(found) > 1:
        halves = [_halves(of.count, width, which) for which in range(2)]
        found = [
            pick(builder, *(builder.shuffle_vector(a, b, constants(half)) for half in halves))
            for a, b in zip(found[::2], found[1::2], strict=True)
        ]
        width //= 2
    return found[0]


def _halves(lanes: int, width: int, which: int) -> Sequence[int]:
    """Places, in two vectors one after the other, of the first or the second half of every ``width`` values."""
    starts = range(which * width // 2, 2 * lanes, width)
    return [start + n for start in starts for n in range(width // 2)]
