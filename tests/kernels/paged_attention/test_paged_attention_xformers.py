"""Which query sees which key, as xformers says it in words of its own: the kernel and its definition mean the same.

Its masks of paged attention are of sequences with a row of a block table each, whose keys may begin anywhere in it
(``kv_seqstarts``) and whose last query sees the last key. They become matrices over all slots of all pages, with which
attention is a plain softmax. The compiled part of xformers is not needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

from tests.kernels.paged_attention.batches import Batch, Range, budget, int32, make_batch
from tests.kernels.paged_attention.test_paged_attention_cpu import DECODE, DTYPES, PREFILL, SUFFIXES
from tests.support.extent import with_full
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, cpu, paged_attention, reference

masks: Any = pytest.importorskip("xformers.ops.fmha.attn_bias", reason="no xformers: requirements/attention.txt")

SCALE = 0.125
HEADS, KV_HEADS, DIM = 4, 2, 64
INT8 = [Range(r.q_len, r.kv_len, int8=".x") for r in SUFFIXES]
WINDOWS = (1, 31, 33, 100, 10_000)
RECOMPUTED = [Range(40, 100, position=0), Range(9, 100, position=10), Range(1, 33, position=31), Range(23, 163)]
"""Tokens in the middle of KV that is there: they see what comes before them only."""


@dataclass(frozen=True)
class Sequences:
    """Ranges with queries, in the terms of xformers."""

    rows: torch.Tensor
    """Of the query, those of one sequence behind those of the other."""
    q_seqlen: list[int]
    kv_seqlen: list[int]
    """Keys up to the one at the position of the last query."""
    tables: torch.Tensor
    """[sequences, most blocks]; block 0 is nobody's."""
    page_size: int

    @classmethod
    def of(cls, ranges: Ranges, page_size: int) -> Sequences:
        """Take ranges none of whose queries stands behind the last key."""
        held = [r for r in range(ranges.num_ranges) if int(ranges.q_len[r])]
        lengths, starts = ([int(of[r]) for r in held] for of in (ranges.q_len, ranges.q_start))
        ends = [int(ranges.q_position[r]) + int(ranges.q_len[r]) for r in held]
        assert all(end <= int(ranges.kv_len[r]) for r, end in zip(held, ends, strict=True))
        tables = torch.zeros(len(held), -(-max(ends) // page_size), dtype=torch.int32)
        for row, (r, end) in enumerate(zip(held, ends, strict=True)):
            ids = ranges.block_ids[int(ranges.first_block[r]) :][: -(-end // page_size)]
            tables[row, : len(ids)] = ids
        rows = torch.cat([start + torch.arange(n) for start, n in zip(starts, lengths, strict=True)])
        return cls(rows, lengths, ends, tables, page_size)

    def matrix(self, mask: Any, num_blocks: int) -> torch.Tensor:
        """Return whether a query sees a slot, [queries, slots of all pages]."""
        shape = (sum(self.q_seqlen), self.tables.numel() * self.page_size)
        found = mask.materialize(shape) == 0
        assert found.shape[1] <= num_blocks * self.page_size
        return torch.nn.functional.pad(found, (0, num_blocks * self.page_size - found.shape[1]))

    def causal(self) -> Any:
        return masks.PagedBlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
            self.q_seqlen, self.kv_seqlen, self.tables, self.page_size
        )

    def causal_from(self, starts: list[int]) -> Any:
        """Without the first keys of each sequence."""
        left = [end - start for end, start in zip(self.kv_seqlen, starts, strict=True)]
        unpaged = masks.BlockDiagonalCausalWithOffsetGappyKeysMask
        return self._gappy(unpaged, masks.PagedBlockDiagonalCausalWithOffsetGappyKeysMask, starts, left)

    def local(self, window: int) -> Any:
        """Its mask for sliding windows has no form for pages of its own: it is told to the one that has."""
        unpaged = partial(masks.BlockDiagonalCausalLocalAttentionPaddedKeysMask, _window_size=window)
        paged = type("PagedLocal", (masks.PagedBlockDiagonalPaddedKeysMask,), {"_UNPAGED_TYPE": staticmethod(unpaged)})
        return paged.from_seqlens(self.q_seqlen, self.kv_seqlen, self.tables, self.page_size)

    def keys(self, starts: list[int], counts: list[int]) -> Any:
        """Of those keys every query of a sequence sees all."""
        return self._gappy(masks.BlockDiagonalGappyKeysMask, masks.PagedBlockDiagonalGappyKeysMask, starts, counts)

    def _gappy(self, unpaged: Any, paged: Any, starts: list[int], counts: list[int]) -> Any:
        """By way of the form without pages: in 0.0.35 ``from_seqlens`` of the one with pages refuses all there is."""
        row = self.tables.shape[1] * self.page_size
        all_starts = [i * row + start for i, start in enumerate(starts)]
        mask = unpaged.from_seqlens(self.q_seqlen, [*all_starts, len(starts) * row], counts)
        return mask.make_paged(self.tables, self.page_size, row, paged)


def slots(kv: PagedKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all slots of all pages in fp64, [slots, heads, D], as the layout says in words."""
    n = kv.layout.block_size
    halves = kv.pages.double().reshape(len(kv.pages), KV_HEADS, 2, n * DIM)
    keys = halves[:, :, 0].unflatten(-1, (DIM, n)).permute(0, 3, 1, 2)  # by channels
    values = halves[:, :, 1].unflatten(-1, (n, DIM)).permute(0, 2, 1, 3)  # by tokens
    return keys.flatten(0, 1), values.flatten(0, 1)


def attended(batch: Batch, sequences: Sequences, mask: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp by the matrix of a mask, with zeros and -inf of rows in no sequence."""
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in slots(batch.plain))
    seen = sequences.matrix(mask, batch.plain.num_blocks)
    scores = torch.einsum("qhd,khd->hqk", batch.query[sequences.rows].double(), keys) * SCALE
    scores = scores.masked_fill(~seen, -math.inf)  # NaN of what nobody sees among them
    output = torch.zeros(batch.query.shape, dtype=torch.float64)
    lse = torch.full(batch.query.shape[:2], -math.inf, dtype=torch.float64)
    weights = torch.softmax(scores, -1).masked_fill(~seen.any(-1)[:, None], 0.0)
    output[sequences.rows] = torch.einsum("hqk,khd->qhd", weights, values.nan_to_num())
    lse[sequences.rows] = torch.logsumexp(scores, -1).T
    return output, lse


def assert_means_the_same(batch: Batch, sequences: Sequences, mask: Any, window: int = 0) -> None:
    """Compare the definition, and the kernel within its budget, with a mask."""
    expected, expected_lse = attended(batch, sequences, mask)
    defined, defined_lse = reference.paged_attention(
        batch.query, batch.plain, batch.plain_ranges, scale=SCALE, window=window
    )
    torch.testing.assert_close(defined, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(defined_lse, expected_lse, rtol=1e-9, atol=1e-9)
    found = paged_attention(batch.query, batch.kv, batch.ranges, scale=SCALE, window=window)
    allowed = budget(batch, expected, scale=SCALE, window=window)
    assert float((found.double() - expected).abs().max()) <= allowed


def made(wanted: list[Range], dtype: torch.dtype = torch.float32, page_size: int = 32) -> tuple[Batch, Sequences]:
    batch = make_batch(cpu.layout_for(dtype, KV_HEADS, DIM, page_size), HEADS, wanted)
    return batch, Sequences.of(batch.plain_ranges, page_size)


@pytest.mark.parametrize(
    ("dtype", "page_size"),
    with_full([*product(DTYPES, [32]), (torch.float32, 96)], product(DTYPES, [32, 96])),
    ids=str,
)
@pytest.mark.parametrize(
    "wanted", [DECODE, PREFILL, SUFFIXES, INT8, RECOMPUTED], ids=["decode", "prefill", "suffix", "int8", "recomputed"]
)
def test_queries_see_what_comes_before_them(dtype: torch.dtype, page_size: int, wanted: list[Range]) -> None:
    batch, sequences = made(wanted, dtype, page_size)
    assert_means_the_same(batch, sequences, sequences.causal())


@pytest.mark.parametrize(
    ("dtype", "window"),
    with_full([*product([torch.float32], WINDOWS), (torch.bfloat16, 33)], product(DTYPES, WINDOWS)),
    ids=str,
)
@pytest.mark.parametrize("wanted", [DECODE, SUFFIXES, RECOMPUTED], ids=["decode", "suffix", "recomputed"])
def test_windows_have_the_same_width(dtype: torch.dtype, window: int, wanted: list[Range]) -> None:
    batch, sequences = made(wanted, dtype)
    assert_means_the_same(batch, sequences, sequences.local(window), window)


@pytest.mark.parametrize("window", [1, 20, 64])
def test_window_of_one_query_is_a_gap_before_its_keys(window: int) -> None:
    batch, sequences = made([r for r in DECODE if r.kv_len >= window])
    starts = [end - window for end in sequences.kv_seqlen]
    assert_means_the_same(batch, sequences, sequences.keys(starts, [window] * len(starts)), window)


@pytest.mark.parametrize("dropped", [1, 2])
def test_range_over_the_last_blocks_is_a_sequence_whose_first_keys_are_dropped(dropped: int) -> None:
    """As of a conversation whose leading KV was evicted, or of a part that is merged by its log-sum-exp."""
    batch, sequences = made([SUFFIXES[0], Range(5, 97), Range(40, 140)])
    tokens = dropped * 32

    def rest(ranges: Ranges) -> Ranges:
        return Ranges(
            ranges.q_start, ranges.q_len, ranges.q_position - tokens, ranges.kv_len - tokens,
            ranges.first_block + dropped, ranges.block_ids,
        )  # fmt: skip

    part = Batch(batch.query, batch.kv, rest(batch.ranges), batch.plain, rest(batch.plain_ranges))
    assert_means_the_same(part, sequences, sequences.causal_from([tokens] * 3))


@pytest.mark.parametrize("position", [300, 1000])
def test_queries_behind_the_last_key_see_all_of_them(position: int) -> None:
    """The pass over the older of two parts of a request's KV."""
    batch = make_batch(cpu.layout_for(torch.float32, KV_HEADS, DIM, 32), HEADS, [Range(17, 300, position=position)])
    ranges = batch.plain_ranges
    ids = ranges.block_ids[None, :]
    rows = int(ranges.q_start[0]) + torch.arange(17)
    sequences = Sequences(rows, [17], [300], ids, 32)
    assert_means_the_same(batch, sequences, sequences.keys([0], [300]))


def test_two_ranges_over_one_list_of_blocks_are_two_sequences_with_one_table() -> None:
    """A gap that is computed again, and the new prompt behind the kept KV."""
    whole, _ = made([Range(12 + 30, 170)])
    r = whole.ranges
    first = int(r.q_start[0])
    ranges = Ranges(
        int32([first, first + 12]), int32([12, 30]), int32([50, 140]), int32([170, 170]),
        r.first_block.repeat(2), r.block_ids,
    )  # fmt: skip
    batch = Batch(whole.query, whole.kv, ranges, whole.plain, ranges)
    sequences = Sequences.of(ranges, 32)
    assert torch.equal(sequences.tables[0, :2], sequences.tables[1, :2])
    assert_means_the_same(batch, sequences, sequences.causal())


MISTAKES: dict[str, Callable[[Sequences], Any]] = {
    "a key more": lambda s: s.keys([0] * len(s.q_seqlen), s.kv_seqlen),
    "a window one wider": lambda s: s.local(34),
    "one dropped": lambda s: s.causal_from([1] * len(s.q_seqlen)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_comparison_sees_a_mistake_of_one_key(mistake: str) -> None:
    batch, sequences = made([Range(2, 97), Range(8, 300)])
    with pytest.raises(AssertionError, match="not close"):
        assert_means_the_same(batch, sequences, MISTAKES[mistake](sequences), 33 if "window" in mistake else 0)
