"""What paged attention reads: pages of KV, records of KV in INT8, and ranges of queries over both.

One space of block ids names both: ids below the number of pages name pages, ids from there on name records. So a block
table may hold either, block by block, and one request may be partly in INT8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_ext.kernels.kv_quant.format import ITEM_BYTES, PageLayout, RecordFormat

MAX_GROUP = 64
"""Most query heads of one KV head."""
STEP = 32
"""Tokens of a block come in multiples of it on the CPU."""


@dataclass(frozen=True)
class PagedKV:
    """The KV of one layer.

    Args:
        layout: Where the values of a block lie in its page.
        pages: [num_blocks, page_elements], in the type of the layout; a page is contiguous, pages may lie apart.
        records: [num_records, record_bytes], uint8, as `RecordFormat` says; or none.

    Raises:
        ValueError: a tensor has another shape or type than the layout wants, or the layout is one no kernel reads.
    """

    layout: PageLayout
    pages: torch.Tensor
    records: torch.Tensor | None = None

    def __post_init__(self) -> None:
        layout, pages, records = self.layout, self.pages, self.records
        if pages.dtype != layout.dtype:
            raise ValueError(f"pages.dtype={pages.dtype}: must be {layout.dtype}, as the layout says")
        if pages.dim() != 2 or pages.shape[1] != layout.page_elements or pages.stride(1) != 1:
            raise ValueError(
                f"pages: shape {tuple(pages.shape)}, strides {pages.stride()}: must be "
                f"[blocks, {layout.page_elements}], the elements of a page next to each other"
            )
        if records is not None and (
            records.dtype != torch.uint8
            or records.dim() != 2
            or records.shape[1] < RecordFormat(layout).record_bytes
            or records.stride(1) != 1
            or records.stride(0) % ITEM_BYTES[layout.dtype]
        ):
            raise ValueError(
                f"records: {records.dtype}, shape {tuple(records.shape)}, strides {records.stride()}: must be uint8 of "
                f"shape [records, at least {RecordFormat(layout).record_bytes}], the bytes of each adjacent"
            )

    @property
    def num_blocks(self) -> int:
        """Pages; the first id that names a record."""
        return int(self.pages.shape[0])

    @property
    def num_records(self) -> int:
        """Records."""
        return 0 if self.records is None else int(self.records.shape[0])


@dataclass(frozen=True)
class Ranges:
    """Which query tokens attend to which blocks: all tensors int32, on one device, [num_ranges] but for the ids.

    Query token i of range r stands at ``q_start[r] + i`` among the queries, and at position ``q_position[r] + i`` of
    the KV that ``block_ids[first_block[r] ...]`` hold. It sees that position and all before it, of the first
    ``kv_len[r]`` tokens. A request is one range, or several over one list of blocks: a gap that is computed again and
    the new prompt behind it. A range may also be a part of a request's KV; such results are merged by log-sum-exp.

    Args:
        block_ids: One list of ids, contiguous, in which each range has a part.
        first_block: Where that part begins, int64.

    Raises:
        ValueError: a tensor has another type, shape or device than the others.
    """

    q_start: torch.Tensor
    q_len: torch.Tensor
    q_position: torch.Tensor
    kv_len: torch.Tensor
    first_block: torch.Tensor
    block_ids: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("q_start", "q_len", "q_position", "kv_len", "first_block", "block_ids"):
            tensor, wanted = getattr(self, name), torch.int64 if name == "first_block" else torch.int32
            if tensor.dtype != wanted or not tensor.is_contiguous() or tensor.device != self.q_start.device:
                raise ValueError(
                    f"{name}: {tensor.dtype} on {tensor.device}, strides {tensor.stride()}: must be {wanted}, "
                    f"contiguous, on {self.q_start.device}"
                )
            if name != "block_ids" and tensor.shape != (self.num_ranges,):
                raise ValueError(f"{name}: shape {tuple(tensor.shape)}: must be ({self.num_ranges},)")

    @classmethod
    def from_block_table(
        cls, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> Ranges:
        """Return one range for each row, whose queries are the last tokens of its sequence.

        Args:
            query_start_loc: [num_rows + 1], where the queries of each row begin.
            seq_lens: [num_rows], tokens with those of the query.
            block_table: [num_rows, blocks], whose rows may lie apart; nothing of it is copied.
        """
        rows = seq_lens.shape[0]
        start = query_start_loc[:rows]
        length = query_start_loc[1 : rows + 1] - start
        first = torch.arange(rows, dtype=torch.int64, device=seq_lens.device) * block_table.stride(0)
        return cls(start, length, seq_lens - length, seq_lens.contiguous(), first, ids_of_table(block_table[:rows]))

    @property
    def num_ranges(self) -> int:
        """Ranges."""
        return int(self.q_start.shape[0])

    @cached_property
    def num_tokens(self) -> int:
        """Query tokens that the ranges reach to."""
        return int((self.q_start + self.q_len).max()) if self.num_ranges else 0


def ids_of_table(block_table: torch.Tensor) -> torch.Tensor:
    """Return a block table as one list of ids, in which row r begins at r times its stride; nothing is copied."""
    rows, stride = block_table.shape[0], block_table.stride(0)
    return torch.as_strided(block_table, (max(0, (rows - 1) * stride) + block_table.shape[1],), (1,))


def blocks_of(ranges: Ranges, index: int, block_size: int) -> torch.Tensor:
    """Return the ids of the blocks that one range reads."""
    first = int(ranges.first_block[index])
    return ranges.block_ids[first : first + -(-int(ranges.kv_len[index]) // block_size)]
