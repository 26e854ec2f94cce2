"""Prints, as JSON, how many variants of our kernels a warm-up compiles, and which that steps launch it left out.

The steps are what a server has: any number of requests, queries of any length, pages as vLLM lays them out, queries
that lie beside keys and values, and KV of any size. Its own process, because Triton decides at import whether it
interprets kernels; no kernel runs.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

sys.path.append(str(Path(__file__).parents[2]))

from tests.support.launches import Launch, recorded
from vllm_ext.attention.cuda import paged
from vllm_ext.attention.own_steps import OwnSteps
from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat
from vllm_ext.kernels.paged_attention import gpu

HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
LAYOUT = PageLayout.tokens_first(torch.bfloat16, KV_HEADS, DIM, BLOCK)
LAYERS = ((0, 0.0), (4096, 0.0), (16, 30.0))
"""Window and bound of the scores."""
MAX_ROWS, MAX_TOKENS = 64, 2048


def step_of(rows: int, query_len: int, blocks: int) -> SimpleNamespace:
    """Return vLLM's metadata of a step of equal requests."""
    return SimpleNamespace(
        num_reqs=rows, num_actual_tokens=rows * query_len, max_query_len=query_len,
        query_start_loc=torch.arange(rows + 1, dtype=torch.int32) * query_len,
        seq_lens=torch.full((rows,), 300, dtype=torch.int32),
        block_table_tensor=torch.zeros(rows, blocks, dtype=torch.int32),
    )  # fmt: skip


def served(steps: OwnSteps) -> Iterator[Launch]:
    """Yield what steps launch; a step of more rows than there is room for, too."""
    query_lens = (1, 2, 5, 9, 17, 500)
    for rows, query_len, blocks, with_int8 in itertools.product((1, 2, 16, 65), query_lens, (1, 33), (False, True)):
        cache = torch.zeros(blocks, BLOCK, KV_HEADS, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2)
        records = torch.zeros(blocks, RecordFormat(LAYOUT).record_bytes, dtype=torch.uint8) if with_int8 else None
        kv = paged(cache, records)
        fused = torch.zeros(rows * query_len, HEADS + 2 * KV_HEADS, DIM, dtype=torch.bfloat16)
        query, out = fused[:, :HEADS], torch.zeros(rows * query_len, HEADS, DIM, dtype=torch.bfloat16)
        with recorded() as launches:
            own = steps.of(step_of(rows, query_len, blocks), reads_int8=with_int8)
            for window, softcap in LAYERS:
                gpu.attend(query, kv, own.step, out, scale=DIM**-0.5, window=window, softcap=softcap)
        yield from launches


def main() -> None:
    """Warm up, serve, and compare."""
    limits = gpu.DeviceLimits(processors=132, shared_bytes=227 * 1024)
    sizes = {"max_rows": MAX_ROWS, "max_tokens": MAX_TOKENS, "limits": limits, "device": torch.device("cpu")}
    steps = OwnSteps(LAYOUT, HEADS, **sizes)
    with recorded() as warm:
        steps.warm_up(LAYERS, has_int8=True)
    with patch.object(gpu.DeviceLimits, "of", lambda device: limits):
        launched = set(served(steps))
    missing = [str(launch) for launch in launched - set(warm)]
    print(json.dumps({"warm": len(set(warm)), "served": len(launched), "missing": missing}))


if __name__ == "__main__":
    main()
