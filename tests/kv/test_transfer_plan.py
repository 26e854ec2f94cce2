"""vLLM's two lists of a transfer, laid side by side."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from vllm_ext.kv.transfer_plan import group_transfers


def plan(
    blocks: list[int], sizes: list[int], indices: list[int], chunks: list[int], blocks_per_chunk: int
) -> list[tuple[int, list[int], list[list[int]]]]:
    device = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=indices)
    parts = group_transfers(device, CPULoadStoreSpec(chunks), blocks_per_chunk)
    return [(part.group, part.chunks.tolist(), part.blocks.tolist()) for part in parts]


def test_a_block_is_a_chunk() -> None:
    assert plan([7, 3], [2], [5], [10, 11], 1) == [(0, [10, 11], [[7], [3]])]


def test_a_transfer_may_begin_and_end_inside_a_chunk() -> None:
    """Blocks 5 to 9 of a request, four a chunk: the last three of its second chunk and the first two of its third."""
    assert plan([1, 2, 3, 4, 6], [5], [5], [20, 21], 4) == [(0, [20, 21], [[-1, 1, 2, 3], [4, 6, -1, -1]])]


def test_groups_follow_each_other_and_one_without_blocks_is_left_out() -> None:
    found = plan([1, 2, 8, 9, 10], [2, 0, 3], [0, 4, 3], [30, 31, 32], 2)
    assert found == [(0, [30], [[1, 2]]), (2, [31, 32], [[-1, 8], [9, 10]])]


@pytest.mark.parametrize(("chunks", "named"), [([30], "more"), ([30, 31, 32], "less")])
def test_lists_that_do_not_fit_are_refused(chunks: list[int], named: str) -> None:
    with pytest.raises(ValueError, match=f"group_sizes=.*{named} than"):
        plan([1, 2, 3, 4], [4], [0], chunks, 2)


def test_a_negative_block_is_refused() -> None:
    """A chunk without one of its blocks would be stored, and found."""
    with pytest.raises(ValueError, match="must be 0 or more"):
        plan([1, -1], [2], [0], [30], 2)
