"""What it takes to keep KV in records: to move it, and to attend to it there."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from vllm_ext.kernels.kv_quant import cpu
from vllm_ext.kernels.kv_quant.format import ITEM_BYTES, PageLayout, RecordFormat
from vllm_ext.kernels.native import CompileError, CompilerMissing
from vllm_ext.kv.int8.geometry import ArenaGeometry
from vllm_ext.kv.int8.step import Direction, RecordStep

_PAGES = 4
"""Timed at start: some hundred KiB, which take a millisecond."""
_REPEATS = 5
_DEVICE_BYTES_PER_S = 1e12
"""Of a GPU's memory, whose scheduler runs in a process that doesn't compute; a third of what an H100 reaches."""


@dataclass(frozen=True, kw_only=True)
class RecordPrices:
    """Seconds, by tokens.

    Raises:
        ValueError: a time is negative, or blocks hold no tokens.
    """

    block_tokens: int
    to_record_s: float
    """Of one block, all layers."""
    to_block_s: float
    """The same, back."""
    read_s: float
    """By which a step takes longer for each block that it reads in a record, beyond one that it reads in a block."""

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens={self.block_tokens!r}: must be at least 1")
        for name in ("to_record_s", "to_block_s", "read_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be 0 or more seconds")

    @classmethod
    def by_bandwidth(
        cls, geometry: ArenaGeometry, block_tokens: int, bytes_per_s: float, *, unpacks: bool
    ) -> RecordPrices:
        """Return what moving bytes takes: a page is read and a record written, or the other way round.

        Args:
            geometry: Of the device's memory.
            block_tokens: Tokens of a block.
            bytes_per_s: What its memory does.
            unpacks: Whether attention has records dequantised before it reads them; else they cost a step nothing.
        """
        moved_s = geometry.num_layers * (geometry.page_bytes + geometry.record_bytes) / bytes_per_s
        return cls(
            block_tokens=block_tokens, to_record_s=moved_s, to_block_s=moved_s, read_s=moved_s if unpacks else 0.0
        )

    def step_s(self, step: RecordStep) -> float:
        """Return by how much a step takes longer."""
        to_records = sum(move.direction is Direction.TO_RECORD for move in step.moves)
        to_blocks = len(step.moves) - to_records
        return to_records * self.to_record_s + to_blocks * self.to_block_s + len(step.reads) * self.read_s

    def num_blocks(self, num_tokens: int) -> int:
        """Return the blocks that hold so many tokens, the last one perhaps in part."""
        return math.ceil(num_tokens / self.block_tokens)

    def stay_s(self, num_tokens: int, num_steps: float) -> float:
        """Return the time for KV to become records, and to be attended to there, or in blocks again if that is less.

        Args:
            num_tokens: Of the KV.
            num_steps: Steps that will read it.
        """
        back_s = min(self.to_block_s, self.read_s * num_steps)
        return self.num_blocks(num_tokens) * (self.to_record_s + back_s)


def measured(
    geometry: ArenaGeometry, block_size: int, dtype: torch.dtype, *, on_cpu: bool, unpacks: bool
) -> RecordPrices:
    """Return the prices on this machine: on a CPU timed with a few pages, else by what a GPU's memory does.

    Args:
        geometry: Of the device's memory.
        block_size: Tokens of a block.
        dtype: Of the KV.
        on_cpu: Where that is.
        unpacks: Whether attention has records dequantised before it reads them; else they cost a step nothing.
    """
    codec_s = _timed(geometry, block_size, dtype) if on_cpu else None
    if codec_s is None:
        return RecordPrices.by_bandwidth(geometry, block_size, _DEVICE_BYTES_PER_S, unpacks=unpacks)
    to_record_s, to_block_s = (geometry.num_layers * seconds for seconds in codec_s)
    return RecordPrices(
        block_tokens=block_size,
        to_record_s=to_record_s,
        to_block_s=to_block_s,
        read_s=to_block_s if unpacks else 0.0,
    )


def _timed(geometry: ArenaGeometry, block_size: int, dtype: torch.dtype) -> tuple[float, float] | None:
    """Return the seconds of one page into a record, and back; None: there is no compiler, and no worker will start."""
    channels = geometry.page_bytes // (2 * block_size * ITEM_BYTES[dtype])
    fmt = RecordFormat(PageLayout.rows(dtype, 1, channels, block_size))
    pages = torch.randn(_PAGES, fmt.layout.page_elements).to(dtype)
    records, ids = torch.zeros(_PAGES, fmt.record_bytes, dtype=torch.uint8), np.arange(_PAGES)
    found: tuple[list[float], list[float]] = ([], [])
    try:
        for _ in range(_REPEATS):
            started = time.perf_counter()
            cpu.quantise(pages, ids, records, ids, fmt)
            between = time.perf_counter()
            cpu.dequantise(records, ids, pages, ids, fmt)
            found[0].append(between - started)
            found[1].append(time.perf_counter() - between)
    except (CompilerMissing, CompileError):
        return None
    return min(found[0]) / _PAGES, min(found[1]) / _PAGES
