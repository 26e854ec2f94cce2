"""How far values are from what they were, against fp64 and against what the format allows. See `kv_quant.py`.

Allowed is half a scale, and half a unit in the last place of the result, which is rounded to the type of the KV; beside
that fp32 arithmetic gets a few units in its own last place. The ideal beside it is a quantiser in fp64 whose scale is
the range / 255, with nothing rounded but the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.quality.kv_formats import there_and_back

_ARITHMETIC = 4 * torch.finfo(torch.float32).eps
HEADS, HEAD_DIM, TOKENS = 2, 64, 64


def made_up(blocks: int, seed: int) -> dict[str, torch.Tensor]:
    """Return pages of bfloat16 that are hard to quantise, or easy to get wrong, each of `layout`.

    Args:
        blocks: Blocks of each kind.
        seed: Of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (blocks, HEADS, TOKENS, 2 * HEAD_DIM)
    normal = torch.randn(shape, generator=generator)
    channel = torch.arange(2 * HEAD_DIM)
    outlying = torch.where(torch.rand(shape, generator=generator) < 1 / TOKENS, 50.0, 1.0)
    exponents = torch.randint(-30, 12, (blocks, HEADS, 1, 2 * HEAD_DIM), generator=generator).float()
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "normal": lambda: normal,
        "outlier_channels": lambda: normal * torch.where(channel % 32 == 5, 100.0, 1.0),
        "outlier_tokens": lambda: normal * outlying,
        "far_from_zero": lambda: 10 + normal,
        "constant": lambda: normal[:, :, :1].expand(shape),
        "two_neighbours": lambda: 1 + (normal > 0) * 2.0**-7,
        "tiny_ranges": lambda: normal * 1e-8,
        "very_unequal_channels": lambda: normal * torch.exp2(exponents),
    }
    return {name: make().bfloat16().reshape(blocks, -1) for name, make in kinds.items()}


def layout() -> PageLayout:
    """Return the layout of the pages of `made_up`."""
    return PageLayout.rows(torch.bfloat16, HEADS, HEAD_DIM, TOKENS)


def measure(pages: torch.Tensor, layout_of_pages: PageLayout) -> dict[str, float]:
    """Return errors of pages; raises as `there_and_back`."""
    fmt = RecordFormat(layout_of_pages)
    records, back = there_and_back(pages, fmt)
    index = torch.from_numpy(layout_of_pages.index)
    was, now = (part[:, index].double() for part in (pages, back))  # [blocks, H, 2, tokens, D]
    end = 2 * fmt.scales_offset - fmt.minima_offset
    scales = records[:, fmt.scales_offset : end].contiguous().view(layout_of_pages.dtype)
    scale = scales.double().view(len(pages), layout_of_pages.num_heads, 2, 1, -1)
    error = (now - was).abs()
    allowed = scale / 2 * (1 + _ARITHMETIC) + _half_ulp(now, layout_of_pages.dtype) + _ARITHMETIC * was.abs()
    allowed = torch.where(scale == 0, 0.0, allowed)
    ideal = _ideal_error(was)
    spread = was.std(-2, keepdim=True).square().mean().sqrt()
    worst = torch.where(allowed > 0, error / allowed, (error > 0).double()).max()
    found = {
        "max_error_over_allowed": float(worst),
        "max_abs_error": float(error.max()),
        "rms_error": _rms(error),
        "constant_channels_share": float((scale == 0).double().mean()),
    }
    if spread > 0:
        found["rms_error_over_spread_within_channels"] = _rms(error) / float(spread)
    if _rms(ideal) > 0:
        found["rms_error_over_ideal_rms_error"] = _rms(error) / _rms(ideal)
    return found


def of_model(layers: Sequence[torch.Tensor], layout_of_pages: PageLayout) -> dict[str, float]:
    """Return the same of the KV of a model, all layers together."""
    return measure(torch.cat(list(layers)), layout_of_pages)


def _half_ulp(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance to the next number of a type: of the binade of each value, or of the denormal numbers."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.abs().clamp(min=info.tiny)).exponent
    return torch.ldexp(torch.full_like(values, info.eps / 2), exponent - 1)


def _ideal_error(was: torch.Tensor) -> torch.Tensor:
    low, high = was.amin(-2, keepdim=True), was.amax(-2, keepdim=True)
    scale = torch.where(high > low, (high - low) / 255, 1.0)
    return (low + torch.round((was - low) / scale) * scale - was).abs()


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
