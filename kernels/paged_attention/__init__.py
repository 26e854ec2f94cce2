"""Paged attention: queries of any length over ranges of blocks, each block in the type of the KV or in INT8.

`format` says what is read, `reference` is the definition; `cpu` and `gpu` compute the same. Prefill, decode,
speculation and gaps are the same call with other ranges.

Source: Pensieve, section 4.4 (multi-token attention over disjoint ranges); ALISE, section 4.1 (KV in INT8).
"""

from __future__ import annotations

import torch

from vllm_ext.kernels.paged_attention.format import PagedKV, Ranges

__all__ = ["PagedKV", "Ranges", "paged_attention"]


def paged_attention(
    query: torch.Tensor,
    kv: PagedKV,
    ranges: Ranges,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally to paged KV, with the kernel of the query's device.

    Args:
        query: [tokens, heads, D], in the type of the KV; tokens may lie apart.
        kv: Pages, and records in INT8, which are dequantised in registers: x' = minimum + code * scale.
        ranges: Which tokens attend to which blocks.
        scale: Of the scores.
        window: Most recent tokens that a query sees, itself among them; 0: all.
        softcap: Scores are kept within it by ``softcap * tanh(score / softcap)``; 0: they are not.
        out: Gets the output; by default a new tensor, with zeros for tokens in no range.
        lse: [tokens, heads], fp32: gets the log-sum-exp of the scores, for merging.

    Returns:
        ``out``.

    Raises:
        ValueError: a size, type or layout that the kernel has no code for.
        IndexError: a range reads a block that does not exist (checked on the CPU only).
    """
    out = torch.zeros_like(query) if out is None else out
    if query.device.type == "cpu":
        from vllm_ext.kernels.paged_attention.cpu import CpuAttention

        CpuAttention(kv, query.shape[1], scale=scale, window=window, softcap=softcap)(query, ranges, out, lse)
    else:
        from vllm_ext.kernels.paged_attention import gpu

        longest = int(ranges.q_len.max()) if ranges.num_ranges else 0
        sizes = {"num_tokens": ranges.num_tokens, "max_query_len": longest}
        step = gpu.divide(ranges, kv.layout, num_heads=query.shape[1], **sizes)
        gpu.attend(query, kv, step, out, lse, scale=scale, window=window, softcap=softcap)
    return out
