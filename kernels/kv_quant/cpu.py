"""The format on the CPU: `cpu.cpp`, compiled when it is first used. Calls release the GIL."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels import native
from vllm_ext.kernels.kv_quant.format import RecordFormat

_SOURCE = Path(__file__).with_name("cpu.cpp")
_FLAGS = ("-O2", "-ffp-contract=off", "-Wno-psabi")
"""Vectors are written out, so that -O3 adds seconds and no speed. A fused multiplication and addition rounds once, and
results would differ from the definition's. No vector crosses a border at which its ABI mattered."""
_Ids = npt.NDArray[np.int64]


class _Side(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("offset", "token_stride", "channel_stride")]


class _Layout(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("heads", "channels", "tokens", "head_stride", "page_stride")),
        *((name, ctypes.c_int64) for name in ("minima_offset", "scales_offset", "record_bytes")),
        ("sides", _Side * 2),
    ]


@functools.cache
def load() -> ctypes.CDLL:
    """Compile the codec if that was not done before, and load it.

    Raises:
        CompilerMissing: There is no g++; says what to do.
        CompileError: g++ refused the source.
    """
    library: ctypes.CDLL = native.load(_SOURCE, flags=_FLAGS)
    return library


def quantise(
    pages: torch.Tensor, block_ids: _Ids, records: torch.Tensor, slots: _Ids, fmt: RecordFormat
) -> npt.NDArray[np.bool_]:
    """Write the records of blocks.

    Args:
        pages: One layer's cache, shape [num_blocks, page_elements], in the layout's type; each page contiguous.
        block_ids: Blocks to quantise, shape [n], int64. That they exist is for the caller to check.
        records: Where records go, shape [places, record_bytes], uint8, contiguous.
        slots: Place of each block's record, shape [n], int64.
        fmt: What a record looks like.

    Returns:
        Which of the records hold, shape [n], bool: see `reference.quantise`. The others are rubbish.
    """
    holds = np.ones(len(slots), np.bool_)
    _call("quantise", pages, block_ids, records, slots, fmt, holds.ctypes.data)
    return holds


def dequantise(records: torch.Tensor, slots: _Ids, pages: torch.Tensor, block_ids: _Ids, fmt: RecordFormat) -> None:
    """Write records back into blocks; arguments as for `quantise`."""
    _call("dequantise", pages, block_ids, records, slots, fmt)


def _call(
    name: str, pages: torch.Tensor, block_ids: _Ids, records: torch.Tensor, slots: _Ids, fmt: RecordFormat, *more: int
) -> None:
    if block_ids.shape != slots.shape:
        raise ValueError(f"slots: must be of shape {block_ids.shape} as block_ids are, not {slots.shape}")
    block_ids, slots = np.ascontiguousarray(block_ids, np.int64), np.ascontiguousarray(slots, np.int64)
    layout = _layout(fmt, pages.stride(0) * pages.element_size())
    function = getattr(load(), f"{name}_{str(fmt.layout.dtype).removeprefix('torch.')}")
    function(
        ctypes.byref(layout), ctypes.c_void_p(pages.data_ptr()), ctypes.c_void_p(records.data_ptr()),
        ctypes.c_void_p(block_ids.ctypes.data), ctypes.c_void_p(slots.ctypes.data), ctypes.c_int64(len(slots)),
        *map(ctypes.c_void_p, more),
    )  # fmt: skip


def take(pages: torch.Tensor, block_ids: _Ids, order: npt.NDArray[np.int32], ordered: torch.Tensor) -> None:
    """Put the values of pages that strides do not describe in order.

    Args:
        pages: Shape [num_blocks, page_elements]; each page contiguous.
        block_ids: Shape [n], int64. That they exist is for the caller to check.
        order: Where each value of an ordered page lies in the real one, shape [page_elements].
        ordered: Shape [at least n, page_elements], in the type of the pages, contiguous; its first n rows are written.
    """
    _reorder("take", pages, block_ids, order, ordered)


def put(ordered: torch.Tensor, pages: torch.Tensor, block_ids: _Ids, order: npt.NDArray[np.int32]) -> None:
    """Put ordered values back into pages; arguments as for `take`."""
    _reorder("put", pages, block_ids, order, ordered)


def _reorder(
    name: str, pages: torch.Tensor, block_ids: _Ids, order: npt.NDArray[np.int32], ordered: torch.Tensor
) -> None:
    block_ids, size = np.ascontiguousarray(block_ids, np.int64), pages.element_size()
    getattr(load(), f"{name}_{size}")(
        ctypes.c_void_p(pages.data_ptr()), ctypes.c_int64(pages.stride(0) * size),
        ctypes.c_void_p(block_ids.ctypes.data), ctypes.c_int64(len(block_ids)), ctypes.c_void_p(order.ctypes.data),
        ctypes.c_int64(len(order)), ctypes.c_void_p(ordered.data_ptr()),
    )  # fmt: skip


@functools.cache
def _layout(fmt: RecordFormat, page_stride: int) -> _Layout:
    layout = fmt.layout
    sides = [_Side(side.offset, side.token_stride, side.channel_stride) for side in (layout.k, layout.v)]
    return _Layout(
        layout.num_heads, layout.head_dim, layout.block_size, layout.head_stride, page_stride, fmt.minima_offset,
        fmt.scales_offset, fmt.record_bytes, (_Side * 2)(*sides),
    )  # fmt: skip
