"""Which loads make a profile: what spans the batch size, the context, the chunk, and the three kinds of steps."""

from __future__ import annotations

from typing import NamedTuple

OUTPUT_TOKENS = 24
"""Tokens that each request of a decode load generates, and at most each of a mixed load."""
SHORTEST_PROMPT = 4
MAX_BATCH_TOKENS = 1 << 16
"""Prompts of one load together, in tokens; a single request may be longer."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_PROMPT_SHARES = (0.02, 0.1, 0.4, 0.8)


class Load(NamedTuple):
    """One thing to run: what kind of steps it is for, requests at a time, and tokens of a prompt (0: of any length)."""

    kind: str
    """``decode``: equal requests, together. ``prefill``: prompts one by one. ``mixed``: requests that come and go."""
    batch: int
    prompt_tokens: int


def longest_prompt(max_model_len: int) -> int:
    """Return the longest prompt, in tokens, that leaves room for the output of a load."""
    return max(1, max_model_len - OUTPUT_TOKENS - 1)


def plan(max_model_len: int, max_num_seqs: int) -> list[Load]:
    """Return the loads of one round.

    Args:
        max_model_len: Longest sequence of the engine, in tokens.
        max_num_seqs: Most requests of a step.
    """
    longest = longest_prompt(max_model_len)
    lengths = sorted({min(longest, max(SHORTEST_PROMPT, int(share * longest))) for share in _PROMPT_SHARES})
    batches = [batch for batch in _BATCHES if batch <= max_num_seqs] or [1]
    decodes = [Load("decode", b, n) for b in batches for n in lengths if b == 1 or b * n <= MAX_BATCH_TOKENS]
    prompts = [longest >> halvings for halvings in range(longest.bit_length())]
    prefills = [Load("prefill", 1, n) for n in reversed(prompts) if n >= min(SHORTEST_PROMPT, longest)]
    return [*decodes, *prefills, *(Load("mixed", batch, 0) for batch in batches)]
