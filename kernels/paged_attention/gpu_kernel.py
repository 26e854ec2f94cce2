"""The Triton kernels of paged attention; `gpu` launches them.

A *tile* is up to ROWS rows, which are query tokens times the query heads of one KV head, so that a loaded K or V serves
all of them. An *item* is a tile and a share of the KV blocks that it sees: one of its splits.

- `plan` divides a step into items, on the device and once for all layers: how long sequences are is known there only.
- `attend` walks over the KV of one item, first over blocks in INT8, then over pages. These are two loops without a
  branch, since Triton prefetches (cp.async) only what every turn of a loop loads; blocks of the other kind are masked.
- `merge` joins the splits of a tile by their log-sum-exp.

16 rows are what the tensor cores need at least, and enough for decode, which waits for memory. 64 are what a warpgroup
multiplies at once (wgmma), for queries of many tokens. A turn of the loop takes 64 tokens, or 32 where heads have more
than 128 numbers, and in INT8 half as many, whatever the size of a block: more would not fit into the registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NEG_INF = tl.constexpr(float("-inf"))
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit  # type: ignore[untyped-decorator]
def _needs(q_len, q_position, kv_len, r, there, TOKENS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the tiles of some ranges, and the blocks that their last queries see."""
    length = tl.load(q_len + r, mask=there, other=0)
    last = tl.minimum(tl.load(kv_len + r, mask=there, other=0), tl.load(q_position + r, mask=there, other=0) + length)
    return (length + TOKENS - 1) // TOKENS, (tl.maximum(last, 0) + BLOCK - 1) // BLOCK


@triton.jit(do_not_specialize=("num_ranges", "most_items", "most_partials", "most_merges"))  # type: ignore[untyped-decorator]
def plan(  # type: ignore[no-untyped-def]
    q_len, q_position, kv_len, first_item, splits, first_partial, item_range, merge_item,
    num_ranges, most_items, most_partials, most_merges,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Divide a step into items; one program.

    Every range is split into shares of the smallest number of blocks, at least LEAST, with which there are at most
    ``most_items`` items, and at most ``most_partials`` of them are not the only one of their tile.

    Args:
        first_item, splits, first_partial: [num_ranges], of each range: its first item, splits of each of its tiles, and
            where their partial results begin.
        item_range: [most_items], range of each item; -1 where there is none.
        merge_item: [most_merges], first item of each tile with several; -1 where there is none.
    """
    lane = tl.arange(0, LANES)
    longest = 0
    for at in range(0, num_ranges, LANES):
        tiles, blocks = _needs(q_len, q_position, kv_len, at + lane, at + lane < num_ranges, TOKENS, BLOCK)
        longest = tl.maximum(longest, tl.max(tl.where(tiles > 0, blocks, 0), 0))
    low, high = tl.minimum(longest, LEAST), longest
    while low < high:
        share = (low + high) // 2
        items, partials = 0, 0
        for at in range(0, num_ranges, LANES):
            tiles, blocks = _needs(q_len, q_position, kv_len, at + lane, at + lane < num_ranges, TOKENS, BLOCK)
            parts = tl.maximum(1, (blocks + share - 1) // share)
            items += tl.sum(tiles * parts, 0)
            partials += tl.sum(tl.where(parts > 1, tiles * parts, 0), 0)
        fits = (items <= most_items) & (partials <= most_partials)
        high = tl.where(fits, share, high)
        low = tl.where(fits, low, share + 1)
    share = tl.maximum(1, low)

    for at in range(0, most_items, LANES):
        tl.store(item_range + at + lane, -1, mask=at + lane < most_items)
    for at in range(0, most_merges, LANES):
        tl.store(merge_item + at + lane, -1, mask=at + lane < most_merges)
    tl.debug_barrier()  # below, other threads write to the same places
    items, partials, merges = 0, 0, 0
    for at in range(0, num_ranges, LANES):
        r, there = at + lane, at + lane < num_ranges
        tiles, blocks = _needs(q_len, q_position, kv_len, r, there, TOKENS, BLOCK)
        parts = tl.maximum(1, (blocks + share - 1) // share)
        mine = tiles * parts
        split = tl.where(parts > 1, mine, 0)
        merged = tl.where(parts > 1, tiles, 0)
        first = items + tl.cumsum(mine, 0) - mine
        first_merge = merges + tl.cumsum(merged, 0) - merged
        tl.store(first_item + r, first, mask=there)
        tl.store(splits + r, parts, mask=there)
        tl.store(first_partial + r, partials + tl.cumsum(split, 0) - split, mask=there)
        for i in range(tl.max(mine, 0)):
            tl.store(item_range + first + i, r, mask=i < mine)
            tl.store(merge_item + first_merge + i // parts, first + i, mask=(i < split) & (i % parts == 0))
        items += tl.sum(mine, 0)
        partials += tl.sum(split, 0)
        merges += tl.sum(merged, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _kinds(ids, begin, end, num_blocks, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return behind which of some blocks none is in INT8, and the first that is a page."""
    int8_end, page_begin = begin, end
    for at in range(begin, end, CHUNK):
        b = at + tl.arange(0, CHUNK)
        is_int8 = tl.load(ids + b, mask=b < end, other=0) >= num_blocks
        int8_end = tl.maximum(int8_end, tl.max(tl.where((b < end) & is_int8, b + 1, begin), 0))
        page_begin = tl.minimum(page_begin, tl.min(tl.where((b < end) & ~is_int8, b, end), 0))
    return int8_end, page_begin


@triton.jit  # type: ignore[untyped-decorator]
def _fold(  # type: ignore[no-untyped-def]
    q, k, v, key, there, position, highest, total, acc, scale, softcap, window,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add some tokens of KV to the running sums of an item, whose scores are powers of two.

    Args:
        q: [ROWS, WIDTH].
        k, v: [TOKENS, WIDTH].
        key, there: [TOKENS], positions, and whether there is such a token.
        position: [ROWS], of the queries.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [ROWS, TOKENS]
    if HAS_SOFTCAP:
        e = tl.exp2(tl.abs(s) * (-2.0 * _LOG2_E / softcap))
        size = softcap * (1.0 - e) / (1.0 + e)  # tanh
        s = tl.where(s < 0, -size, size)
    seen = (key[None, :] <= position[:, None]) & there[None, :]
    if HAS_WINDOW:
        seen = seen & (key[None, :] > position[:, None] - window)
    s = tl.where(seen, s * _LOG2_E, _NEG_INF)
    now = tl.maximum(highest, tl.max(s, 1))
    base = tl.where(now == _NEG_INF, 0.0, now)
    p = tl.exp2(s - base[:, None])
    fade = tl.exp2(highest - base)
    total = total * fade + tl.sum(p, 1)
    acc = acc * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return now, total, acc


@triton.jit(do_not_specialize=("num_blocks", "window"))  # type: ignore[untyped-decorator]
def attend(  # type: ignore[no-untyped-def]
    query, pages, int8_blocks, channels, out, lse, partial, block_ids, first_block, q_start, q_len, q_position, kv_len,
    first_item, splits, first_partial, item_range,
    num_blocks, query_stride, out_stride, page_stride, int8_stride, channel_stride, minima_item,
    head_stride, token_stride, value_offset, scale, softcap, window,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PAGE_TOKENS: tl.constexpr, INT8_TOKENS: tl.constexpr,
    HAS_INT8: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of one item to its share of the KV, for one KV head; grid (items, KV heads)."""
    item, head = tl.program_id(0), tl.program_id(1)
    r = tl.load(item_range + item)
    if r < 0:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    parts = tl.load(splits + r)
    local = item - tl.load(first_item + r)
    first, split = local // parts * TOKENS, local % parts  # query token of the range
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
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(0, position0 + 1 - window) // BLOCK
    each = (tl.maximum(0, blocks - start) + parts - 1) // parts
    begin = start + split * each
    end = tl.minimum(blocks, begin + each)
    ids = block_ids + tl.load(first_block + r)

    highest = tl.full([ROWS], _NEG_INF, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    page_begin = begin
    if HAS_INT8:
        int8_end, page_begin = _kinds(ids, begin, end, num_blocks, 128)
        tokens = tl.arange(0, INT8_TOKENS)
        inside = head * head_stride + tokens[:, None] * token_stride + dims[None, :]  # [INT8_TOKENS, WIDTH]
        kind = tl.arange(0, 4)  # minima of K and of V, scales of K and of V
        of_row = minima_item + 2 * head * DIM + kind % 2 * DIM + kind // 2 * (2 * KV_HEADS * DIM)
        for key0 in range(begin * BLOCK, tl.minimum(int8_end * BLOCK, last), INT8_TOKENS):
            block = tl.load(ids + key0 // BLOCK).to(tl.int64) - num_blocks
            key = key0 + tokens
            there = key < tl.where(block >= 0, last, 0)  # behind the last token may stand anything
            mask = there[:, None] & dim_there[None, :]
            codes = int8_blocks + block * int8_stride + (key0 % BLOCK) * token_stride
            k_codes = tl.load(codes + inside, mask=mask, other=0)
            v_codes = tl.load(codes + inside + value_offset, mask=mask, other=0)
            row = channels + block * channel_stride + of_row[:, None] + dims[None, :]
            within = (kind[:, None] < tl.where(block >= 0, 4, 0)) & dim_there[None, :]
            found = tl.load(row, mask=within, other=0.0).to(tl.float32)  # [4, WIDTH]
            k_low = tl.sum(tl.where(kind[:, None] == 0, found, 0.0), 0)
            v_low = tl.sum(tl.where(kind[:, None] == 1, found, 0.0), 0)
            k_step = tl.sum(tl.where(kind[:, None] == 2, found, 0.0), 0)
            v_step = tl.sum(tl.where(kind[:, None] == 3, found, 0.0), 0)
            k = (k_low[None, :] + k_codes.to(tl.float32) * k_step[None, :]).to(q.dtype)
            v = (v_low[None, :] + v_codes.to(tl.float32) * v_step[None, :]).to(q.dtype)
            highest, total, acc = _fold(
                q, k, v, key, there, position, highest, total, acc, scale, softcap, window, HAS_WINDOW, HAS_SOFTCAP
            )
    tokens = tl.arange(0, PAGE_TOKENS)
    inside = head * head_stride + dims[None, :]
    page_end = tl.minimum(end * BLOCK, last)
    for key0 in range(page_begin * BLOCK, page_end, PAGE_TOKENS):
        key = key0 + tokens
        there = key < page_end
        if PAGE_TOKENS > BLOCK:
            block = tl.load(ids + key // BLOCK, mask=there, other=0).to(tl.int64)  # [PAGE_TOKENS]
            if HAS_INT8:
                there = there & (block < num_blocks)
            page = pages + (block * page_stride + (key % BLOCK) * token_stride)[:, None] + inside
        else:
            block = tl.load(ids + key0 // BLOCK).to(tl.int64)
            if HAS_INT8:
                there = key < tl.where(block < num_blocks, page_end, 0)
            page = pages + block * page_stride + (key % BLOCK)[:, None] * token_stride + inside
        mask = there[:, None] & dim_there[None, :]
        k = tl.load(page, mask=mask, other=0.0)
        v = tl.load(page + value_offset, mask=mask, other=0.0)
        highest, total, acc = _fold(
            q, k, v, key, there, position, highest, total, acc, scale, softcap, window, HAS_WINDOW, HAS_SOFTCAP
        )

    if parts > 1:
        number = ((tl.load(first_partial + r) + local) * KV_HEADS + head).to(tl.int64)
        to = partial + number * ROWS * (WIDTH + 2)
        tl.store(to + rows[:, None] * WIDTH + dims[None, :], acc, mask=both)
        tl.store(to + ROWS * WIDTH + rows, highest, mask=row_there)
        tl.store(to + ROWS * (WIDTH + 1) + rows, total, mask=row_there)
    else:
        inverse = tl.where(total > 0, 1.0 / total, 0.0)
        at = row_token[:, None] * out_stride + row_head[:, None] * DIM + dims[None, :]
        tl.store(out + at, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=both)
        if HAS_LSE:
            tl.store(lse + row_token * HEADS + row_head, (highest + tl.log2(total)) * _LN_2, mask=row_there)


@triton.jit  # type: ignore[untyped-decorator]
def merge(  # type: ignore[no-untyped-def]
    partial, out, lse, q_start, q_len, first_item, splits, first_partial, item_range, merge_item, out_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    CHUNK: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Join the splits of one row; grid (tiles with several, KV heads, rows of a tile that queries have)."""
    item, head, row = tl.load(merge_item + tl.program_id(0)), tl.program_id(1), tl.program_id(2)
    if item < 0:
        return
    GROUP: tl.constexpr = HEADS // KV_HEADS
    TOKENS: tl.constexpr = ROWS // GROUP
    r = tl.load(item_range + item)
    parts = tl.load(splits + r)
    local = item - tl.load(first_item + r)
    token = local // parts * TOKENS + row // GROUP
    if (row // GROUP >= TOKENS) | (token >= tl.load(q_len + r)):
        return
    dims = tl.arange(0, WIDTH)
    number = ((tl.load(first_partial + r) + local).to(tl.int64) * KV_HEADS + head) * ROWS * (WIDTH + 2)
    highest = _NEG_INF
    total = 0.0
    acc = tl.zeros([WIDTH], tl.float32)
    for at in range(0, parts, CHUNK):
        part = at + tl.arange(0, CHUNK)
        one = partial + number + part.to(tl.int64) * KV_HEADS * ROWS * (WIDTH + 2)
        size = tl.load(one + ROWS * WIDTH + row, mask=part < parts, other=_NEG_INF)
        now = tl.maximum(highest, tl.max(size, 0))
        base = tl.where(now == _NEG_INF, 0.0, now)
        fade, weight = tl.exp2(highest - base), tl.exp2(size - base)
        total = total * fade + tl.sum(tl.load(one + ROWS * (WIDTH + 1) + row, mask=part < parts, other=0.0) * weight, 0)
        values = tl.load(one[:, None] + row * WIDTH + dims[None, :], mask=(part < parts)[:, None], other=0.0)
        acc = acc * fade + tl.sum(values * weight[:, None], 0)
        highest = now
    inverse = tl.where(total > 0, 1.0 / total, 0.0)
    row_token = (tl.load(q_start + r) + token).to(tl.int64)
    row_head = head * GROUP + row % GROUP
    to = out + row_token * out_stride + row_head * DIM + dims
    tl.store(to, (acc * inverse).to(out.dtype.element_ty), mask=dims < DIM)
    if HAS_LSE:
        tl.store(lse + row_token * HEADS + row_head, (highest + tl.log2(total)) * _LN_2)
