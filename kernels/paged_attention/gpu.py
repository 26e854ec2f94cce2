"""Paged attention on a GPU, in Triton: each tile of queries walks over blocks as they are and over records in INT8.

Grid: (tiles of queries, KV heads, splits of the KV). A program owns BLOCK_M rows, which are query tokens times the
query heads of one KV head, so that a loaded K or V serves all of them, and its share of the blocks that they see. Each
block is one tile of the walk: what it is, page or record, is one scalar branch, and records are dequantised in
registers. 16 rows are what the tensor cores need at least, and all that registers have room for: of 255, blocks of 64
tokens in INT8 take 229 at head size 128 on sm_90. Splits keep all multiprocessors busy where there are few tiles, also
for queries of several tokens; a second kernel merges them by their log-sum-exp. Nobody waits for the device: the host
knows bounds only, and programs find their range by bisection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from vllm_ext.kernels.kv_quant.format import RecordFormat
from vllm_ext.kernels.paged_attention.format import PagedKV, Ranges

BLOCK_M = 16
_MOST_SPLITS = 16
_BLOCKS_PER_SPLIT = 4
"""A split with fewer blocks costs more in the merge than it saves."""
_PROGRAMS_PER_PROCESSOR = 2
_LEAST_BLOCK = 16
_NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _find_range(tile, tile_end, num_ranges):  # type: ignore[no-untyped-def]
    """Return the range of a tile: the first whose tiles end behind it, by bisection."""
    low = 0
    high = num_ranges
    while low < high:
        middle = (low + high) // 2
        if tl.load(tile_end + middle) > tile:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, pages, records, channels, out, lse, partial, block_ids, first_block, q_start, q_len, q_position, kv_len,
    tile_end, num_ranges, num_blocks, query_stride, out_stride, page_stride, record_bytes, record_items, minima_item,
    head_stride, token_stride, value_offset, scale, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, HAS_RECORDS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r = _find_range(tile, tile_end, num_ranges)
    if r >= num_ranges:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    tiles_before = tl.load(tile_end + r - 1, mask=r > 0, other=0)
    first = (tile - tiles_before) * TOKENS  # query token of the range
    length, limit = tl.load(q_len + r), tl.load(kv_len + r)
    position0 = tl.load(q_position + r) + first

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    token = rows // GROUP
    row_there = (token < TOKENS) & (first + token < length)
    row_token = (tl.load(q_start + r) + first + token).to(tl.int64)
    row_head = head * GROUP + rows % GROUP
    dim_there = dims < DIM
    both = row_there[:, None] & dim_there[None, :]
    at = row_token[:, None] * query_stride + row_head[:, None] * DIM + dims[None, :]
    q = tl.load(query + at, mask=both, other=0.0)  # [ROWS, WIDTH]
    position = position0 + token

    last = tl.minimum(limit, position0 + tl.minimum(TOKENS, length - first))
    blocks = tl.maximum(0, (last + BLOCK - 1) // BLOCK)
    start = tl.where(window > 0, tl.maximum(0, position0 + 1 - window) // BLOCK, 0)
    each = (tl.maximum(0, blocks - start) + SPLITS - 1) // SPLITS
    begin = start + split * each
    end = tl.minimum(blocks, begin + each)
    ids = block_ids + tl.load(first_block + r)

    highest = tl.full([ROWS], _NEG_INF, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    tokens = tl.arange(0, BLOCK)
    inside = head * head_stride + tokens[:, None] * token_stride + dims[None, :]  # [BLOCK, WIDTH]
    for b in range(begin, end):
        block = tl.load(ids + b).to(tl.int64)
        key = b * BLOCK + tokens
        there = (key < last)[:, None] & dim_there[None, :]  # behind the last token may stand anything
        if HAS_RECORDS and block >= num_blocks:
            codes = records + (block - num_blocks) * record_bytes
            lowest = channels + (block - num_blocks) * record_items + minima_item + 2 * head * DIM + dims
            steps = lowest + 2 * KV_HEADS * DIM
            k = tl.load(codes + inside, mask=there, other=0).to(tl.float32)
            low = tl.load(lowest, mask=dim_there, other=0.0).to(tl.float32)
            k = (low[None, :] + k * tl.load(steps, mask=dim_there, other=0.0).to(tl.float32)[None, :]).to(q.dtype)
            v = tl.load(codes + inside + value_offset, mask=there, other=0).to(tl.float32)
            low = tl.load(lowest + DIM, mask=dim_there, other=0.0).to(tl.float32)
            v = (low[None, :] + v * tl.load(steps + DIM, mask=dim_there, other=0.0).to(tl.float32)[None, :]).to(q.dtype)
        else:
            page = pages + block * page_stride
            k = tl.load(page + inside, mask=there, other=0.0)
            v = tl.load(page + inside + value_offset, mask=there, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [ROWS, BLOCK]
        if softcap > 0:
            e = tl.exp(-2.0 * tl.abs(s) / softcap)
            size = softcap * (1.0 - e) / (1.0 + e)  # tanh
            s = tl.where(s < 0, -size, size)
        seen = (key[None, :] <= position[:, None]) & (key < last)[None, :] & row_there[:, None]
        seen = seen & ((window <= 0) | (key[None, :] > position[:, None] - window))
        s = tl.where(seen, s, _NEG_INF)
        now = tl.maximum(highest, tl.max(s, 1))
        base = tl.where(now == _NEG_INF, 0.0, now)
        p = tl.exp(s - base[:, None])
        fade = tl.exp(highest - base)
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        highest = now

    if SPLITS > 1:
        number = ((tile * KV_HEADS + head) * SPLITS + split).to(tl.int64)
        to = partial + number * ROWS * (WIDTH + 2)
        tl.store(to + rows[:, None] * WIDTH + dims[None, :], acc)
        tl.store(to + ROWS * WIDTH + rows, highest)
        tl.store(to + ROWS * (WIDTH + 1) + rows, total)
    else:
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        at = row_token[:, None] * out_stride + row_head[:, None] * DIM + dims[None, :]
        tl.store(out + at, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=both)
        if HAS_LSE:
            tl.store(lse + row_token * HEADS + row_head, highest + tl.log(total), mask=row_there)


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    partial, out, lse, q_start, q_len, tile_end, num_ranges, out_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    tile, head = tl.program_id(0), tl.program_id(1)
    r = _find_range(tile, tile_end, num_ranges)
    if r >= num_ranges:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    first = (tile - tl.load(tile_end + r - 1, mask=r > 0, other=0)) * TOKENS
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    token = rows // GROUP
    row_there = (token < TOKENS) & (first + token < tl.load(q_len + r))
    row_token = (tl.load(q_start + r) + first + token).to(tl.int64)
    row_head = head * GROUP + rows % GROUP

    highest = tl.full([ROWS], _NEG_INF, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for split in range(SPLITS):
        number = ((tile * KV_HEADS + head) * SPLITS + split).to(tl.int64)
        at = partial + number * ROWS * (WIDTH + 2)
        one = tl.load(at + ROWS * WIDTH + rows)
        now = tl.maximum(highest, one)
        base = tl.where(now == _NEG_INF, 0.0, now)
        fade, weight = tl.exp(highest - base), tl.exp(one - base)
        total = total * fade + tl.load(at + ROWS * (WIDTH + 1) + rows) * weight
        acc = acc * fade[:, None] + tl.load(at + rows[:, None] * WIDTH + dims[None, :]) * weight[:, None]
        highest = now
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    to = row_token[:, None] * out_stride + row_head[:, None] * DIM + dims[None, :]
    both = row_there[:, None] & (dims < DIM)[None, :]
    tl.store(out + to, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=both)
    if HAS_LSE:
        tl.store(lse + row_token * HEADS + row_head, highest + tl.log(total), mask=row_there)


@dataclass(frozen=True)
class Launch:
    """How many programs serve a step."""

    rows: int
    """Of a tile."""
    tiles: int
    """At most; those that no range needs end at once."""
    splits: int

    @classmethod
    def of(cls, kv: PagedKV, num_heads: int, num_tokens: int, num_ranges: int, longest: int, processors: int) -> Launch:
        """Choose.

        Args:
            kv: What is read.
            num_heads: Query heads.
            num_tokens: Query tokens of all ranges, at most.
            num_ranges: Ranges.
            longest: Tokens of the longest range's KV, at most.
            processors: Multiprocessors of the device.
        """
        group = num_heads // kv.layout.num_heads
        rows = max(BLOCK_M, triton.next_power_of_2(group))
        tiles = num_tokens // (rows // group) + num_ranges
        wanted = processors * _PROGRAMS_PER_PROCESSOR // max(1, tiles * kv.layout.num_heads)
        useful = -(-longest // kv.layout.block_size) // _BLOCKS_PER_SPLIT
        splits = max(1, min(_MOST_SPLITS, wanted, useful))
        return cls(rows, tiles, 1 << (splits.bit_length() - 1))


def attend(
    query: torch.Tensor, kv: PagedKV, ranges: Ranges, out: torch.Tensor, lse: torch.Tensor | None = None, *,
    scale: float, window: int = 0, softcap: float = 0.0, num_tokens: int, longest: int, processors: int = 0,
) -> None:  # fmt: skip
    """Attend as `vllm_ext.kernels.paged_attention.paged_attention` does, without waiting for the device.

    Args:
        query: [tokens, heads, D], in the type of the KV; tokens may lie apart.
        kv: Pages whose channels are next to each other, and records.
        ranges: Which tokens attend to which blocks; that these exist is for the caller to see to.
        out: Like the query.
        lse: [tokens, heads], fp32, or none.
        scale: Of the scores.
        window: Most recent tokens that a query sees; 0: all.
        softcap: Bound of the scores; 0: none.
        num_tokens: Query tokens of all ranges, at most; the host knows no better.
        longest: Tokens of the longest range's KV, at most.
        processors: Multiprocessors; 0: those of the device.

    Raises:
        ValueError: a size or layout that the kernel has no code for; nothing is written.
    """
    check(kv, query.shape[1])
    layout, num_heads = kv.layout, query.shape[1]
    if not processors:
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    launch = Launch.of(kv, num_heads, num_tokens, ranges.num_ranges, longest, processors)
    tokens = launch.rows // (num_heads // layout.num_heads)
    tile_end = torch.cumsum((ranges.q_len + tokens - 1) // tokens, 0, dtype=torch.int32)
    sizes = {"HEADS": num_heads, "KV_HEADS": layout.num_heads, "DIM": layout.head_dim, "ROWS": launch.rows}
    sizes |= {"WIDTH": triton.next_power_of_2(layout.head_dim), "SPLITS": launch.splits, "HAS_LSE": lse is not None}
    records = kv.records if kv.num_records else None
    channels, fmt, item = kv.pages, RecordFormat(layout), layout.dtype.itemsize
    if records is not None:
        channels = records.view(layout.dtype)
    partial = out
    if launch.splits > 1:
        count = launch.tiles * layout.num_heads * launch.splits * launch.rows * (sizes["WIDTH"] + 2)
        partial = torch.empty(count, dtype=torch.float32, device=query.device)
    grid = (launch.tiles, layout.num_heads, launch.splits)
    told = out if lse is None else lse
    _attend[grid](
        query, kv.pages, kv.pages if records is None else records, channels, out, told, partial,
        ranges.block_ids, ranges.first_block, ranges.q_start, ranges.q_len, ranges.q_position, ranges.kv_len,
        tile_end, ranges.num_ranges, kv.num_blocks, query.stride(0), out.stride(0), kv.pages.stride(0),
        0 if records is None else records.stride(0), 0 if records is None else records.stride(0) // item,
        fmt.minima_offset // item, layout.head_stride, layout.k.token_stride, layout.v.offset - layout.k.offset,
        scale, softcap, window, BLOCK=layout.block_size, HAS_RECORDS=records is not None, num_warps=4, num_stages=2,
        **sizes,
    )  # fmt: skip
    if launch.splits > 1:
        _merge[grid[:2]](
            partial, out, told, ranges.q_start, ranges.q_len, tile_end, ranges.num_ranges, out.stride(0),
            num_warps=4, **sizes,
        )  # fmt: skip


def check(kv: PagedKV, num_heads: int) -> None:
    """Raise ValueError if the kernel has no code for these sizes, or this layout."""
    layout: Any = kv.layout
    block, group = layout.block_size, num_heads // layout.num_heads
    if block < _LEAST_BLOCK or block & (block - 1):
        raise ValueError(f"block_size={block}: must be a power of two, at least {_LEAST_BLOCK}, on a GPU")
    if num_heads % layout.num_heads or not group:
        raise ValueError(f"num_heads={num_heads}: must be a multiple of the {layout.num_heads} KV heads")
    if layout.k.offset or (layout.k.channel_stride, layout.v.channel_stride) != (1, 1):
        raise ValueError(f"layout={layout}: the channels of a token must be next to each other, K first, on a GPU")
    if layout.k.token_stride != layout.v.token_stride:
        raise ValueError(f"layout={layout}: tokens of K and V must be equally far apart on a GPU")
