"""vLLM's two lists of a transfer, laid side by side."""

from __future__ import annotations

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from vllm_ext.kv.host.copies import group_transfers


def plan(
    blocks: list[int], sizes: list[int], indices: list[int], chunks: list[int]
) -> list[tuple[int, list[int], list[int]]]:
    device = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=indices)
    parts = group_transfers(device, CPULoadStoreSpec(chunks))
    return [(group, chunks.tolist(), blocks.tolist()) for group, chunks, blocks in parts]


def test_a_block_is_a_chunk() -> None:
    assert plan([7, 3], [2], [5], [10, 11]) == [(0, [10, 11], [7, 3])]


def test_groups_follow_each_other_and_one_without_blocks_is_left_out() -> None:
    found = plan([1, 2, 8, 9, 10], [2, 0, 3], [0, 4, 3], [30, 33, 31, 32, 5])
    assert found == [(0, [30, 33], [1, 2]), (2, [31, 32, 5], [8, 9, 10])]


@pytest.mark.parametrize("chunks", [[30], [30, 31, 32, 33, 34]], ids=["too few", "too many"])
def test_lists_that_do_not_fit_are_refused(chunks: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"group_sizes=.*: must add up to the transfer's 4 blocks and {len(chunks)}"):
        plan([1, 2, 3, 4], [4], [0], chunks)
