"""The same on a GPU: quantise and gather, scatter and dequantise, against copies and the bus. See `kv_quant.py`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from vllm_ext.kernels.kv_quant import reference
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.report import timing

HEADS, HEAD_DIM, BLOCK = 8, 128, 64
_SAMPLE = 4
"""Blocks whose records are compared with the definition."""


def measure(mib: int, repeats: int, seed: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return GB/s of bfloat16 KV, and ratios, on the current CUDA device; baselines beside them.

    Args:
        mib: KV that is moved by a pass, far more than the device's caches hold.
        repeats: Passes; medians are reported.
        seed: Of values and of the order of blocks.

    Raises:
        RuntimeError: a record is not that of the definition.
    """
    from vllm_ext.kernels.kv_quant import gpu  # needs a working Triton

    device = torch.device("cuda")
    layout = PageLayout.rows(torch.bfloat16, HEADS, HEAD_DIM, BLOCK)
    fmt = RecordFormat(layout)
    num_blocks = mib * 2**20 // layout.page_bytes
    generator = torch.Generator(device).manual_seed(seed)
    pages = torch.randn(num_blocks, layout.page_elements, device=device, generator=generator).bfloat16()
    blocks = torch.randperm(num_blocks, device=device, generator=generator)
    slots = torch.randperm(num_blocks, device=device, generator=generator)
    records = torch.zeros(num_blocks, fmt.record_bytes, dtype=torch.uint8, device=device)
    gathered, host = torch.empty_like(pages), torch.empty(pages.shape, dtype=pages.dtype, pin_memory=True)
    host_records = torch.empty(records.shape, dtype=records.dtype, pin_memory=True)

    def through_records() -> None:
        gpu.quantise(pages, blocks, records, slots, fmt)
        host_records.copy_(records, non_blocking=True)

    def gather_and_copy() -> None:
        torch.index_select(pages, 0, blocks, out=gathered)
        host.copy_(gathered, non_blocking=True)

    subjects: dict[str, Callable[[], object]] = {
        "quantise": lambda: gpu.quantise(pages, blocks, records, slots, fmt),
        "dequantise": lambda: gpu.dequantise(records, slots, pages, blocks, fmt),
        "to_host_in_8_bits": through_records,
        "gather_bf16": lambda: torch.index_select(pages, 0, blocks, out=gathered),
        "copy_bf16_on_device": lambda: gathered.copy_(pages),
        "gather_and_copy_bf16_to_host": gather_and_copy,
        "copy_bf16_to_host": lambda: host.copy_(pages, non_blocking=True),
    }
    _check(pages, blocks, slots, records, fmt, subjects["quantise"])
    num_bytes = pages.numel() * pages.element_size()
    times = timing.measure(subjects, repeats, device="cuda", skipped=1)
    speed = {name: num_bytes / 1e9 / float(np.median(found)) for name, found in times.items()}
    ours, theirs = list(speed)[:3], list(speed)[3:]
    metrics = {f"gpu_{name}_gb_per_s": round(speed[name], 2) for name in ours}
    metrics |= {
        "gpu_quantise_time_over_device_copy": round(speed["copy_bf16_on_device"] / speed["quantise"], 3),
        "gpu_dequantise_time_over_device_copy": round(speed["copy_bf16_on_device"] / speed["dequantise"], 3),
        "gpu_to_host_time_over_copy": round(speed["gather_and_copy_bf16_to_host"] / speed["to_host_in_8_bits"], 3),
    }
    return metrics, {"gpu": {f"gpu_{name}_gb_per_s": round(speed[name], 2) for name in theirs}}


def _check(
    pages: torch.Tensor, blocks: torch.Tensor, slots: torch.Tensor, records: torch.Tensor, fmt: RecordFormat,
    quantise: Callable[[], object],
) -> None:  # fmt: skip
    quantise()
    expected, _ = reference.quantise(pages[blocks[:_SAMPLE]].cpu(), torch.arange(_SAMPLE), fmt)
    if not torch.equal(records[slots[:_SAMPLE]].cpu(), expected):
        raise RuntimeError("a record that the GPU wrote is not that of the definition")
