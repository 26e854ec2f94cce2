"""Sequences of tokens to judge a model by, cut from texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

MIN_SEQUENCES = 8
"""Fewer say nothing about chance."""


class TooLittleText(ValueError):
    """The texts are too few or too short; the message says how much is needed."""


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """What a model is judged by."""

    rows: torch.Tensor
    """Tokens, shape [sequences, tokens]."""
    texts: int
    """Texts that were long enough, of those looked at."""
    too_short: int
    """Texts that were not."""


def sequences(
    texts: Sequence[str], encode: Callable[[str], Sequence[int]], *, tokens: int, count: int, seed: int
) -> Sequences:
    """Cut texts into sequences of one length, none of which holds parts of two texts.

    Texts are drawn at random until as many as sequences are long enough, or there are no more; the sequences are
    spread evenly over all that these hold.

    Args:
        texts: To draw from.
        encode: Returns the tokens of a text.
        tokens: Of a sequence.
        count: Sequences that are wanted, at least `MIN_SEQUENCES`.
        seed: Of the draw.

    Raises:
        TooLittleText: they hold less than `MIN_SEQUENCES`.
    """
    lengths: list[int] = []
    found: list[torch.Tensor] = []
    for at in np.random.default_rng(seed).permutation(len(texts)):
        ids = torch.tensor(encode(texts[at]), dtype=torch.long)
        lengths.append(len(ids))
        if len(ids) >= tokens:
            found.append(windows(ids, tokens))
        if len(found) == count:
            break
    rows = torch.cat(found) if found else torch.empty(0, tokens)
    if len(rows) < MIN_SEQUENCES:
        raise TooLittleText(
            f"{len(texts)} texts, the longest of {max(lengths, default=0)} tokens, hold {len(rows)} sequences of "
            f"{tokens} tokens: at least {MIN_SEQUENCES} are needed, of one text or of several"
        )
    return Sequences(rows=spread(rows, count), texts=len(found), too_short=len(lengths) - len(found))


def windows(stream: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return the sequences that a text holds one after the other, shape [n, tokens]; what is left over is left out."""
    return stream[: len(stream) // tokens * tokens].view(-1, tokens)


def spread(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Return up to ``count`` of the rows, evenly spread."""
    return rows[torch.linspace(0, len(rows) - 1, min(count, len(rows))).round().long()]
