"""What the workers make of gaps: positions of queries, and rows of attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_ext.kv.partial_prefix.layout import GapLayout
from vllm_ext.kv.partial_prefix.rows import place_queries, split_rows

DECODE, GAPPED, LATER = "decode", "gapped", "later"


def placed() -> tuple[np.ndarray, dict[int, list[tuple[int, int]]]]:
    """A decode, a request with two gaps that a step computes from their start to behind their end, and a prefill."""
    num_tokens = np.array([1, 12, 3])
    ends = np.cumsum(num_tokens)
    query_pos = np.concatenate([np.arange(n) for n in num_tokens])
    computed = np.array([50, 12, 40, 0, 0])  # of a batch with more places than requests
    layout = GapLayout(((0, 4), (8, 12), (16, 20)))
    rows = place_queries(
        {GAPPED: layout, "gone": layout}, [DECODE, GAPPED, LATER], computed, num_tokens, ends, query_pos
    )
    return query_pos, rows


def test_queries_within_gaps_get_their_places() -> None:
    query_pos, rows = placed()
    positions = query_pos + np.repeat([50, 12, 40], [1, 12, 3])
    assert positions.tolist() == [50, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 40, 41, 42]
    assert rows == {1: [(4, 8), (4, 16), (4, 24)]}


def test_a_row_for_each_piece() -> None:
    _, rows = placed()
    cpu = torch.tensor([0, 1, 13, 16], dtype=torch.int32)
    lengths = torch.tensor([51, 24, 43], dtype=torch.int32)
    before = CommonAttentionMetadata(
        query_start_loc=cpu, query_start_loc_cpu=cpu, seq_lens=lengths, seq_lens_cpu_upper_bound=lengths, num_reqs=3,
        num_actual_tokens=16, max_query_len=12, max_seq_len=51,
        block_table_tensor=torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32),
        slot_mapping=torch.arange(16), is_prefilling=torch.tensor([False, True, True]), req_idx=np.array([7, 8, 9]),
    )  # fmt: skip
    after = split_rows(before, rows)
    assert after.num_reqs == 5
    assert after.query_start_loc.tolist() == after.query_start_loc_cpu.tolist() == [0, 1, 5, 9, 13, 16]
    assert after.seq_lens.tolist() == [51, 8, 16, 24, 43]
    assert after.seq_lens_cpu_upper_bound is not None
    assert after.seq_lens_cpu_upper_bound.tolist() == [51, 8, 16, 24, 43]
    assert after.block_table_tensor.tolist() == [[1, 2], [3, 4], [3, 4], [3, 4], [5, 6]]
    assert (after.max_query_len, after.max_seq_len, after.num_actual_tokens) == (4, 51, 16)
    assert after.is_prefilling is not None
    assert after.is_prefilling.tolist() == [False, True, True, True, True]
    assert after.req_idx is not None
    assert after.req_idx.tolist() == [7, 8, 8, 8, 9]
    assert after.query_start_loc.dtype == after.seq_lens.dtype == torch.int32
    assert before.num_reqs == 3, "what others hold on to is not changed"


def test_a_runner_that_hides_lengths_is_refused() -> None:
    one = torch.tensor([0, 1])
    hidden = CommonAttentionMetadata(
        query_start_loc=one, query_start_loc_cpu=one, seq_lens=one[1:], num_reqs=1, num_actual_tokens=1,
        max_query_len=1, max_seq_len=1, block_table_tensor=one[None], slot_mapping=one[:1],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="does not tell the lengths"):
        split_rows(hidden, {0: [(1, 1)]})
