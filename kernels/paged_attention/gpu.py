"""Paged attention on a GPU: how many programs serve a step, and the launches of `gpu_kernel`.

Nobody waits for the device: the host knows how many queries there are, and at most how long the longest is; how long
sequences are only the device knows. So a step is divided there (`divide`), once for all layers, and the number of
programs depends on the queries alone: a captured CUDA graph stays right whatever lengths it is replayed with.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kernels.paged_attention import gpu_kernel
from vllm_ext.kernels.paged_attention.format import PagedKV, Ranges

LEAST_ROWS = 16
_PROGRAMS_PER_PROCESSOR = 8
"""Two waves of the four that run on a processor at once: shares of that size leave few processors idle at the end,
equal and unequal lengths alike, and cost little to merge."""
_LEAST_TOKENS = 128
"""Of KV; a smaller share costs more in the merge than it saves."""
_LEAST_BLOCK = 16
_WIDE_HEAD = 128
_ROOMY_BYTES = 160 * 1024
"""Of shared memory, as devices for servers have; others have 99 KiB."""
_EXCHANGED_BYTES = 1024
"""Of shared memory, at most, by which threads of a program exchange sums; tiles have the rest."""
_LANES = 256
_MERGE_CHUNK = 16


@dataclass(frozen=True, kw_only=True)
class DeviceLimits:
    """What a device has, as far as launches depend on it."""

    processors: int
    """Multiprocessors."""
    shared_bytes: int
    """Shared memory of a program, at most."""

    @classmethod
    @functools.cache
    def of(cls, device: torch.device) -> DeviceLimits:
        """Ask a CUDA device; any other is one whose kernels Triton interprets."""
        if device.type != "cuda":
            return cls(processors=1, shared_bytes=0)
        found = torch.cuda.get_device_properties(device)
        return cls(processors=found.multi_processor_count, shared_bytes=found.shared_memory_per_block_optin)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """How many programs serve a step, whatever the lengths of its sequences."""

    rows: int
    """Of a tile."""
    tokens: int
    """Query tokens of a tile."""
    items: int
    """At most; programs beyond those that the device makes end at once."""
    partials: int
    """Items whose results are merged, at most."""
    merged_rows: int
    """Rows of a tile that queries may have."""

    @classmethod
    def of(
        cls, layout: PageLayout, *, num_heads: int, num_tokens: int, num_ranges: int, max_query_len: int,
        processors: int,
    ) -> Grid:  # fmt: skip
        """Choose.

        Args:
            layout: Of the pages.
            num_heads: Query heads.
            num_tokens: Query tokens of all ranges, at most.
            num_ranges: Ranges.
            max_query_len: Tokens of the longest query, at most.
            processors: Multiprocessors of the device.
        """
        group = num_heads // layout.num_heads
        used = max(1, max_query_len) * group
        rows = max(least_rows(group), min(most_rows(layout), triton.next_power_of_2(used)))
        tokens = rows // group
        tiles = min(num_tokens // tokens + num_ranges, num_ranges * -(-max_query_len // tokens))
        wanted = max(1, processors * _PROGRAMS_PER_PROCESSOR // layout.num_heads)
        return cls(
            rows=rows,
            tokens=tokens,
            items=max(wanted, tiles + wanted // 2),
            partials=max(2, wanted * LEAST_ROWS // rows),
            merged_rows=min(tokens * group, used),
        )


class Workspace:
    """Memory on the device in which steps are divided and partial results lie; one step at a time.

    Args:
        max_ranges: Ranges of the largest step.
        max_items: Items of the largest step.
        max_partial_numbers: fp32 numbers of the largest step's partial results.
        limits: Of the device.
        device: Where.
    """

    def __init__(
        self, max_ranges: int, max_items: int, max_partial_numbers: int, limits: DeviceLimits, device: torch.device
    ) -> None:
        self.limits = limits
        self.first_item, self.splits, self.first_partial = (
            torch.empty(max_ranges, dtype=torch.int32, device=device) for _ in range(3)
        )
        self.item_range, self.merge_item = (torch.empty(max_items, dtype=torch.int32, device=device) for _ in range(2))
        self.partial = torch.empty(max_partial_numbers, dtype=torch.float32, device=device)

    @classmethod
    def for_steps(
        cls, layout: PageLayout, *, num_heads: int, max_tokens: int, max_ranges: int, limits: DeviceLimits,
        device: torch.device,
    ) -> Workspace:  # fmt: skip
        """Return what every step of up to so many query tokens in up to so many ranges needs."""
        lengths = {min(length, max_tokens) for length in (*query_lens_of_tiles(layout, num_heads), max_tokens)}
        grids = [
            Grid.of(
                layout, num_heads=num_heads, num_tokens=max_tokens, num_ranges=max_ranges, max_query_len=length,
                processors=limits.processors,
            )
            for length in lengths
        ]  # fmt: skip
        numbers = max(grid.partials * _partial_numbers(grid, layout) for grid in grids)
        return cls(max_ranges, max(grid.items for grid in grids), numbers, limits, device)


@dataclass(frozen=True)
class Step:
    """A step's queries, divided among programs: the same for all layers of one shape."""

    ranges: Ranges
    grid: Grid
    workspace: Workspace


def divide(
    ranges: Ranges, layout: PageLayout, *, num_heads: int, num_tokens: int, max_query_len: int,
    workspace: Workspace | None = None,
) -> Step:  # fmt: skip
    """Divide a step among programs, on the device; returns at once.

    Args:
        ranges: Which tokens attend to which blocks; that these exist is for the caller to see to.
        layout: Of the pages.
        num_heads: Query heads.
        num_tokens: Query tokens of all ranges, at most.
        max_query_len: Tokens of the longest query, at most.
        workspace: Of a step that is over; by default a new one.

    Raises:
        ValueError: a size or layout that the kernel has no code for.
    """
    check(layout, num_heads)
    device, num_ranges = ranges.q_len.device, ranges.num_ranges
    if workspace is None:
        workspace = Workspace.for_steps(
            layout, num_heads=num_heads, max_tokens=num_tokens, max_ranges=num_ranges, limits=DeviceLimits.of(device),
            device=device,
        )  # fmt: skip
    grid = Grid.of(
        layout, num_heads=num_heads, num_tokens=num_tokens, num_ranges=num_ranges, max_query_len=max_query_len,
        processors=workspace.limits.processors,
    )  # fmt: skip
    gpu_kernel.plan[(1,)](
        ranges.q_len, ranges.q_position, ranges.kv_len, workspace.first_item, workspace.splits,
        workspace.first_partial, workspace.item_range, workspace.merge_item,
        num_ranges, grid.items, grid.partials, grid.partials // 2,
        TOKENS=grid.tokens, BLOCK=layout.block_size, LEAST=max(1, _LEAST_TOKENS // layout.block_size), LANES=_LANES,
        num_warps=4,
    )  # fmt: skip
    return Step(ranges, grid, workspace)


def attend(
    query: torch.Tensor, kv: PagedKV, step: Step, out: torch.Tensor, lse: torch.Tensor | None = None, *,
    scale: float, window: int = 0, softcap: float = 0.0,
) -> None:  # fmt: skip
    """Attend as `vllm_ext.kernels.paged_attention.paged_attention` does, without waiting for the device.

    Args:
        query: [tokens, heads, D], in the type of the KV; tokens may lie apart.
        kv: Pages whose channels are next to each other, and records.
        step: What `divide` made of the ranges, for as many heads.
        out: Like the query.
        lse: [tokens, heads], fp32, or none.
        scale: Of the scores.
        window: Most recent tokens that a query sees; 0: all.
        softcap: Bound of the scores; 0: none.

    Raises:
        ValueError: the step was divided for another number of heads; nothing is written.
    """
    layout, num_heads, grid, ranges, work = kv.layout, query.shape[1], step.grid, step.ranges, step.workspace
    if grid.rows // (num_heads // layout.num_heads) != grid.tokens:
        raise ValueError(f"num_heads={num_heads}: the step was divided into tiles of {grid.tokens} tokens for another")
    sizes = {"HEADS": num_heads, "KV_HEADS": layout.num_heads, "DIM": layout.head_dim, "ROWS": grid.rows}
    sizes |= {"WIDTH": triton.next_power_of_2(layout.head_dim), "HAS_LSE": lse is not None}
    told, has_int8 = out if lse is None else lse, kv.num_records > 0
    int8_blocks, channels, int8_stride = kv.pages, kv.pages, 0
    if kv.records is not None and has_int8:
        int8_blocks, channels, int8_stride = kv.records, kv.records.view(layout.dtype), kv.records.stride(0)
    item_bytes = layout.dtype.itemsize
    gpu_kernel.attend[(grid.items, layout.num_heads)](
        query, kv.pages, int8_blocks, channels, out, told, work.partial, ranges.block_ids, ranges.first_block,
        ranges.q_start, ranges.q_len, ranges.q_position, ranges.kv_len,
        work.first_item, work.splits, work.first_partial, work.item_range,
        kv.num_blocks, query.stride(0), out.stride(0), kv.pages.stride(0), int8_stride, int8_stride // item_bytes,
        RecordFormat(layout).minima_offset // item_bytes,
        layout.head_stride, layout.k.token_stride, layout.v.offset - layout.k.offset, scale, softcap, window,
        BLOCK=layout.block_size, **tokens_of_turns(layout), HAS_INT8=has_int8, HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap > 0, **sizes, **launch_options(layout, work.limits, rows=grid.rows, has_int8=has_int8),
    )  # fmt: skip
    gpu_kernel.merge[(grid.partials // 2, layout.num_heads, grid.merged_rows)](
        work.partial, out, told, ranges.q_start, ranges.q_len, work.first_item, work.splits, work.first_partial,
        work.item_range, work.merge_item, out.stride(0), CHUNK=_MERGE_CHUNK, **sizes, num_warps=2,
    )  # fmt: skip


def least_rows(group: int) -> int:
    """Return the rows of the smallest tile where so many query heads share a KV head."""
    return int(max(LEAST_ROWS, triton.next_power_of_2(group)))


def query_lens_of_tiles(layout: PageLayout, num_heads: int) -> list[int]:
    """Return the longest query that one tile holds, for each size of tiles that a step may have."""
    rows, group = least_rows(num_heads // layout.num_heads), num_heads // layout.num_heads
    found = [rows // group]
    while (rows := 2 * rows) <= most_rows(layout):
        found.append(rows // group)
    return found


def most_rows(layout: PageLayout) -> int:
    """Return the rows of the largest tile: of wider heads registers hold fewer."""
    return 64 if layout.head_dim <= _WIDE_HEAD else 32


def tokens_of_turns(layout: PageLayout) -> dict[str, int]:
    """Return how many tokens of pages, and of blocks in INT8, a program takes at once."""
    most = 64 if layout.head_dim <= _WIDE_HEAD and layout.dtype.itemsize == torch.bfloat16.itemsize else 32
    return {"PAGE_TOKENS": most, "INT8_TOKENS": min(most // 2, layout.block_size)}


def launch_options(layout: PageLayout, limits: DeviceLimits, *, rows: int, has_int8: bool) -> dict[str, int]:
    """Return how many warps a program has, and how many turns of a loop are under way at once.

    More rows need the registers of more threads. In INT8 there is one turn more where there is room: its bytes are half
    as many, and its registers allow two or three programs a processor, not five. There are fewer turns where shared
    memory does not hold as many tiles of K and V: in fp32 of wide heads.
    """
    wanted = 3 if not has_int8 else 4 if limits.shared_bytes >= _ROOMY_BYTES else 2
    tokens, width = tokens_of_turns(layout)["PAGE_TOKENS"], triton.next_power_of_2(layout.head_dim)
    beside = rows * (width + tokens) * layout.dtype.itemsize + _EXCHANGED_BYTES  # queries and probabilities
    turns = max(0, limits.shared_bytes - beside) // (2 * tokens * width * layout.dtype.itemsize)
    return {"num_warps": 4 if rows == LEAST_ROWS else 8, "num_stages": min(wanted, 1 + turns)}


def check(layout: PageLayout, num_heads: int) -> None:
    """Raise ValueError if the kernel has no code for these sizes, or this layout."""
    found: Any = layout
    block, group = found.block_size, num_heads // found.num_heads
    if block < _LEAST_BLOCK or block & (block - 1):
        raise ValueError(f"block_size={block}: must be a power of two, at least {_LEAST_BLOCK}, on a GPU")
    if num_heads % found.num_heads or not group:
        raise ValueError(f"num_heads={num_heads}: must be a multiple of the {found.num_heads} KV heads")
    if found.k.offset or (found.k.channel_stride, found.v.channel_stride) != (1, 1):
        raise ValueError(f"layout={layout}: the channels of a token must be next to each other, K first, on a GPU")
    if found.k.token_stride != found.v.token_stride:
        raise ValueError(f"layout={layout}: tokens of K and V must be equally far apart on a GPU")


def _partial_numbers(grid: Grid, layout: PageLayout) -> int:
    """Return the fp32 numbers of one item's partial result, for all KV heads."""
    return int(layout.num_heads * grid.rows * (triton.next_power_of_2(layout.head_dim) + 2))
