"""What 8-bit KV does to the output of a trained model: perplexity, log-probabilities, greedy tokens. See `kv_quant.py`.

Held-out text is cut into sequences, whose first halves' KV is kept (`vllm_ext.quality.outputs`): as it is (fp32), as
bfloat16, which is what a server's cache holds, or as bfloat16 that went through 8 bits, all blocks or every other one,
as where a request's history lies partly in records on the device, or as vLLM's own fp8.
"""

from __future__ import annotations

import torch
from kv_quant_model import Trained, sequences_of

from vllm_ext.config.kv_tier import BLOCK_TOKENS
from vllm_ext.kernels.kv_quant.format import PageLayout
from vllm_ext.quality import kv_formats
from vllm_ext.quality.kv_formats import KvFormat, pages_of
from vllm_ext.quality.outputs import BATCH, GREEDY_LENGTHS, changes, exact_kv, outputs

BLOCKS = (16, 32, 64, 128)
HALF = f"int8_half_of_blocks_{BLOCK_TOKENS}"
"""Every other block in 8 bits."""
FP8 = "fp8_e4m3"
"""For what `vllm-ext plan` says of it."""


def measure(found: Trained, sequences: int, seed: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return metrics of 8 bits against bfloat16, and the same of bfloat16 against fp32 and of other blocks.

    Args:
        found: The model.
        sequences: How many of the held-out text are judged.
        seed: Of the resampling behind the intervals.
    """
    tokens = found.recipe.tokens
    rows, middle = sequences_of(found.held_out, tokens, sequences), tokens // 2
    ours = f"int8_block_{BLOCK_TOKENS}"
    formats: dict[str, KvFormat] = {
        "fp32": kv_formats.exact,
        "bf16": kv_formats.bfloat16,
        FP8: lambda values: kv_formats.fp8_e4m3(kv_formats.bfloat16(values)),
    }
    formats |= {f"int8_block_{n}": kv_formats.int8(n, torch.bfloat16) for n in BLOCKS if n <= middle}
    formats[HALF] = kv_formats.int8(BLOCK_TOKENS, torch.bfloat16, every=2)
    made = outputs(
        found.model, rows, formats, kept_tokens=middle, greedy_tokens=min(max(GREEDY_LENGTHS), tokens - middle),
        greedy=("fp32", "bf16", ours, HALF, FP8),
    )  # fmt: skip
    metrics = changes(made[ours], made["bf16"], seed)
    beside = {"bf16_kv_against_fp32_kv": changes(made["bf16"], made["fp32"], seed)}
    for name in (HALF, FP8, *(f"int8_block_{block}" for block in BLOCKS if block != BLOCK_TOKENS)):
        if name in made:
            beside[name] = changes(made[name], made["bf16"], seed)
    metrics |= {"judged_tokens": float(made["bf16"].logprobs.numel()), "judged_sequences": float(len(rows))}
    return metrics, beside


def kv_of(found: Trained, sequences: int) -> list[torch.Tensor]:
    """Return pages of bfloat16 KV of held-out text, of `page_layout`, one tensor [blocks, page_elements] a layer."""
    rows = sequences_of(found.held_out, found.recipe.tokens, sequences)[:, : found.recipe.tokens // 2]
    parts = [exact_kv(found.model, batch) for batch in rows.split(BATCH)]
    layers = range(found.recipe.layers)
    together = [(torch.cat([p[i][0] for p in parts]), torch.cat([p[i][1] for p in parts])) for i in layers]
    return [pages_of(torch.cat((keys, values), -1), BLOCK_TOKENS).bfloat16() for keys, values in together]


def page_layout(found: Trained) -> PageLayout:
    """Return the layout of pages that hold a whole block."""
    recipe = found.recipe
    return PageLayout.rows(torch.bfloat16, recipe.kv_heads, recipe.hidden // recipe.heads, BLOCK_TOKENS)
