"""Batches for kernels of paged attention: pages and records, poison wherever nobody may read, and ranges over them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from vllm_ext.kernels.kv_quant import reference as kv_quant
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kernels.paged_attention.format import PagedKV, Ranges


@dataclass(frozen=True)
class Range:
    """One range: its queries, the position of the first one, and which tokens of KV it reads."""

    q_len: int
    kv_len: int
    position: int | None = None
    """By default the queries are the last tokens."""

    int8: str = ""
    """Which of its blocks are records: ``x`` one, ``.`` none, repeated; empty: none."""


@dataclass(frozen=True)
class Batch:
    query: torch.Tensor
    kv: PagedKV
    ranges: Ranges
    plain: PagedKV
    """The same KV without records: those were dequantised into pages."""
    plain_ranges: Ranges


def int32(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(
    layout: PageLayout, num_heads: int, wanted: list[Range], *, seed: int = 0, gap: int = 2, key_sizes: float = 1.0
) -> Batch:
    """Return a batch whose pages have NaN behind the last token of a range, in blocks of no range, and between pages.

    Args:
        layout: Of the pages.
        num_heads: Query heads.
        wanted: The ranges.
        seed: Of the numbers.
        gap: Rows of the query that belong to no range, in front of each.
        key_sizes: How many times larger the last channel of a key is than the first; channels of queries are as much
            smaller, so that all have the same part in a score.
    """
    generator = torch.Generator().manual_seed(seed)
    n, heads, dim = layout.block_size, layout.num_heads, layout.head_dim
    counts = [-(-r.kv_len // n) for r in wanted]
    total = sum(counts)
    shuffled = (torch.randperm(total, generator=generator) + 1).tolist()  # block 0 is nobody's
    stored = torch.full((total + 2, layout.page_elements + 64), math.nan, dtype=layout.dtype)
    pages = stored[:, : layout.page_elements]
    fmt = RecordFormat(layout)
    records = torch.full((total, fmt.record_bytes), 255, dtype=torch.uint8)
    plain = stored.clone()[:, : layout.page_elements]
    index = torch.from_numpy(layout.index.copy())
    sizes = torch.logspace(0, math.log10(key_sizes), dim)
    ids: list[int] = []
    plain_ids: list[int] = []
    for r, count in zip(wanted, counts, strict=True):
        for b in range(count):
            block = shuffled.pop()
            held = min(n, r.kv_len - b * n)
            values = torch.randn(heads, 2, n, dim, generator=generator)
            values[:, 0] *= sizes
            values = values.to(layout.dtype)
            plain_ids.append(block)
            if r.int8 and r.int8[b % len(r.int8)] == "x":
                ids.append(len(pages) + block - 1)
                values[:, :, held:] = values[:, :, :1]  # what fills up a record is not read, but has to be finite
                plain[block][index] = values
                one = torch.tensor([block])
                records[block - 1 : block], holds = kv_quant.quantise(plain, one, fmt)
                assert holds.all()
                kv_quant.dequantise(records[block - 1 : block], plain, one, fmt)
                values = plain[block][index]
                values[:, :, held:] = math.nan
            else:
                ids.append(block)
                values[:, :, held:] = math.nan
                pages[block][index] = values
            plain[block][index] = values
    starts, at, first, block_at = [], 0, [], 0
    for r, count in zip(wanted, counts, strict=True):
        at += gap
        starts.append(at)
        first.append(block_at)
        at += r.q_len
        block_at += count
    query = (torch.randn(at, num_heads, dim, generator=generator) / sizes).to(layout.dtype)
    positions = [r.kv_len - r.q_len if r.position is None else r.position for r in wanted]

    def ranges(block_ids: list[int]) -> Ranges:
        return Ranges(
            int32(starts), int32([r.q_len for r in wanted]), int32(positions), int32([r.kv_len for r in wanted]),
            torch.tensor(first, dtype=torch.int64), int32(block_ids),
        )  # fmt: skip

    return Batch(query, PagedKV(layout, pages, records), ranges(ids), PagedKV(layout, plain), ranges(plain_ids))


def budget(batch: Batch, expected: torch.Tensor, *, scale: float, window: int = 0, softcap: float = 0.0) -> float:
    """Return the largest error allowed: twice that of the textbook formula in the type of the KV.

    A kernel that keeps scores and sums in fp32 errs less where the KV is narrower. In fp32 it adds the products of a
    score, and those of an output, one after the other, where the textbook adds in blocks: errors of a random walk.
    """
    from vllm_ext.kernels.paged_attention.format import blocks_of
    from vllm_ext.kernels.paged_attention.reference import load

    worst, longest = 0.0, int(batch.ranges.kv_len.max())
    ranges, layout = batch.plain_ranges, batch.plain.layout
    for r in range(ranges.num_ranges):
        length, kv_len = int(ranges.q_len[r]), int(ranges.kv_len[r])
        if not length or not kv_len:
            continue
        tokens = slice(int(ranges.q_start[r]), int(ranges.q_start[r]) + length)
        keys, values = load(batch.plain, blocks_of(ranges, r, layout.block_size), kv_len)
        group = batch.query.shape[1] // layout.num_heads
        keys, values = (x.repeat_interleave(group, 1).to(layout.dtype) for x in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", batch.query[tokens], keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        position, key = int(ranges.q_position[r]) + torch.arange(length)[:, None], torch.arange(kv_len)
        seen = (key <= position) & (key > position - (window or kv_len))
        scores = scores.masked_fill(~seen, -math.inf)
        plain = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), values)
        worst = max(worst, float((plain.double() - expected[tokens]).abs().nan_to_num(0.0).max()))
    walk = torch.finfo(torch.float32).eps * math.sqrt(layout.head_dim + longest)
    return 2 * worst + (walk + torch.finfo(layout.dtype).eps) * float(expected.abs().max())
