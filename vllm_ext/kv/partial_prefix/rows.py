"""The workers' side of gaps: where the tokens of a step lie, and one row of attention for each piece of a request.

A runner derives everything from the number of computed tokens, which is virtual for a request with gaps. What it gets
wrong by that are the positions of tokens within gaps, and with them the tokens themselves and where their KV goes; and
that attention takes the queries of a request for its last ones. The first is set right in the indices that all three
come from. For the second the request becomes several rows, each with its range of queries, the length of the sequence
up to that range's end, and the same blocks: to the kernels a row is all that there is to a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from vllm_ext.kv.partial_prefix.layout import GapLayout

Rows = dict[int, list[tuple[int, int]]]
"""By row of a batch: the pieces of its request, each as (number of queries, length of the sequence at its end)."""


def place_queries(
    layouts: Mapping[str, GapLayout],
    req_ids: Sequence[str],
    num_computed: npt.NDArray[np.integer[Any]],
    num_tokens: npt.NDArray[np.integer[Any]],
    ends: npt.NDArray[np.integer[Any]],
    query_pos: npt.NDArray[np.integer[Any]],
) -> Rows:
    """Set the positions of queries within gaps right.

    Args:
        layouts: Of the requests with gaps.
        req_ids: The batch, shape [requests].
        num_computed: Virtual numbers of computed tokens, shape [requests].
        num_tokens: Queries of each request, shape [requests].
        ends: Their cumulative sum, shape [requests].
        query_pos: Position of each query relative to its request's number of computed tokens, shape [queries];
            changed in place, to negative ones within gaps.

    Returns:
        The rows that must be split, or end elsewhere than the runner takes it.
    """
    rows: Rows = {}
    for row, req_id in enumerate(req_ids):
        layout = layouts.get(req_id)
        if layout is None:
            continue
        first, count = int(num_computed[row]), int(num_tokens[row])
        at = int(ends[row]) - count
        pieces = []
        for start, end in layout.spans(first, count):
            query_pos[at : at + end - start] = np.arange(start - first, end - first)
            at += end - start
            pieces.append((end - start, end))
        rows[row] = pieces
    return rows


def place_on_device(layouts: Mapping[str, GapLayout], batch: Any, all_token_ids: torch.Tensor) -> Rows:
    """Set tokens and positions within gaps right, in a batch of vLLM's V2 runner; nothing waits for the device.

    Args:
        layouts: Of the requests with gaps.
        batch: vLLM's ``InputBatch``; its tensors are changed in place.
        all_token_ids: Of all requests, shape [places of requests, longest sequence].

    Returns:
        As `place_queries`.
    """
    rows: Rows = {}
    for row, req_id in enumerate(batch.req_ids):
        layout = layouts.get(req_id)
        if layout is None:
            continue
        index, at = int(batch.num_computed_tokens_np[row]), int(batch.query_start_loc_np[row])
        place = int(batch.idx_mapping_np[row])
        pieces = []
        for start, end in layout.spans(index, int(batch.num_scheduled_tokens[row])):
            behind = at + end - start
            if start != index:
                batch.positions[at:behind] -= index - start
                batch.input_ids[at:behind] = all_token_ids[place, start:end]
            pieces.append((end - start, end))
            index, at = index + end - start, behind
        rows[row] = pieces
    return rows


def split_rows(metadata: CommonAttentionMetadata, rows: Rows) -> CommonAttentionMetadata:
    """Return what the attention kernels are told, with some rows in pieces."""
    if metadata.seq_lens_cpu_upper_bound is None:
        raise RuntimeError("gaps in kept KV: this runner does not tell the lengths of sequences on the host")
    starts = metadata.query_start_loc_cpu.tolist()
    lengths = metadata.seq_lens_cpu_upper_bound.tolist()
    parts: list[tuple[int, int, int]] = []
    for row in range(metadata.num_reqs):
        whole = [(starts[row + 1] - starts[row], lengths[row])]
        parts += [(row, queries, length) for queries, length in rows.get(row, whole)]
    index = torch.tensor([row for row, _, _ in parts])
    queries = [count for _, count, _ in parts]
    query_start_loc = torch.tensor([0, *itertools.accumulate(queries)], dtype=metadata.query_start_loc_cpu.dtype)
    seq_lens = torch.tensor([length for _, _, length in parts], dtype=metadata.seq_lens.dtype)
    device = metadata.seq_lens.device
    pinned = device.type == "cuda"
    if pinned:
        query_start_loc, seq_lens, index = query_start_loc.pin_memory(), seq_lens.pin_memory(), index.pin_memory()
    on_device = index.to(device, non_blocking=pinned)
    return replace(
        metadata,
        query_start_loc=query_start_loc.to(device, non_blocking=pinned),
        query_start_loc_cpu=query_start_loc,
        seq_lens=seq_lens.to(device, non_blocking=pinned),
        seq_lens_cpu_upper_bound=seq_lens,
        num_reqs=len(parts),
        max_query_len=max(queries),
        max_seq_len=max(length for _, _, length in parts),
        block_table_tensor=metadata.block_table_tensor.index_select(0, on_device),
        is_prefilling=None if metadata.is_prefilling is None else metadata.is_prefilling[index],
        req_idx=None if metadata.req_idx is None else metadata.req_idx[index.numpy()],
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
