"""What 8-bit KV does to the output of a trained model: perplexity, log-probabilities, greedy tokens. See `kv_quant.py`.

Held-out text is cut into sequences. KV of a sequence's first half, a whole number of blocks, is computed exactly; then
the second half is computed on it, as by a resumed request or a conversation's next turn: on that KV as it is (fp32), as
bfloat16, which is what a server's cache holds, or as bfloat16 that went through 8 bits, all blocks or every other one,
as where a request's history lies partly in records on the device, or as vLLM's own fp8. KV of the second half is exact,
and so is all arithmetic (fp32), so that what differs comes from the KV that was kept, and from nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from kv_quant_error import there_and_back
from kv_quant_model import Trained, sequences_of
from transformers import DynamicCache

from vllm_ext.kernels.kv_quant.format import PageLayout, RecordFormat

KV = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, each of shape [sequences, heads, tokens, channels]."""
GREEDY_LENGTHS = (16, 32, 64, 128, 256)
BLOCKS = (16, 32, 64, 128)
BLOCK = 64
HALF = f"int8_half_of_blocks_{BLOCK}"
"""Every other block in 8 bits."""
FP8 = "fp8_e4m3"
"""As a server with ``--kv-cache-dtype fp8`` and no scales of its own keeps it: for what `vllm-ext plan` says of it."""
_FP8_MAX = 448.0
_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Of the second halves of sequences, for one way to keep KV."""

    logprobs: torch.Tensor
    """Of the true tokens, shape [sequences, tokens], fp64."""
    top: torch.Tensor
    """The most likely tokens, shape [sequences, tokens]."""
    greedy: torch.Tensor
    """Tokens chosen greedily after the first halves, shape [sequences, length]."""


def measure(found: Trained, sequences: int, seed: int) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """Return metrics of 8 bits against bfloat16, and the same of bfloat16 against fp32 and of other blocks.

    Args:
        found: The model.
        sequences: How many of the held-out text are judged.
        seed: Of the resampling behind the interval of the perplexity's change.
    """
    rows = sequences_of(found.held_out, found.recipe.tokens, sequences)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "fp32": lambda values: values,
        "bf16": lambda values: values.bfloat16().float(),
        FP8: lambda values: values.bfloat16().float().clamp(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn).float(),
    }
    ways |= {f"int8_block_{block}": _through_8_bits(block) for block in BLOCKS if block <= found.recipe.tokens // 2}
    ways[HALF] = _through_8_bits(BLOCK, every=2)
    greedy = ("fp32", "bf16", f"int8_block_{BLOCK}", HALF, FP8)
    outputs = {name: _outputs(found, rows, way, greedy=name in greedy) for name, way in ways.items()}
    metrics = compare(outputs[f"int8_block_{BLOCK}"], outputs["bf16"], seed)
    beside = {"bf16_kv_against_fp32_kv": compare(outputs["bf16"], outputs["fp32"], seed)}
    for name in (HALF, FP8, *(f"int8_block_{block}" for block in BLOCKS if block != BLOCK)):
        if name in outputs:
            beside[name] = compare(outputs[name], outputs["bf16"], seed)
    metrics |= {"judged_tokens": float(outputs["bf16"].logprobs.numel()), "judged_sequences": float(len(rows))}
    return metrics, beside


def compare(ours: Outputs, exact: Outputs, seed: int) -> dict[str, float]:
    """Return how far outputs are from those of another way: flat, percentages and log-probabilities in nats."""
    change = ours.logprobs - exact.logprobs
    per_sequence = -change.mean(1)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(per_sequence), (2000, len(per_sequence)), generator=generator)
    resampled = _percent(per_sequence[draws].mean(1))
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    found = {
        "perplexity": float((-ours.logprobs.mean()).exp()),
        "perplexity_change_percent": float(_percent(per_sequence.mean())),
        "perplexity_change_low_percent": low,
        "perplexity_change_high_percent": high,
        "logprob_change_mean_abs_nats": float(change.abs().mean()),
        "logprob_change_p99_abs_nats": float(change.abs().flatten().quantile(0.99)),
        "logprob_change_max_abs_nats": float(change.abs().max()),
        "top_token_same_share": float((ours.top == exact.top).double().mean()),
    }
    for length in GREEDY_LENGTHS:
        if length <= min(ours.greedy.shape[1], exact.greedy.shape[1]):
            same = (ours.greedy[:, :length] == exact.greedy[:, :length]).all(1)
            found[f"greedy_same_{length}_tokens_share"] = float(same.double().mean())
    return found


def kv_of(found: Trained, sequences: int) -> list[torch.Tensor]:
    """Return pages of bfloat16 KV of held-out text, of `page_layout`, one tensor [blocks, page_elements] a layer."""
    rows = sequences_of(found.held_out, found.recipe.tokens, sequences)
    parts = [_prefix(found, batch)[0] for batch in rows.split(_BATCH)]
    layers = range(found.recipe.layers)
    together = [(torch.cat([p[i][0] for p in parts]), torch.cat([p[i][1] for p in parts])) for i in layers]
    return [_pages(torch.cat((keys, values), -1), BLOCK).bfloat16() for keys, values in together]


def page_layout(found: Trained, tokens: int = BLOCK) -> PageLayout:
    """Return the layout of pages that hold a whole block."""
    recipe = found.recipe
    return PageLayout.rows(torch.bfloat16, recipe.kv_heads, recipe.hidden // recipe.heads, tokens)


def _percent(nats: torch.Tensor) -> torch.Tensor:
    return 100 * torch.expm1(nats)


def _outputs(
    found: Trained, rows: torch.Tensor, way: Callable[[torch.Tensor], torch.Tensor], *, greedy: bool
) -> Outputs:
    middle = found.recipe.tokens // 2
    length = min(max(GREEDY_LENGTHS), found.recipe.tokens - middle) if greedy else 0
    parts = []
    for batch in rows.split(_BATCH):
        kept, rest = _prefix(found, batch)[0], batch[:, middle:]
        kept = [_both(way, keys, values) for keys, values in kept]
        with torch.no_grad():
            logits = found.model(input_ids=rest[:, :-1], past_key_values=_cache(kept)).logits.double()
        logprobs = logits.log_softmax(-1).gather(-1, rest[:, 1:, None])[..., 0]
        parts.append((logprobs, logits.argmax(-1), _greedy(found, kept, rest[:, :1], length)))
    logprobs, top, chosen = (torch.cat(column) for column in zip(*parts, strict=True))
    return Outputs(logprobs=logprobs, top=top, greedy=chosen)


@torch.no_grad()
def _prefix(found: Trained, rows: torch.Tensor) -> tuple[KV, torch.Tensor]:
    """Return exact KV of the first halves, and their last logits."""
    cache = DynamicCache()
    logits = found.model(input_ids=rows[:, : found.recipe.tokens // 2], past_key_values=cache).logits
    return [(layer.keys, layer.values) for layer in cache.layers], logits[:, -1]


@torch.no_grad()
def _greedy(found: Trained, kept: KV, first: torch.Tensor, length: int) -> torch.Tensor:
    cache, token, chosen = _cache(kept), first, []
    for _ in range(length):
        token = found.model(input_ids=token, past_key_values=cache).logits[:, -1:].argmax(-1)
        chosen.append(token)
    return torch.cat(chosen, 1) if chosen else first[:, :0]


def _cache(kept: KV) -> Any:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kept):
        cache.update(keys.clone(), values.clone(), layer)
    return cache


def _both(way: Callable[[torch.Tensor], torch.Tensor], keys: torch.Tensor, values: torch.Tensor) -> tuple[Any, Any]:
    width = keys.shape[-1]
    done = way(torch.cat((keys, values), -1))
    return done[..., :width], done[..., width:]


def _through_8_bits(block: int, every: int = 1) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what takes KV, [sequences, heads, tokens, K and V], to bfloat16, to 8 bits and back, by the definition.

    Args:
        block: Tokens of a block.
        every: Of so many blocks one goes through 8 bits, the first of them.
    """

    def through(values: torch.Tensor) -> torch.Tensor:
        sequences, heads, tokens, width = values.shape
        back = _pages(values, block).bfloat16()
        layout = PageLayout.rows(torch.bfloat16, heads, width // 2, block)
        chosen = torch.arange(len(back)) % (tokens // block) % every == 0
        back[chosen] = there_and_back(back[chosen], RecordFormat(layout))[1]
        shaped = back.float().view(sequences, tokens // block, heads, block, width)
        return shaped.transpose(1, 2).reshape(values.shape)

    return through


def _pages(values: torch.Tensor, block: int) -> torch.Tensor:
    """KV [sequences, heads, tokens, K and V] as pages of whole blocks, shape [sequences * tokens / block, elements]."""
    sequences, heads, tokens, width = values.shape
    return (
        values.view(sequences, heads, tokens // block, block, width).transpose(1, 2).reshape(-1, heads * block * width)
    )
