"""The definition of the format, in torch: slow and plain."""

from __future__ import annotations

import torch

from vllm_ext.kernels.kv_quant.format import (
    FIRST_CODE,
    INVERSE_LEVELS,
    INVERSES,
    SCALES,
    STEPS_PER_OCTAVE,
    THRESHOLDS,
    RecordFormat,
)


def quantise(pages: torch.Tensor, block_ids: torch.Tensor, fmt: RecordFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the records of groups of blocks.

    Args:
        pages: One layer's cache, shape [num_blocks, page_elements], in the layout's type.
        block_ids: Blocks of each group, shape [groups, fmt.blocks], int64; -1 where a group lacks one.
        fmt: What a record looks like.

    Returns:
        Records, shape [groups, record_bytes], uint8; and which of them hold: shape [groups], bool. A group with a value
        that is not finite, or a range above what a scale can say, has no record: it must be kept as it is, or dropped.
    """
    layout = fmt.layout
    records = torch.zeros(len(block_ids), fmt.record_bytes, dtype=torch.uint8)
    holds = torch.ones(len(block_ids), dtype=torch.bool)
    for group, ids in enumerate(block_ids):
        held = pages[ids[ids >= 0]]
        values = _channels(held, fmt).float()  # [H, 2, D, tokens]
        low, high = values.amin(-1) + 0.0, values.amax(-1) + 0.0  # never -0.0: which zero is least nobody says
        codes, fits = scale_codes(low, high)
        if not (fits.all() and torch.isfinite(values).all()):
            holds[group] = False
            continue
        inverse = torch.from_numpy(INVERSES)[codes.long()]
        quantised = torch.round((values - low[..., None]) * inverse[..., None]).clamp(0, 255).to(torch.uint8)
        record = records[group]
        record[: fmt.codes_bytes].view(fmt.blocks, -1)[ids >= 0] = _pages(quantised, len(held), fmt)
        record[fmt.minima_at : fmt.scales_at] = low.to(layout.dtype).flatten().view(torch.uint8)
        record[fmt.scales_at : fmt.scales_at + layout.num_channels] = codes.flatten()
    return records, holds


def dequantise(records: torch.Tensor, block_ids: torch.Tensor, pages: torch.Tensor, fmt: RecordFormat) -> None:
    """Write groups back into blocks.

    Args:
        records: Shape [groups, record_bytes], uint8.
        block_ids: Where each group's blocks go, shape [groups, fmt.blocks], int64; -1: that block is not wanted.
        pages: One layer's cache, shape [num_blocks, page_elements], in the layout's type; written.
        fmt: What a record looks like.
    """
    layout = fmt.layout
    shape = (layout.num_heads, 2, layout.head_dim)
    for record, ids in zip(records, block_ids, strict=True):
        low = record[fmt.minima_at : fmt.scales_at].view(layout.dtype).float().view(shape)
        scale = torch.from_numpy(SCALES)[record[fmt.scales_at :][: layout.num_channels].long()].view(shape)
        codes = _channels(record[: fmt.codes_bytes].view(fmt.blocks, -1), fmt)
        values = (low[..., None] + codes.float() * scale[..., None]).to(layout.dtype)
        wanted = ids >= 0
        pages[ids[wanted]] = _pages(values, fmt.blocks, fmt)[wanted]


def scale_codes(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of the scales for values from ``low`` to ``high`` (fp32), and where there is one.

    The step above range / 255 is found from that number's bits: exponent, and how many steps of its octave it exceeds.
    """
    bits = ((high - low) * torch.tensor(INVERSE_LEVELS, dtype=torch.float32)).view(torch.int32)
    steps = ((bits & 0x7FFFFF)[..., None] > torch.from_numpy(THRESHOLDS)).sum(-1)
    code = STEPS_PER_OCTAVE * (bits >> 23) + steps + FIRST_CODE
    code = torch.where(high == low, 0, code.clamp(min=1))
    return code.clamp(max=255).to(torch.uint8), code <= 255


def _channels(pages: torch.Tensor, fmt: RecordFormat) -> torch.Tensor:
    """Blocks [n, page_elements] as channels [H, 2, D, n * N]."""
    layout = fmt.layout
    found = pages[:, torch.from_numpy(layout.index)]  # [n, H, 2, N, D]
    return found.permute(1, 2, 4, 0, 3).flatten(-2)


def _pages(channels: torch.Tensor, blocks: int, fmt: RecordFormat) -> torch.Tensor:
    """The inverse of `_channels`."""
    layout = fmt.layout
    values = channels.unflatten(-1, (blocks, layout.block_size)).permute(3, 0, 1, 4, 2)
    pages = torch.empty(blocks, layout.page_elements, dtype=channels.dtype)
    pages[:, torch.from_numpy(layout.index).flatten()] = values.reshape(blocks, -1)
    return pages
