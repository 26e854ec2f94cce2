"""What a model says on KV that was kept in some format, and how far that is from what it says on exact KV.

KV of the first half of each sequence is computed exactly and kept; on it the second half is computed, as by a resumed
request or a conversation's next turn. KV of the second half is exact, and all arithmetic is the same, so that what
differs comes from the KV that was kept and from nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from vllm_ext.quality.kv_formats import KvFormat

KV = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, each of shape [sequences, heads, tokens, channels]."""
GREEDY_LENGTHS = (16, 32, 64, 128, 256)
BATCH = 8
"""Sequences computed together."""
_RESAMPLED = 2000


class UnsupportedModel(ValueError):
    """The model keeps something else than keys and values of all tokens."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Of the second halves of sequences, for one format."""

    logprobs: torch.Tensor
    """Of the true tokens, shape [sequences, tokens], fp64."""
    top: torch.Tensor
    """The most likely tokens, shape [sequences, tokens]."""
    greedy: torch.Tensor
    """Tokens chosen greedily after the first halves, shape [sequences, length]."""


def outputs(
    model: Any, rows: torch.Tensor, formats: Mapping[str, KvFormat], *, kept_tokens: int, greedy_tokens: int,
    greedy: Collection[str], progress: Callable[[int], None] | None = None,
) -> dict[str, Outputs]:  # fmt: skip
    """Compute what a model says, by format.

    Args:
        model: A causal language model of transformers with full attention.
        rows: Sequences, shape [sequences, tokens].
        formats: By name.
        kept_tokens: How many of a sequence's tokens have KV that was kept, a whole number of blocks.
        greedy_tokens: How many are chosen greedily.
        greedy: For which formats they are.
        progress: Told how many batches are done; each format has its own.

    Raises:
        UnsupportedModel: the model's cache is not what `Outputs` are about.
        NoRecord: KV can't be kept in a format.
    """
    parts: dict[str, list[tuple[torch.Tensor, ...]]] = {name: [] for name in formats}
    done = count(1)
    with torch.no_grad():
        for batch in rows.split(BATCH):
            exact, rest = exact_kv(model, batch[:, :kept_tokens]), batch[:, kept_tokens:].to(model.device)
            for name, kv_format in formats.items():
                kept = [_both(kv_format, keys, values) for keys, values in exact]
                length = greedy_tokens if name in greedy else 0
                parts[name].append((*_judged(model, kept, rest), _greedy(model, kept, rest[:, :1], length)))
                if progress is not None:
                    progress(next(done))
    joined = {name: [torch.cat(column) for column in zip(*found, strict=True)] for name, found in parts.items()}
    return {
        name: Outputs(logprobs=logprobs, top=top, greedy=chosen) for name, (logprobs, top, chosen) in joined.items()
    }


def exact_kv(model: Any, rows: torch.Tensor) -> KV:
    """Return a model's KV of sequences, shape [sequences, tokens].

    Raises:
        UnsupportedModel: it has none of each token, or keys and values of different shapes.
    """
    cache = _cache(model, [])
    with torch.no_grad():
        model.base_model(input_ids=rows.to(model.device), past_key_values=cache, use_cache=True)
    found = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]
    for keys, values in found:
        if keys.shape != values.shape or keys.shape[-2] != rows.shape[1]:
            raise UnsupportedModel(f"keys {list(keys.shape)} and values {list(values.shape)} of {rows.shape[1]} tokens")
    if not found:
        raise UnsupportedModel("it fills no cache of keys and values")
    return found


def changes(ours: Outputs, exact: Outputs, seed: int) -> dict[str, float]:
    """Return how far outputs are from those of another format, with 95 % intervals of a bootstrap over sequences.

    Args:
        ours: To be judged.
        exact: What they are compared with.
        seed: Of the resampling.

    Returns:
        Flat: percentages, log-probabilities in nats, shares and numbers of tokens.
    """
    change = ours.logprobs - exact.logprobs
    per_sequence = -change.mean(1)
    same_top = (ours.top == exact.top).double().mean(1)
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randint(len(per_sequence), (_RESAMPLED, len(per_sequence)), generator=generator)
    low, high = _interval(_percent(per_sequence[draws].mean(1)))
    top_low, top_high = _interval(same_top[draws].mean(1))
    found = {
        "perplexity": float((-ours.logprobs.mean()).exp()),
        "perplexity_change_percent": float(_percent(per_sequence.mean())),
        "perplexity_change_low_percent": low,
        "perplexity_change_high_percent": high,
        "logprob_mean_nats": float(ours.logprobs.mean()),
        "logprob_change_mean_abs_nats": float(change.abs().mean()),
        "logprob_change_p99_abs_nats": float(change.abs().flatten().quantile(0.99)),
        "logprob_change_max_abs_nats": float(change.abs().max()),
        "top_token_same_share": float(same_top.mean()),
        "top_token_same_low_share": top_low,
        "top_token_same_high_share": top_high,
    }
    if length := min(ours.greedy.shape[1], exact.greedy.shape[1]):
        found |= _greedy_changes(ours.greedy[:, :length] == exact.greedy[:, :length], draws)
    return found


def _greedy_changes(same: torch.Tensor, draws: torch.Tensor) -> dict[str, float]:
    shares = same.double().mean(1)
    low, high = _interval(shares[draws].mean(1))
    before = same.long().cumprod(1).sum(1)
    found = {
        "greedy_same_share": float(shares.mean()),
        "greedy_same_low_share": low,
        "greedy_same_high_share": high,
        "greedy_before_first_difference_min_tokens": float(before.min()),
        "greedy_before_first_difference_median_tokens": float(before.median()),
    }
    for length in GREEDY_LENGTHS:
        if length <= same.shape[1]:
            found[f"greedy_same_{length}_tokens_share"] = float((before >= length).double().mean())
    return found


def _judged(model: Any, kept: KV, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities of the tokens behind the first of each row, and the most likely tokens."""
    logits = model(input_ids=rest[:, :-1], past_key_values=_cache(model, kept), use_cache=True).logits
    logprobs = []
    for row, tokens in zip(logits, rest[:, 1:], strict=True):  # row by row: fp64 of a large vocabulary is large
        wide = row.double()
        logprobs.append(wide.gather(-1, tokens[:, None])[:, 0] - wide.logsumexp(-1))
    return torch.stack(logprobs).cpu(), logits.argmax(-1).cpu()


def _greedy(model: Any, kept: KV, first: torch.Tensor, length: int) -> torch.Tensor:
    cache, token, chosen = _cache(model, kept if length else []), first, [first[:, :0]]
    for _ in range(length):
        token = model(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)
        chosen.append(token)
    return torch.cat(chosen, 1).cpu()


def _cache(model: Any, kept: KV) -> Any:
    """A cache of its own with KV, which is copied."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    for layer, (keys, values) in enumerate(kept):
        cache.update(keys, values, layer)
    return cache


def _both(kv_format: KvFormat, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    width = keys.shape[-1]
    kept = kv_format(torch.cat((keys, values), -1))
    return kept[..., :width], kept[..., width:]


def _percent(nats: torch.Tensor) -> torch.Tensor:
    return 100 * torch.expm1(nats)


def _interval(resampled: torch.Tensor) -> tuple[float, float]:
    low, high = resampled.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return low, high
