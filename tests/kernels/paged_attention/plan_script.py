"""Divides steps into items and prints what came of it, as JSON. Arguments: the device, and the steps as JSON.

A step is {"q_len", "kv_len": [...], "num_heads", "num_kv_heads", "block_size", "processors"}. Its own process, because
Triton decides at import whether it interprets kernels (TRITON_INTERPRET=1, on the CPU).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kernels.paged_attention import Ranges, gpu


def divided(device: str, step: dict[str, Any]) -> dict[str, Any]:
    """Return the lists that the kernels read, as far as they are used."""

    def int32(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    layout = PageLayout.tokens_first(torch.float16, step["num_kv_heads"], 16, step["block_size"])
    q_len, kv_len = int32(step["q_len"]), int32(step["kv_len"])
    start = torch.cumsum(q_len, 0, dtype=torch.int32) - q_len
    ranges = Ranges(start, q_len, kv_len - q_len, kv_len, torch.zeros_like(q_len, dtype=torch.int64), int32([0]))
    limits = gpu.DeviceLimits(processors=step["processors"], shared_bytes=0)
    sizes = {"num_heads": step["num_heads"], "max_tokens": int(q_len.sum()), "max_ranges": len(q_len)}
    workspace = gpu.Workspace.for_steps(layout, limits=limits, device=q_len.device, **sizes)
    found = gpu.divide(
        ranges, layout, num_heads=step["num_heads"], num_tokens=int(q_len.sum()), max_query_len=int(q_len.max()),
        workspace=workspace,
    )  # fmt: skip
    grid = found.grid
    return {
        "rows": grid.rows,
        "tokens": grid.tokens,
        "most_items": grid.items,
        "most_partials": grid.partials,
        "room": workspace.partial.numel() // (step["num_kv_heads"] * grid.rows * (16 + 2)),
        "first_item": workspace.first_item[: len(q_len)].tolist(),
        "splits": workspace.splits[: len(q_len)].tolist(),
        "first_partial": workspace.first_partial[: len(q_len)].tolist(),
        "item_range": workspace.item_range[: grid.items].tolist(),
        "merge_item": workspace.merge_item[: grid.partials // 2].tolist(),
    }


if __name__ == "__main__":
    print(json.dumps([divided(sys.argv[1], step) for step in json.loads(sys.argv[2])]))
