"""A worker's KV memory as blocks, records and scratch pages: views of what vLLM has allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vllm_ext.kv.int8.geometry import ArenaGeometry


@dataclass(frozen=True)
class LayerMemory:
    """One layer's share."""

    wide: torch.Tensor
    """What the layer's attention takes for its cache, [pages, heads, block_size, K and V]: its blocks are the first
    pages, and the scratch pages, which all layers share, the last ones. What lies between is not this layer's."""
    records: torch.Tensor
    """[num_records, record_bytes], uint8; the record of id ``num_blocks + i`` is the i-th one."""
    scratch: int
    """The first scratch page, as this layer's pages are numbered."""

    @property
    def pages(self) -> torch.Tensor:
        """The pages as values in their order in memory, [pages, page_elements]."""
        num_elements = self.wide.stride(0)
        return torch.as_strided(
            self.wide, (len(self.wide), num_elements), (num_elements, 1), self.wide.storage_offset()
        )


def layer_memory(cache: torch.Tensor, geometry: ArenaGeometry) -> LayerMemory:
    """Return the memory of the layer to which a cache belongs.

    Args:
        cache: The layer's blocks as vLLM's views have them, [num_blocks, heads, block_size, K and V].
        geometry: How the memory is divided in which it lies.

    Raises:
        ValueError: the cache is not a layer of such a memory.
    """
    item = cache.element_size()
    start = cache.storage_offset() * item
    layer, inside = divmod(start, geometry.layer_bytes)
    page = cache.stride(0) * item
    if inside or page != geometry.page_bytes or len(cache) != geometry.num_blocks or layer >= geometry.num_layers:
        raise ValueError(
            f"a cache of {len(cache)} blocks of {page} bytes at byte {start}: must be one of {geometry.num_layers} "
            f"layers of {geometry.num_blocks} blocks of {geometry.page_bytes} bytes, {geometry.layer_bytes} bytes apart"
        )
    scratch = (geometry.num_layers - layer) * geometry.stride_pages
    size = (scratch + geometry.scratch_pages, *cache.shape[1:])
    wide = torch.as_strided(cache, size, cache.stride(), cache.storage_offset())
    return LayerMemory(wide, arena_records(cache, geometry)[layer], scratch)


def arena_records(cache: torch.Tensor, geometry: ArenaGeometry) -> torch.Tensor:
    """Return the records of all layers, [layers, records, record_bytes], uint8.

    Args:
        cache: Of any layer.
        geometry: How the memory is divided in which it lies.
    """
    whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    return torch.as_strided(
        whole,
        (geometry.num_layers, geometry.num_records, geometry.record_bytes),
        (geometry.layer_bytes, geometry.record_bytes, 1),
        geometry.num_blocks * geometry.page_bytes,
    )
