"""Calls of the kernel in C++; see cpu.cpp for how it works."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from vllm_ext.kernels import native
from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kernels.paged_attention.format import MAX_GROUP, STEP, PagedKV, Ranges

SOURCE = Path(__file__).with_name("cpu.cpp")
FLAGS = ("-fopenmp",)
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_OF_RANGES = ("block_ids", "first_block", "q_start", "q_len", "q_position", "kv_len")
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
_FIELDS: tuple[tuple[str, Any], ...] = (
    ("query", _POINTER), ("out", _POINTER), ("lse", _POINTER), ("query_stride", _INT64), ("out_stride", _INT64),
    ("pages", _POINTER), ("page_stride", _INT64), ("num_blocks", _INT64),
    ("records", _POINTER), ("record_bytes", _INT64), ("num_records", _INT64),
    ("block_ids", _POINTER), ("first_block", _POINTER),
    ("q_start", _POINTER), ("q_len", _POINTER), ("q_position", _POINTER), ("kv_len", _POINTER),
    ("num_tokens", _INT64), ("num_block_ids", _INT64), ("num_ranges", _INT64),
    ("num_heads", _INT64), ("num_kv_heads", _INT64), ("head_dim", _INT64),
    ("block_size", _INT64), ("window", _INT64),
    ("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("dtype", ctypes.c_int32), ("threads", ctypes.c_int32),
)  # fmt: skip


class _Call(ctypes.Structure):
    """Mirrors ``struct Call`` of cpu.cpp."""

    _fields_ = _FIELDS


class CpuAttention:
    """Attention of one layer over its KV; made once, so that a step costs one call. Threads may call it at once.

    Args:
        kv: The layer's KV, in the layout `layout_for` names; only pointers to it are kept, so it must outlive this.
        num_heads: Query heads.
        scale: Of the scores.
        window: Most recent tokens that a query sees, itself among them; 0: all.
        softcap: Scores are kept within it by ``softcap * tanh(score / softcap)``; 0: they are not.

    Raises:
        ValueError: a size, type or layout that the kernel has no code for.
        native.CompilerMissing, native.CompileError: there is no kernel.
    """

    def __init__(self, kv: PagedKV, num_heads: int, *, scale: float, window: int = 0, softcap: float = 0.0) -> None:
        self._library = library()
        layout = kv.layout
        wanted = layout_for(layout.dtype, layout.num_heads, layout.head_dim, layout.block_size)
        if layout != wanted:
            raise ValueError(f"layout={layout}: must be {wanted} on the CPU")
        if num_heads % layout.num_heads or num_heads // layout.num_heads > MAX_GROUP:
            raise ValueError(
                f"num_heads={num_heads}: must be a multiple of the {layout.num_heads} KV heads, and at most "
                f"{MAX_GROUP} for each"
            )
        if window < 0 or softcap < 0:
            raise ValueError(f"window={window}, softcap={softcap}: must not be negative")
        self.kv = kv
        self._heads = (num_heads, layout.head_dim)
        self._layer = _Call(
            pages=kv.pages.data_ptr(), page_stride=kv.pages.stride(0), num_blocks=kv.num_blocks,
            records=None if kv.records is None else kv.records.data_ptr(),
            record_bytes=0 if kv.records is None else kv.records.stride(0), num_records=kv.num_records,
            num_heads=num_heads, num_kv_heads=layout.num_heads, head_dim=layout.head_dim, block_size=layout.block_size,
            window=window, scale=scale, softcap=softcap, dtype=_DTYPES[layout.dtype],
        )  # fmt: skip

    def __call__(self, query: torch.Tensor, ranges: Ranges, out: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """Write the attention of the query tokens that are in a range into ``out``, with the threads of torch.

        Args:
            query: [tokens, heads, D], in the type of the KV; tokens may lie apart.
            ranges: Over the tokens and the KV.
            out: Like the query; rows of tokens in no range are left as they are.
            lse: [tokens, heads], fp32, contiguous: gets the log-sum-exp of the scores.

        Raises:
            ValueError: a tensor has another shape, type or device; nothing is written.
            IndexError: a range reaches beyond the query, its list of ids or the blocks that exist; nothing is written.
        """
        for name, tensor in (("query", query), ("out", out)):
            self._check(name, tensor, ranges.num_tokens)
        if lse is not None and (lse.shape != query.shape[:2] or lse.dtype != torch.float32 or not lse.is_contiguous()):
            raise ValueError(f"lse: {lse.dtype}, shape {tuple(lse.shape)}: must be float32, {tuple(query.shape[:2])}")
        call = _Call.from_buffer_copy(self._layer)  # each call its own: the kernel runs without the GIL
        call.query, call.query_stride = query.data_ptr(), query.stride(0)
        call.out, call.out_stride = out.data_ptr(), out.stride(0)
        call.lse = None if lse is None else lse.data_ptr()
        for name in _OF_RANGES:
            setattr(call, name, getattr(ranges, name).data_ptr())
        call.num_tokens = min(query.shape[0], out.shape[0])
        call.num_block_ids, call.num_ranges = ranges.block_ids.shape[0], ranges.num_ranges
        call.threads = torch.get_num_threads()
        bad = self._library.attend(ctypes.byref(call))
        if bad >= 0:
            raise IndexError(self._what_is_missing(ranges, bad, call.num_tokens))

    def _what_is_missing(self, ranges: Ranges, index: int, num_tokens: int) -> str:
        """Return what a range that the kernel refused reaches for, and what there is."""
        start, length, first, kv_len = (
            int(getattr(ranges, name)[index]) for name in ("q_start", "q_len", "first_block", "kv_len")
        )
        if length > 0 and not 0 <= start <= num_tokens - length:
            return f"range {index}: q_start={start}, q_len={length}: must lie within the {num_tokens} query tokens"
        listed, blocks = ranges.block_ids.shape[0], -(-kv_len // self.kv.layout.block_size)
        if blocks > 0 and not 0 <= first <= listed - blocks:
            return (
                f"range {index}: kv_len={kv_len}, first_block={first}: the ids of {blocks} blocks must lie within the "
                f"{listed} of block_ids"
            )
        return (
            f"range {index} reads a block that does not exist: there are {self.kv.num_blocks} pages and "
            f"{self.kv.num_records} records"
        )

    def _check(self, name: str, tensor: torch.Tensor, num_tokens: int) -> None:
        heads, dim = self._heads
        if (
            tensor.shape[1:] != self._heads
            or tensor.shape[0] < num_tokens
            or tensor.dtype != self.kv.layout.dtype
            or tensor.stride()[1:] != (dim, 1)
        ):
            raise ValueError(
                f"{name}: {tensor.dtype}, shape {tuple(tensor.shape)}, strides {tensor.stride()}: must be "
                f"{self.kv.layout.dtype}, [at least {num_tokens}, {heads}, {dim}], the heads of a token adjacent"
            )


def layout_for(dtype: torch.dtype, num_kv_heads: int, head_dim: int, block_size: int) -> PageLayout:
    """Return the only layout that the kernel reads and writes: K by channels, V by tokens.

    Raises:
        ValueError: there is no code for such pages; names what is allowed.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"dtype={dtype}: must be one of {', '.join(map(str, _DTYPES))}")
    if head_dim % 32 or not 0 < head_dim <= 512:
        raise ValueError(f"head_dim={head_dim}: must be a multiple of 32, at most 512")
    if block_size % STEP:
        raise ValueError(f"block_size={block_size}: must be a multiple of {STEP}")
    return PageLayout.transposed_keys(dtype, num_kv_heads, head_dim, block_size)


def write(
    key: torch.Tensor, value: torch.Tensor, kv: PagedKV, slot_mapping: torch.Tensor, num_tokens: int | None = None
) -> None:
    """Write the K and V of tokens into their pages.

    Args:
        key: [tokens, KV heads, D], in the type of the KV; tokens may lie apart.
        value: Like the key.
        kv: Where to; a record is never written.
        slot_mapping: Block times tokens of a block plus the place in it, int64, contiguous; negative: not written.
        num_tokens: How many of the tokens; by default as many as there are slots.

    Raises:
        IndexError: a slot lies behind the pages; nothing is written.
    """
    layout = kv.layout
    count = slot_mapping.shape[0] if num_tokens is None else num_tokens
    bad = library().write_kv(
        key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0), kv.pages.data_ptr(), kv.pages.stride(0),
        kv.num_blocks, slot_mapping.data_ptr(), count, layout.num_heads, layout.head_dim, layout.block_size,
        layout.dtype.itemsize, torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise IndexError(f"slot {int(slot_mapping[bad])}: must be less than {kv.num_blocks * layout.block_size}")


def arithmetic() -> str:
    """Return the instructions that the kernel uses on this machine."""
    found: bytes = library().arithmetic()
    return found.decode()


@functools.cache
def library() -> Any:
    """Return the kernel, compiled if that was not done before.

    Raises:
        native.CompilerMissing, native.CompileError: It can't be.
    """
    found = native.load(SOURCE, flags=FLAGS)
    found.attend.argtypes, found.attend.restype = [_POINTER], _INT64
    found.arithmetic.restype = ctypes.c_char_p
    found.write_kv.restype = _INT64
    found.write_kv.argtypes = [
        _POINTER, _INT64, _POINTER, _INT64, _POINTER, _INT64, _INT64, _POINTER, *[_INT64] * 6,
    ]  # fmt: skip
    return found
