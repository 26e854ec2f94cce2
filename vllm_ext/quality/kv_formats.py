"""Formats that KV is kept in, each as what comes back of it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllm_ext.kernels.kv_quant import reference
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat

KvFormat = Callable[[torch.Tensor], torch.Tensor]
"""Takes keys and values of a layer side by side, [sequences, heads, tokens, K and V], and returns what was kept of
them, in the same shape and type."""
_FP8_MAX = 448.0


class NoRecord(RuntimeError):
    """A block can't be kept in 8 bits: a value is not finite, or a range too wide for the type of the KV."""


def exact(values: torch.Tensor) -> torch.Tensor:
    """Keep KV as it is."""
    return values


def bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Keep KV in bfloat16."""
    return values.bfloat16().to(values.dtype)


def fp8_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Keep KV as a server with ``--kv-cache-dtype fp8`` and no scales of its own does."""
    return values.float().clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).to(values.dtype)


def int8(block: int, dtype: torch.dtype, every: int = 1) -> KvFormat:
    """Return what keeps KV in `dtype` and then in 8 bits, by the definition of our format.

    The format raises `NoRecord` for KV that it can't hold.

    Args:
        block: Tokens of a block, of which the tokens must be a multiple.
        dtype: Type of the KV cache: of minima, scales and of what comes back.
        every: Of so many blocks one is kept in 8 bits, the first of them.
    """

    def kept(values: torch.Tensor) -> torch.Tensor:
        sequences, heads, tokens, width = values.shape
        back = pages_of(values, block).to(dtype).cpu()
        layout = PageLayout.rows(dtype, heads, width // 2, block)
        chosen = torch.arange(len(back)) % (tokens // block) % every == 0
        back[chosen] = there_and_back(back[chosen], RecordFormat(layout))[1]
        shaped = back.to(values).view(sequences, tokens // block, heads, block, width)
        return shaped.transpose(1, 2).reshape(values.shape)

    return kept


def there_and_back(pages: torch.Tensor, fmt: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the records of pages, and the pages made of them, by the definition.

    Raises:
        NoRecord: see there.
    """
    ids = torch.arange(len(pages))
    records, holds = reference.quantise(pages, ids, fmt)
    if not holds.all():
        raise NoRecord("a block of KV can't be kept in 8 bits: a value is not finite, or a range too wide for its type")
    back = torch.empty_like(pages)
    reference.dequantise(records, back, ids, fmt)
    return records, back


def pages_of(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return KV as pages of whole blocks, of layout `PageLayout.rows`, shape [sequences * tokens / block, elements]."""
    sequences, heads, tokens, width = values.shape
    blocks = values.reshape(sequences, heads, tokens // block, block, width)
    return blocks.transpose(1, 2).reshape(-1, heads * block * width)
