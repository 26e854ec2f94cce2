"""Records that hold what they should by other means, and what lies in memory that holds nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import odd_gaps
import torch

from vllm_ext.kernels.kv_quant import reference
from vllm_ext.kernels.kv_quant.format import RecordFormat
from vllm_ext.kv.int8 import worker as module

_POISON_BYTE = 0x47


def install(kind: str, core: Any) -> Callable[[], None]:
    """Arrange for it before the first step; returns what to call before each step.

    Args:
        kind: ``poison``: blocks and records that hold nothing are overwritten before each step. So they are in these,
            too: ``exact``: records hold their blocks as they are, elsewhere than in the arena; ``in-place``: and none
            of them is moved back into a block when its request comes, whatever room there is; ``reference``: they
            hold what the definition of the format makes of these; ``late``: records are written behind the step's
            first layer, when new tokens lie in their blocks: the output must show it.
        core: The engine core.

    Raises:
        KeyError: for an unknown kind.
    """
    kinds = {"poison": lambda: None, "exact": _exact, "in-place": _exact, "reference": _reference, "late": _late}
    kinds[kind]()
    if kind == "in-place":
        core.scheduler.records.spare_blocks = lambda: 0
    poison_blocks = odd_gaps.install("poison", core)
    pool = core.scheduler.kv_cache_manager.block_pool
    runner = core.model_executor.driver_worker.worker.model_runner

    def before_step() -> None:
        poison_blocks_of(poison_blocks, pool)
        records = getattr(runner, "_vllm_ext_records", None)
        if records is not None:
            empty = [b.block_id for b in pool.blocks[pool.num_gpu_blocks :] if not b.ref_cnt and b.block_hash is None]
            places = torch.tensor(empty, dtype=torch.int64) - pool.num_gpu_blocks
            for layer in records.layers.values():
                layer.records[places] = _POISON_BYTE

    return before_step


def poison_blocks_of(poison_blocks: Callable[[], None], pool: Any) -> None:
    """Overwrite blocks alone: ids of records are no places in a cache."""
    blocks = pool.blocks
    pool.blocks = blocks[: pool.num_gpu_blocks]
    try:
        poison_blocks()
    finally:
        pool.blocks = blocks


class _Elsewhere:
    """Records by layer and place, in a dictionary."""

    def __init__(self, layout: Any) -> None:
        self.layout = layout
        self.held: dict[tuple[int, int], torch.Tensor] = {}

    def made_of(self, pages: torch.Tensor) -> torch.Tensor:
        """What comes back of pages, [pages, page_elements]."""
        return pages.clone()

    def to_records(self, layer: Any, pages: Sequence[int], records: Sequence[int]) -> None:
        for place, page in zip(records, self.made_of(layer.pages[list(pages)]), strict=True):
            self.held[layer.scratch, place] = page

    def to_pages(self, layer: Any, records: Sequence[int], pages: Sequence[int]) -> None:
        for place, page in zip(records, pages, strict=True):
            layer.pages[page] = self.held[layer.scratch, place]


class _ByDefinition(_Elsewhere):
    """What the definition of the format makes of pages."""

    def made_of(self, pages: torch.Tensor) -> torch.Tensor:
        made = torch.empty_like(pages)
        reference.dequantise(self._quantised(pages), made, torch.arange(len(pages)), RecordFormat(self.layout))
        return made

    def _quantised(self, pages: torch.Tensor) -> torch.Tensor:
        records, holds = reference.quantise(pages, torch.arange(len(pages)), RecordFormat(self.layout))
        assert holds.all()
        return records


def _exact() -> None:
    module._codec = lambda layers, layout: _Elsewhere(layout)


def _reference() -> None:
    module._codec = lambda layers, layout: _ByDefinition(layout)


def _late() -> None:
    real = module.DeviceRecords.move

    def move(self: Any, step: Any) -> None:
        for wanted in step.moves:
            for layer in self.layers.values():
                if wanted.direction is module.Direction.TO_RECORD:
                    layer.pages[wanted.block] = 1.0
        real(self, step)

    module.DeviceRecords.move = move  # type: ignore[method-assign]
