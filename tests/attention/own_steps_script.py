"""Replays a step of our kernel as a captured CUDA graph would, and prints the largest errors as JSON.

A graph calls the kernels again with the tensors that they were captured with, whatever a builder has made since: here
too. Its own process, because Triton decides at import whether it interprets kernels (TRITON_INTERPRET=1, on the CPU).
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from vllm_ext.attention.own_steps import OwnSteps
from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.kernels.paged_attention import PagedKV, Ranges, gpu, reference

HEADS, ROWS, BLOCK, WIDTH = 4, 8, 16, 40
LAYOUT = PageLayout.tokens_first(torch.float32, 2, 16, BLOCK)
LIMITS = gpu.DeviceLimits(processors=3, shared_bytes=0)


class Runner:
    """What a model runner keeps: queries, lengths and a block table, each in one place."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.pages = torch.randn(ROWS * WIDTH, LAYOUT.page_elements, generator=self.generator)
        self.query = torch.zeros(ROWS * 4, HEADS, 16)
        self.start, self.seq_lens = torch.zeros(ROWS + 1, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
        self.table = torch.zeros((ROWS, WIDTH), dtype=torch.int32)

    def step(self, q_len: list[int], seq_lens: list[int], rows: int) -> SimpleNamespace:
        """Write a step, padded to some rows, and return vLLM's metadata of it."""
        count = len(q_len)
        self.query.normal_(generator=self.generator)
        self.start[1 : count + 1] = torch.tensor(q_len).cumsum(0)
        self.start[count + 1 :] = sum(q_len)
        self.seq_lens.zero_()
        self.seq_lens[:count] = torch.tensor(seq_lens)
        ids = torch.randperm(len(self.pages), generator=self.generator).view(ROWS, WIDTH)
        self.table.copy_(ids)
        self.table[count:] = 10**6  # behind the requests may stand anything
        return SimpleNamespace(
            num_reqs=rows, num_actual_tokens=max(rows, sum(q_len)), max_query_len=max(q_len),
            query_start_loc=self.start[: rows + 1], seq_lens=self.seq_lens[:rows], block_table_tensor=self.table[:rows],
        )  # fmt: skip

    def error(self, step: gpu.Step, count: int) -> float:
        """Attend with a step, and compare with the definition for what the runner holds now."""
        kv, out = PagedKV(LAYOUT, self.pages), torch.full_like(self.query, torch.nan)
        gpu.attend(self.query, kv, step, out, scale=0.25)
        ranges = Ranges.from_block_table(self.start[: count + 1], self.seq_lens[:count], self.table[:count])
        wanted, _ = reference.paged_attention(self.query, kv, ranges, scale=0.25)
        tokens = int(self.start[count])
        return float((out[:tokens].double() - wanted[:tokens]).abs().nan_to_num(torch.inf).max())


def main() -> None:
    """Capture steps of 4 and of 8 decodes and replay both after others; then take more rows than there is room for."""
    runner = Runner()
    sizes = {"max_rows": 8, "max_tokens": 32, "limits": LIMITS, "device": torch.device("cpu")}
    steps = OwnSteps(LAYOUT, HEADS, **sizes)
    steps.warm_up([(0, 0.0), (9, 2.0)], has_int8=True)
    captured = {rows: steps.of(runner.step([1] * rows, [1] * rows, rows), reads_int8=False) for rows in (4, 8)}
    found = {}
    for name, q_len, seq_lens, rows in (
        ("4 decodes", [1] * 4, [600, 3, 17, 200], 4),
        ("3 decodes, padded", [1] * 3, [16, 640, 1], 4),
        ("8 decodes", [1] * 8, [1, 2, 3, 640, 5, 300, 7, 16], 8),
        ("5 decodes, padded", [1] * 5, [500] * 5, 8),
    ):
        steps.of(runner.step(q_len, seq_lens, rows), reads_int8=False)
        found[f"{name}, replayed"] = runner.error(captured[rows].step, len(q_len))
    own = steps.of(runner.step([3, 1, 4], [640, 20, 4], 3), reads_int8=False)
    found["short queries"] = runner.error(own.step, 3)
    narrow = OwnSteps(LAYOUT, HEADS, **{**sizes, "max_rows": 2})
    own = narrow.of(runner.step([1, 2, 1], [640, 20, 4], 3), reads_int8=False)
    found["more rows than there is room for"] = runner.error(own.step, 3)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
