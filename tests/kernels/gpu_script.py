"""Compares the Triton kernels with the definition; prints what differed as JSON. Argument: the device.

Its own process, because Triton decides at import whether it interprets kernels (TRITON_INTERPRET=1, on the CPU).
"""

from __future__ import annotations

import json
import sys

import torch

from vllm_ext.kernels.kv_quant import gpu, reference
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat


def compare(layout: PageLayout, device: str, seed: int) -> dict[str, float]:
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

    back = torch.full_like(pages, 7.0)
    same = back.to(device)
    wanted = torch.tensor([1, 8])
    reference.dequantise(expected[good], back, wanted, fmt)
    gpu.dequantise(records, slots[good.to(device)], same, wanted.to(device), fmt)
    error = (same.cpu().double() - back.double()).abs() / back.double().abs().clamp(min=1e-30)
    return {
        "holds": float(found.tolist() == holds.tolist() == [True, False, True, False]),
        "records_that_differ": float((records.cpu()[slots.cpu()[good]] != expected[good]).any(-1).sum()),
        "places_written_besides": float(records[[1, 3]].any()),
        "largest_relative_difference": float(error.max()),
    }


def main(device: str) -> None:
    """Compare all types and layouts."""
    found = {
        f"{dtype} {make.__name__} {size}": compare(make(dtype, 2, dim, size), device, seed)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for make in (PageLayout.rows, PageLayout.transposed_keys)
        for seed, (dim, size) in enumerate(((24, 6), (16, 16)))
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
