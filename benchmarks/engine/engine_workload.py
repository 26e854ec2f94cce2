"""From rows of a workload to requests of the served model: token ids and hidden true output lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vllm_ext.datasets import WorkloadRow

FIRST_ORDINARY_TOKEN = 8
"""Made-up prompts use ids from here on; the ids before are commonly special tokens."""


class Tokenizer(Protocol):
    """What is needed of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids."""
        ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How recorded lengths are fitted to the served model."""

    length_scale: float = 1.0
    """Factor on output lengths, and on prompt lengths of rows without text; results are rounded, at least 1."""

    max_prompt_tokens: int = 256
    """Longer prompts are cut at their end."""

    max_output_tokens: int = 256
    """Longer outputs are cut; also the constant ``max_tokens`` of every request."""

    def __post_init__(self) -> None:
        if not self.length_scale > 0:
            raise ValueError(f"length_scale={self.length_scale!r}: must be greater than 0")
        for name in ("max_prompt_tokens", "max_output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One request ready to be sent, and the length it will turn out to have."""

    source_id: str
    """Row it came from."""

    prompt: str | None
    """Text behind the token ids; None for made-up prompts."""

    prompt_token_ids: tuple[int, ...]
    """At least one."""

    output_tokens: int
    """Hidden true length, from 1 to the limit."""

    clipped: bool
    """Whether prompt or output was cut to a limit."""


def draw(
    rows: Sequence[WorkloadRow], tokenizer: Tokenizer, limits: Limits, *, vocab_size: int, count: int, seed: int
) -> list[BenchRequest]:
    """Draw requests at random, without repeating a row or a prompt.

    Raises:
        ValueError: the workload has fewer distinct prompts than the run needs.
    """
    rng = np.random.default_rng(seed)

    def make_up(length: int) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(FIRST_ORDINARY_TOKEN, vocab_size, size=length))

    chosen: dict[tuple[int, ...], BenchRequest] = {}
    for index in rng.permutation(len(rows)):
        if len(chosen) == count:
            break
        request = fit(rows[index], tokenizer, limits, make_up)
        chosen.setdefault(request.prompt_token_ids, request)
    if len(chosen) < count:
        raise ValueError(
            f"workload: {count} requests with different prompts are needed, {len(chosen)} found in {len(rows)} rows; "
            f"lower --num-requests or --history-requests"
        )
    return list(chosen.values())


def fit(
    row: WorkloadRow, tokenizer: Tokenizer, limits: Limits, make_up: Callable[[int], tuple[int, ...]]
) -> BenchRequest:
    """Turn a row into a request of the served model; lengths of texts are counted with its tokenizer."""
    if row.prompt is not None:
        prompt_ids = tuple(tokenizer.encode(row.prompt)) or make_up(1)
    else:
        prompt_ids = make_up(max(1, round((row.prompt_tokens or 1) * limits.length_scale)))
    kept_ids = prompt_ids[: limits.max_prompt_tokens]
    prompt = row.prompt
    if prompt is not None and len(kept_ids) < len(prompt_ids):
        prompt = tokenizer.decode(list(kept_ids), skip_special_tokens=True)
    if row.output_text is not None:
        recorded = len(tokenizer.encode(row.output_text, add_special_tokens=False))
    else:
        recorded = row.output_tokens or 1
    output_tokens = max(1, round(recorded * limits.length_scale))
    return BenchRequest(
        source_id=row.source_id,
        prompt=prompt,
        prompt_token_ids=kept_ids,
        output_tokens=min(output_tokens, limits.max_output_tokens),
        clipped=len(kept_ids) < len(prompt_ids) or output_tokens > limits.max_output_tokens,
    )


def describe(requests: Sequence[BenchRequest]) -> dict[str, float]:
    """Lengths of a lot, for the configuration of a result."""
    outputs = np.array([r.output_tokens for r in requests], dtype=np.float64)
    prompts = np.array([len(r.prompt_token_ids) for r in requests], dtype=np.float64)
    return {
        "prompt_tokens_mean": float(prompts.mean()),
        "output_tokens_mean": float(outputs.mean()),
        "output_tokens_p50": float(np.percentile(outputs, 50)),
        "output_tokens_p90": float(np.percentile(outputs, 90)),
        "output_tokens_cv": float(outputs.std() / outputs.mean()),
        "clipped_fraction": sum(r.clipped for r in requests) / len(requests),
    }
