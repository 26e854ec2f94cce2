"""Steps for our kernel on CUDA: which rows attend to which blocks, in memory that stays where it is.

A captured CUDA graph reads the tensors that it was captured with. So what a step adds to vLLM's own, which stay too, is
written into buffers that are allocated once; only steps of more rows than those hold, which no graph serves, get new
ones. All is made once for a step, and not once for each layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, gpu
from vllm_ext.kernels.paged_attention.format import ids_of_table

logger = logging.getLogger("vllm.vllm_ext")


@dataclass(frozen=True)
class OwnStep:
    """What our kernel needs of a step."""

    step: gpu.Step
    num_tokens: int
    reads_int8: bool
    """Whether block tables name blocks in 8 bits."""


class OwnSteps:
    """Makes steps for layers of one shape; a step is good until the next one is made.

    Args:
        layout: Of their pages.
        num_heads: Query heads of a layer.
        max_rows: Rows of the largest step that a graph serves, and of nearly all others.
        max_tokens: Query tokens of the largest step.
        limits: Of the device.
        device: Where.

    Raises:
        ValueError: a size or layout that the kernel has no code for.
    """

    def __init__(
        self, layout: PageLayout, num_heads: int, *, max_rows: int, max_tokens: int, limits: gpu.DeviceLimits,
        device: torch.device,
    ) -> None:  # fmt: skip
        gpu.check(layout, num_heads)
        self._layout, self._num_heads, self._max_rows = layout, num_heads, max_rows
        self._row = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._q_len, self._q_position = (torch.empty(max_rows, dtype=torch.int32, device=device) for _ in range(2))
        self._first_block = torch.empty_like(self._row)
        self._stride = 0
        self._workspace = gpu.Workspace.for_steps(
            layout, num_heads=num_heads, max_tokens=max_tokens, max_ranges=max_rows, limits=limits, device=device
        )

    def of(self, common: Any, *, reads_int8: bool) -> OwnStep:
        """Return what our kernel needs of a step.

        Args:
            common: vLLM's metadata of it, a row for each request or part of one.
            reads_int8: Whether block tables name blocks in 8 bits.
        """
        rows, tokens = common.num_reqs, common.num_actual_tokens
        fits = rows <= self._max_rows
        ranges = self._ranges(common) if fits else _new_ranges(common)
        step = gpu.divide(
            ranges, self._layout, num_heads=self._num_heads, num_tokens=tokens, max_query_len=common.max_query_len,
            workspace=self._workspace if fits else None,
        )  # fmt: skip
        return OwnStep(step, tokens, reads_int8)

    def warm_up(self, layers: Iterable[tuple[int, float]], *, has_int8: bool) -> None:
        """Compile all that steps will need: seconds at start, and not while requests wait.

        Args:
            layers: Window and bound of the scores of each layer, as `gpu.attend` wants them.
            has_int8: Whether there are blocks in 8 bits.
        """
        began, layout, device = time.perf_counter(), self._layout, self._row.device
        pages = torch.zeros((1, layout.page_elements), dtype=layout.dtype, device=device)
        int8_blocks = torch.zeros((1, RecordFormat(layout).record_bytes), dtype=torch.uint8, device=device)
        kinds = [PagedKV(layout, pages), *([PagedKV(layout, pages, int8_blocks)] if has_int8 else [])]
        lengths, variants = gpu.query_lens_of_tiles(layout, self._num_heads), set(layers)
        for length in lengths:
            query = torch.zeros((length, self._num_heads, layout.head_dim), dtype=layout.dtype, device=device)
            start, seq_len = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, length], [1]))
            ranges = Ranges.from_block_table(start, seq_len, torch.zeros((1, 1), dtype=torch.int32, device=device))
            step = gpu.divide(
                ranges, layout, num_heads=self._num_heads, num_tokens=length, max_query_len=length,
                workspace=self._workspace,
            )  # fmt: skip
            for kv in kinds:
                for window, softcap in variants:
                    gpu.attend(query, kv, step, torch.empty_like(query), scale=1.0, window=window, softcap=softcap)
        count = len(lengths) * len(kinds) * len(variants)
        logger.info("attention: compiled %d kernels in %.1f s", count, time.perf_counter() - began)

    def _ranges(self, common: Any) -> Ranges:
        rows, table = common.num_reqs, common.block_table_tensor
        start, seq_lens = common.query_start_loc, common.seq_lens[: common.num_reqs]
        length, position = self._q_len[:rows], self._q_position[:rows]
        torch.sub(start[1 : rows + 1], start[:rows], out=length)
        torch.sub(seq_lens, length, out=position)
        if self._stride != table.stride(0):
            self._stride = table.stride(0)
            torch.mul(self._row, self._stride, out=self._first_block)
        return Ranges(start[:rows], length, position, seq_lens, self._first_block[:rows], ids_of_table(table[:rows]))


def _new_ranges(common: Any) -> Ranges:
    rows = common.num_reqs
    return Ranges.from_block_table(
        common.query_start_loc[: rows + 1], common.seq_lens[:rows], common.block_table_tensor[:rows]
    )
