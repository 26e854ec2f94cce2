"""Compares the Triton kernels of 8-bit KV with the definition, case by case (`comparison`). Argument: the device.

Its own process, because Triton decides at import whether it interprets kernels (TRITON_INTERPRET=1, on the CPU).
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[2]))

from tests.support.comparison import Facts, compare
from vllm_ext.kernels.kv_quant import gpu, reference
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat

SIZES = ((24, 6), (16, 16))
"""Channels, and tokens of a block."""


def errors(layout: PageLayout, device: str, seed: int) -> Facts:
    """Quantise blocks of which one holds a NaN and one an infinity, and bring some back."""
    fmt = RecordFormat(layout)
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randn(12, layout.page_elements, generator=generator) * 10 ** torch.randint(-6, 4, (12, 1)).float()
    pages[:, torch.from_numpy(layout.index[0, 0, :, 0])] = 2.5  # a constant channel
    pages[9, 3] = float("nan")
    pages[10, 5] = float("-inf")
    pages = pages.to(layout.dtype)
    ids = torch.tensor([7, 9, 11, 10])
    expected, holds = reference.quantise(pages, ids, fmt)
    slots = torch.tensor([4, 0, 2, 5], device=device)
    records = torch.zeros(6, fmt.record_bytes, dtype=torch.uint8, device=device)
    found = gpu.quantise(pages.to(device), ids.to(device), records, slots, fmt)
    good = holds.nonzero().flatten()

    back, same = torch.full_like(pages, 7.0), torch.full_like(pages, 7.0, device=device)
    wanted = torch.tensor([1, 8])
    reference.dequantise(expected[good], back, wanted, fmt)
    gpu.dequantise(records, slots[good.to(device)], same, wanted.to(device), fmt)
    error = (same.cpu().double() - back.double()).abs() / back.double().abs().clamp(min=1e-30)
    return {
        "holds_differ": float(not found.tolist() == holds.tolist() == [True, False, True, False]),
        "records_that_differ": float((records.cpu()[slots.cpu()[good]] != expected[good]).any(-1).sum()),
        "places_written_besides": float(records[[1, 3]].any()),
        "largest_relative_difference": float(error.max()),
    }


def over(name: str, facts: Facts, *, device: str) -> list[str]:
    """Return what differs from the definition, but for the last bit of bfloat16 where Triton interprets.

    Where a GPU rounds to the nearest, its interpreter cuts.
    """
    rounds = device == "cuda" or "bfloat16" not in name
    allowed = {"largest_relative_difference": 0.0 if rounds else torch.finfo(torch.bfloat16).eps}
    return [fact for fact, value in facts.items() if not value <= allowed.get(fact, 0.0)]


def main(device: str) -> int:
    """Compare all types and layouts; on a GPU bfloat16, which servers have, comes first. Return the exit status."""
    cases = (
        (f"{dtype} {make.__name__} {size}", functools.partial(errors, make(dtype, 2, *size), device, seed))
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for make in (PageLayout.rows, PageLayout.transposed_keys)
        for seed, size in enumerate(SIZES)
    )
    return compare(cases, functools.partial(over, device=device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
