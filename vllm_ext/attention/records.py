"""Attention over 8-bit records by a kernel that knows blocks only: what a step reads is unpacked before it.

A step that reads no record passes through unchanged. In others each layer's records that the step reads are dequantised
into the scratch pages that all layers share, and the kernel gets a block table that names these instead of the records,
and a cache that reaches as far. New tokens are written as ever, since they never belong to a record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.attention.backend import AttentionCGSupport

from vllm_ext.config.errors import KEY, ConfigError
from vllm_ext.kv.int8.codec import CpuRecordCodec
from vllm_ext.kv.int8.geometry import SHARE
from vllm_ext.kv.int8.worker import DeviceRecords, StepAtHand, common_layout, current

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_READS = "vllm_ext_reads"
"""Attribute of a step's attention metadata: its `RecordReads`, if a kernel needs them unpacked."""


class RecordReads:
    """The records that one step reads, and where they are unpacked.

    Args:
        records: The worker's.
        ids: Of the records, as block tables have them.
        table: The step's block table, [requests, blocks], int32.
    """

    def __init__(self, records: DeviceRecords, ids: Sequence[int], table: torch.Tensor) -> None:
        self._records = records
        first = records.geometry.num_blocks
        self._places = [number - first for number in ids]
        slots = torch.zeros(records.geometry.num_records, dtype=table.dtype)
        slots[torch.tensor(self._places)] = torch.arange(len(ids), dtype=table.dtype)
        self._is_record = table >= first
        self._table = torch.where(self._is_record, slots.to(table.device)[(table - first).clamp(min=0).long()], table)

    def unpacked(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unpack a layer's records; return its cache with the scratch pages, and the block table that names these."""
        layer = self._records.layer_of(cache)
        pages = range(layer.scratch, layer.scratch + len(self._places))
        self._records.codec.to_pages(layer, self._places, pages)
        return layer.wide, torch.where(self._is_record, self._table + layer.scratch, self._table)


class UnpacksRecords:
    """In front of vLLM's implementation of attention: hands it blocks only."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Attend, as vLLM's; see there."""
        reads: RecordReads | None = getattr(attn_metadata, _READS, None)
        if reads is not None:
            kv_cache, table = reads.unpacked(kv_cache)
            attn_metadata = dataclasses.replace(attn_metadata, block_table=table)
        forward: Any = super().forward  # type: ignore[misc]
        return forward(layer, query, key, value, kv_cache, attn_metadata, *args, **kwargs)


class HearsOfRecords:
    """In front of vLLM's builder of attention metadata: lets a worker hear of steps, if there are records.

    Attributes:
        has_records: Whether there are.
    """

    _cudagraph_support = AttentionCGSupport.NEVER
    """Whether a step reads records is seen when it comes, and not when a graph is captured."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any) -> None:
        """Take vLLM's arguments."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.has_records = has_records(vllm_config)
        if self.has_records:
            from vllm_ext.hooks import registry

            registry.install("kv-records")

    def check_pages(self, layers: Iterable[Any]) -> None:
        """Refuse an engine at its start whose pages no record can hold, once it is known who writes them.

        Args:
            layers: vLLM's attention layers, whose implementations say what our backend can't do for them.

        Raises:
            ConfigError: there is such a thing, or pages are such.
            CompilerMissing: there is no g++, which compiles the codec on a CPU.
        """
        if not self.has_records:
            return
        layers = list(layers)
        if obstacle := next((layer.impl.obstacle for layer in layers if layer.impl.obstacle), None):
            raise ConfigError(SHARE, "greater than 0", f"must be 0: {obstacle}")
        spec: Any = self.kv_cache_spec  # type: ignore[attr-defined]
        device: torch.device = self.device  # type: ignore[attr-defined]
        page = torch.empty(1, spec.num_kv_heads, spec.block_size, 2 * spec.head_size, dtype=spec.dtype, device=device)
        layout = common_layout((layer, page) for layer in layers)
        if device.type == "cpu":
            CpuRecordCodec(layout)


def has_records(vllm_config: VllmConfig) -> bool:
    """Whether an engine keeps KV in records on its device."""
    options = (vllm_config.additional_config or {}).get(KEY) or {}
    return bool((options.get("kv_tier") or {}).get("device_int8_share"))


def note_reads(metadata: Any, seq_lens: torch.Tensor, block_size: int, *, unpack: bool) -> None:
    """Note in a step's metadata which records it reads, if a step is at hand.

    Args:
        metadata: Of the step, with its block table, [requests, blocks]; behind a request's blocks may stand anything.
        seq_lens: Tokens of each request, [requests].
        block_size: Tokens of a block.
        unpack: Whether the kernel that serves the step knows blocks only.

    Raises:
        RuntimeError: the block table names a record of which the step says nothing: it would be read as a block.
    """
    step = current()
    if step is None:
        return
    table = metadata.block_table
    if table.device.type == "cpu":  # elsewhere this step would have to wait for the one before
        _check(step, table, seq_lens, block_size)
    if unpack and step.reads:
        setattr(metadata, _READS, RecordReads(step.records, step.reads, table))


def records_behind(cache: torch.Tensor) -> torch.Tensor | None:
    """Return the records behind a layer's cache, [records, bytes]; None: it has none, or no step is at hand."""
    step = current()
    return None if step is None else step.records.layer_of(cache).records


def _check(step: StepAtHand, table: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> None:
    is_record = table >= step.records.geometry.num_blocks
    if not bool(is_record.any()):  # one look at a table that may be wide
        return
    used = torch.arange(table.shape[1]) * block_size < seq_lens[:, None]
    named = table[used & is_record]
    if len(named) and (unknown := set(named.tolist()).difference(step.reads)):
        raise RuntimeError(f"block table names records {sorted(unknown)}, and the step was to read {step.reads}")
