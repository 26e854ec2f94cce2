"""The definition of the format, in torch: slow and plain."""

from __future__ import annotations

import torch

from vllm_ext.kernels.kv_quant.format import LEAST_SCALE, LEVELS, RecordFormat


def quantise(pages: torch.Tensor, block_ids: torch.Tensor, fmt: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the records of blocks.

    Args:
        pages: One layer's cache, shape [num_blocks, page_elements], in the layout's type.
        block_ids: Blocks to quantise, shape [n], int64.
        fmt: What a record looks like.

    Returns:
        Records, shape [n, record_bytes], uint8; and which of them hold, shape [n], bool. A block with a value that is
        not finite, or a channel that reaches beyond its type (see `scales`), has no record: it must be kept as it is,
        or dropped.
    """
    layout = fmt.layout
    records = torch.zeros(len(block_ids), fmt.record_bytes, dtype=torch.uint8)
    index = torch.from_numpy(layout.index)
    values = pages[block_ids][:, index].float()  # [n, H, 2, N, D]
    low, high = values.amin(-2) + 0.0, values.amax(-2) + 0.0  # never -0.0: which zero is least nobody says
    scale, holds = scales(low, high, layout.dtype)
    holds &= values.isfinite().all(-2)
    step = scale.float()
    inverse = torch.where(step > 0, 1 / step, 0.0)
    codes = torch.round((values - low[..., None, :]) * inverse[..., None, :])
    minima, ends = records[:, fmt.minima_offset : fmt.scales_offset], records[:, fmt.scales_offset :]
    records[:, : fmt.codes_bytes][:, index] = codes.nan_to_num().clamp(0, LEVELS).to(torch.uint8)
    minima[:] = low.to(layout.dtype).flatten(1).view(torch.uint8)
    ends[:, : minima.shape[1]] = scale.flatten(1).view(torch.uint8)
    return records, holds.flatten(1).all(1)


def dequantise(records: torch.Tensor, pages: torch.Tensor, block_ids: torch.Tensor, fmt: RecordFormat) -> None:
    """Write records back into blocks.

    Args:
        records: Shape [n, record_bytes], uint8.
        pages: One layer's cache, shape [num_blocks, page_elements], in the layout's type; written.
        block_ids: Where each record goes, shape [n], int64.
        fmt: What a record looks like.
    """
    layout = fmt.layout
    shape = (-1, layout.num_heads, 2, 1, layout.head_dim)
    size = fmt.scales_offset - fmt.minima_offset
    low, scale = (
        records[:, start : start + size].contiguous().view(layout.dtype).float().view(shape)
        for start in (fmt.minima_offset, fmt.scales_offset)
    )
    index = torch.from_numpy(layout.index)
    values = low + records[:, : fmt.codes_bytes][:, index].float() * scale  # [n, H, 2, N, D]
    written = torch.empty(len(records), layout.page_elements, dtype=layout.dtype)
    written[:, index] = values.to(layout.dtype)
    pages[block_ids] = written


def scales(low: torch.Tensor, high: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales for values from ``low`` to ``high`` (fp32), in ``dtype``, and where a record can say them.

    It can where the highest value that a code may stand for, ``low + 255 * scale``, is finite in ``dtype``.
    """
    step = ((high - low) / LEVELS).clamp(min=LEAST_SCALE)
    scale = step.to(dtype)
    bits = torch.int16 if dtype.itemsize == 2 else torch.int32
    scale = (scale.view(bits) + (scale.float() < step).to(bits)).view(dtype)  # the next one up
    scale = torch.where(high == low, torch.zeros_like(scale), scale)
    return scale, low + LEVELS * scale.float() <= torch.finfo(dtype).max
