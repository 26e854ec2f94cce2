"""Quantises blocks into records, and back, in the memory of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch

from vllm_ext.kernels.kv_quant import cpu
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.int8.memory import LayerMemory

if TYPE_CHECKING:
    from collections.abc import Sequence

Ids = npt.NDArray[np.int64]


class RecordCodec(Protocol):
    """Moves KV of one layer."""

    def to_records(self, layer: LayerMemory, pages: Sequence[int], records: Sequence[int]) -> None:
        """Write records, of which none is written twice.

        A page that has no record, since a value is not finite or a channel reaches beyond its type, comes back without
        any value that is finite: whatever attends to it sees as much, and nothing that was there before.

        Args:
            layer: The memory.
            pages: Pages to read.
            records: Places of the records, from 0 on.
        """
        ...

    def to_pages(self, layer: LayerMemory, records: Sequence[int], pages: Sequence[int]) -> None:
        """Write pages, of which none is written twice; arguments as for `to_records`."""
        ...


class CpuRecordCodec:
    """Of a CPU's memory.

    Args:
        layout: Where values are in a page, the same for all layers.

    Raises:
        CompilerMissing: there is no g++, which compiles the codec.
    """

    def __init__(self, layout: PageLayout) -> None:
        self._format = RecordFormat(layout)
        cpu.load()  # compiled at start, and not in the first step that evicts a block

    def to_records(self, layer: LayerMemory, pages: Sequence[int], records: Sequence[int]) -> None:
        """Write records."""
        slots = _ids(records)
        holds = cpu.quantise(layer.pages, _ids(pages), layer.records, slots, self._format)
        if not holds.all():
            spoil_where(layer.records, torch.from_numpy(slots), torch.from_numpy(~holds), self._format)

    def to_pages(self, layer: LayerMemory, records: Sequence[int], pages: Sequence[int]) -> None:
        """Write pages."""
        cpu.dequantise(layer.records, _ids(records), layer.pages, _ids(pages), self._format)


def spoil_where(records: torch.Tensor, slots: torch.Tensor, spoilt: torch.Tensor, fmt: RecordFormat) -> None:
    """Let records hold nothing that is finite, whatever they held before.

    Args:
        records: [num_records, record_bytes], uint8.
        slots: Some of them, int64.
        spoilt: Which of these, bool; nothing waits until that is known.
        fmt: What a record looks like.
    """
    minima = records[:, fmt.minima_offset : fmt.scales_offset].view(fmt.layout.dtype)
    minima[slots] = minima[slots].masked_fill(spoilt[:, None], float("nan"))


def pad(pages: torch.Tensor, page: int, num_tokens: int, layout: PageLayout) -> None:
    """Repeat the last token of a page up to its end: what lay there, of whoever, must not widen its ranges.

    Args:
        pages: [pages, page_elements]; changed.
        page: Which.
        num_tokens: Tokens that it holds, at least 1.
        layout: Where values are in a page.
    """
    index = torch.from_numpy(layout.index).to(pages.device)  # [H, 2, N, D]
    values = pages[page]
    last = values[index[:, :, num_tokens - 1 : num_tokens]]
    values[index[:, :, num_tokens:]] = last.expand_as(index[:, :, num_tokens:])


def _ids(numbers: Sequence[int]) -> Ids:
    return np.asarray(numbers, np.int64)
