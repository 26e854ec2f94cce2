"""The worker's side of records: makes a step's moves before it, and tells attention which records the step reads.

A process has one worker, and a worker executes one step at a time: `executing` is around each of them, and whoever
builds the metadata of its attention asks `current`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.host.layout import PackedPages, UnknownLayout, layout_of
from vllm_ext.kv.int8.codec import CpuRecordCodec, RecordCodec, pad
from vllm_ext.kv.int8.geometry import SHARE, ArenaGeometry
from vllm_ext.kv.int8.memory import LayerMemory, layer_memory
from vllm_ext.kv.int8.step import Direction, RecordMove, RecordStep

if TYPE_CHECKING:
    from vllm_ext.kernels.kv_quant.format import PageLayout


class DeviceRecords:
    """The records of one worker.

    Args:
        geometry: How its memory is divided.
        layers: The memory of each layer with KV of its own.
        layout: Where values are in a page.
        codec: Moves KV of one layer.
    """

    def __init__(
        self, geometry: ArenaGeometry, layers: Mapping[str, LayerMemory], layout: PageLayout, codec: RecordCodec
    ) -> None:
        self.geometry, self.layers, self.layout, self.codec = geometry, layers, layout, codec
        self._by_address = {layer.wide.data_ptr(): layer for layer in layers.values()}

    def layer_of(self, cache: torch.Tensor) -> LayerMemory:
        """Return the memory of a layer's cache; layers that share KV have one."""
        return self._by_address[cache.data_ptr()]

    def move(self, step: RecordStep) -> None:
        """Make a step's moves."""
        for direction, moves in step.runs():
            blocks = [move.block for move in moves]
            records = [move.record - self.geometry.num_blocks for move in moves]
            for layer in self.layers.values():
                if direction is Direction.TO_RECORD:
                    self._pad(layer, moves)
                    self.codec.to_records(layer, blocks, records)
                else:
                    self.codec.to_pages(layer, records, blocks)

    def _pad(self, layer: LayerMemory, moves: list[RecordMove]) -> None:
        for move in moves:
            if move.num_tokens is not None:
                pad(layer.pages, move.block, move.num_tokens, self.layout)


@dataclass
class StepAtHand:
    """The step that a worker executes."""

    records: DeviceRecords
    reads: Sequence[int]
    """Ids of the records that it reads, ascending."""


_RECORDS = "_vllm_ext_records"
"""Attribute of a model runner."""
_current: StepAtHand | None = None


def current() -> StepAtHand | None:
    """Return the step that this process executes; None: none, as in a dummy run."""
    return _current


@contextmanager
def executing(runner: Any, step: RecordStep | None) -> Iterator[None]:
    """Make a step's moves, and let attention know of the step meanwhile.

    Args:
        runner: vLLM's model runner, of either kind, with its caches allocated.
        step: What the step says about records.

    Raises:
        ConfigError: the first time, if the KV of the model can't be kept in records.
    """
    global _current  # noqa: PLW0603 - a process has one worker
    records = getattr(runner, _RECORDS, None)
    if records is None:
        records = records_of(runner)
        setattr(runner, _RECORDS, records)
    _current = StepAtHand(records, () if step is None else step.reads)
    try:
        if step is not None:
            records.move(step)
        yield
    finally:
        _current = None


def records_of(runner: Any) -> DeviceRecords:
    """Return the records in the memory that a model runner has allocated.

    Raises:
        ConfigError: the KV of the model can't be kept in records.
    """
    geometry = ArenaGeometry.of(runner.kv_cache_config)
    if geometry is None:
        raise _refused("an engine core that leaves room for them")
    modules = runner.vllm_config.compilation_config.static_forward_context
    names = runner.kv_cache_config.kv_cache_tensors[0].layers
    caches = {name: modules[name].kv_cache for name in names}
    if any(len(cache) != geometry.num_blocks for cache in caches.values()):
        raise _refused("attention kernels that work on vLLM's own blocks, not on parts of them")
    layout = common_layout((modules[name], cache) for name, cache in caches.items())
    layers = {name: layer_memory(cache, geometry) for name, cache in caches.items()}
    return DeviceRecords(geometry, layers, layout, _codec(layers, layout))


def common_layout(layers: Iterable[tuple[Any, torch.Tensor]]) -> PageLayout:
    """Return where values are in a page of each of some layers.

    Args:
        layers: vLLM's attention layers, each with a cache like its own, which is not written.

    Raises:
        ConfigError: no record can hold such pages, or they differ.
    """
    try:
        layouts = {layout_of(layer, cache) for layer, cache in layers}
    except UnknownLayout as error:
        raise _refused(str(error)) from error
    layout = layouts.pop()
    if layouts:
        raise _refused("layers that are laid out alike")
    if isinstance(layout, PackedPages):
        raise _refused("pages that strides describe, and this machine's kernels pack values (AMX)")
    return layout


def _codec(layers: Mapping[str, LayerMemory], layout: PageLayout) -> RecordCodec:
    kinds = {layer.wide.device.type for layer in layers.values()}
    if kinds == {"cpu"}:
        return CpuRecordCodec(layout)
    if kinds == {"cuda"}:
        from vllm_ext.kv.int8.cuda_codec import CudaRecordCodec

        return CudaRecordCodec(layout)
    raise _refused(f"KV of the CPU or of CUDA, not of {sorted(kinds)}")


def _refused(needs: str) -> ConfigError:
    return ConfigError(SHARE, "greater than 0", f"needs {needs}; use 0")
