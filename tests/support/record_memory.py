"""Views of one allocation, and the records in it."""

from __future__ import annotations

import torch

from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kv.int8.codec import CpuRecordCodec
from vllm_ext.kv.int8.geometry import ArenaGeometry
from vllm_ext.kv.int8.memory import LayerMemory, layer_memory
from vllm_ext.kv.int8.worker import DeviceRecords

HEADS, TOKENS, DIM, LAYERS, BLOCKS, ARENA = 2, 32, 32, 3, 5, 4
LAYOUT = PageLayout.transposed_keys(torch.bfloat16, HEADS, DIM, TOKENS)
FORMAT = RecordFormat(LAYOUT)
GEOMETRY = ArenaGeometry(
    num_blocks=BLOCKS, arena_pages=ARENA, scratch_pages=7, num_layers=LAYERS, page_bytes=LAYOUT.page_bytes,
    record_bytes=FORMAT.record_bytes,
)  # fmt: skip


def allocated() -> tuple[torch.Tensor, list[LayerMemory]]:
    """Memory in which every byte is part of no number, and its layers; the blocks hold random values."""
    memory = torch.full((GEOMETRY.total_bytes,), 0xFF, dtype=torch.uint8)
    values, page = memory.view(torch.bfloat16), LAYOUT.page_elements
    shape, strides = (BLOCKS, HEADS, TOKENS, 2 * DIM), (page, TOKENS * 2 * DIM, 2 * DIM, 1)
    generator, layers = torch.Generator().manual_seed(0), []
    for layer in range(LAYERS):
        cache = torch.as_strided(values, shape, strides, layer * GEOMETRY.stride_pages * page)
        cache.copy_(torch.randn(shape, generator=generator))
        layers.append(layer_memory(cache, GEOMETRY))
    return memory, layers


def device_records(layers: list[LayerMemory]) -> DeviceRecords:
    return DeviceRecords(GEOMETRY, dict(zip("abc", layers, strict=True)), LAYOUT, CpuRecordCodec(LAYOUT))
