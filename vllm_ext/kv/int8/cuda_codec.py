"""Quantises blocks into records, and back, in a CUDA device's memory, on the stream on which the model computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.int8.codec import spoil_where
from vllm_ext.kv.int8.memory import LayerMemory

if TYPE_CHECKING:
    from collections.abc import Sequence


class CudaRecordCodec:
    """Of a CUDA device's memory; nothing here waits for the device.

    Args:
        layout: Where values are in a page, the same for all layers.
    """

    def __init__(self, layout: PageLayout) -> None:
        self._format = RecordFormat(layout)

    def to_records(self, layer: LayerMemory, pages: Sequence[int], records: Sequence[int]) -> None:
        """Write records."""
        from vllm_ext.kernels.kv_quant import gpu

        device = layer.records.device
        slots = _ids(records, device)
        holds = gpu.quantise(layer.pages, _ids(pages, device), layer.records, slots, self._format)
        spoil_where(layer.records, slots, ~holds, self._format)

    def to_pages(self, layer: LayerMemory, records: Sequence[int], pages: Sequence[int]) -> None:
        """Write pages."""
        from vllm_ext.kernels.kv_quant import gpu

        device = layer.records.device
        gpu.dequantise(layer.records, _ids(records, device), layer.pages, _ids(pages, device), self._format)


def _ids(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64).pin_memory().to(device, non_blocking=True)
