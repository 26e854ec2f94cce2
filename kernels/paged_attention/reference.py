"""The definition of paged attention, in plain torch and fp64; slow, and right."""

from __future__ import annotations

import math

import torch

from vllm_ext.kernels.kv_quant import reference as kv_quant
from vllm_ext.kernels.kv_quant.format import RecordFormat
from vllm_ext.kernels.paged_attention.format import PagedKV, Ranges, blocks_of


def paged_attention(
    query: torch.Tensor, kv: PagedKV, ranges: Ranges, *, scale: float, window: int = 0, softcap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as `vllm_ext.kernels.paged_attention.paged_attention` does.

    Returns:
        Output in fp64, of the shape of the query, and log-sum-exp [tokens, heads]; 0 and -inf of what sees nothing, and
        of tokens in no range.
    """
    output = torch.zeros(query.shape, dtype=torch.float64)
    lse = torch.full(query.shape[:2], -math.inf, dtype=torch.float64)
    for r in range(ranges.num_ranges):
        start, length = int(ranges.q_start[r]), int(ranges.q_len[r])
        first, kv_len = int(ranges.q_position[r]), int(ranges.kv_len[r])
        if not length or not kv_len:
            continue
        keys, values = load(kv, blocks_of(ranges, r, kv.layout.block_size), kv_len)
        group = query.shape[1] // keys.shape[1]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        tokens = slice(start, start + length)
        scores = torch.einsum("qhd,khd->hqk", query[tokens].double(), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        position = first + torch.arange(length)[:, None]
        key = torch.arange(kv_len)
        seen = (key <= position) & ((key > position - window) if window else torch.ones(1, dtype=torch.bool))
        scores = scores.masked_fill(~seen, -math.inf)
        found = torch.logsumexp(scores, -1)  # [heads, tokens]
        weights = torch.exp(scores - found[..., None]).nan_to_num(0.0)
        output[tokens] = torch.einsum("hqk,khd->qhd", weights, values)
        lse[tokens] = found.T
    return output, lse


def load(kv: PagedKV, block_ids: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of the first tokens of these blocks in fp64, [tokens, KV heads, D] each."""
    blocks = [_page(kv, int(block_id)) for block_id in block_ids]
    index = torch.from_numpy(kv.layout.index.copy())  # [H, 2, N, D]
    found = torch.stack([block[index] for block in blocks]).double()  # [B, H, 2, N, D]
    both = found.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, :num_tokens]
    return both[0], both[1]


def _page(kv: PagedKV, block_id: int) -> torch.Tensor:
    """Return the values of a block in the order of the page, dequantised if it is a record."""
    if not 0 <= block_id < kv.num_blocks + kv.num_records:
        raise IndexError(f"block_id={block_id}: must be less than {kv.num_blocks + kv.num_records}")
    if block_id < kv.num_blocks or kv.records is None:
        return kv.pages[block_id]
    page = torch.empty(1, kv.layout.page_elements, dtype=kv.layout.dtype)
    record = kv.records[block_id - kv.num_blocks :][:1]
    kv_quant.dequantise(record, page, torch.zeros(1, dtype=torch.int64), RecordFormat(kv.layout))
    return page[0]
