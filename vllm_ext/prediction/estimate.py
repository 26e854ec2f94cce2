"""What a predictor says of a request: an output length, a bound on it, and who said so."""

from __future__ import annotations

import math
from typing import NamedTuple

RETRIEVAL = "retrieval"
"""From the true lengths of similar past prompts."""
DECODER = "decoder"
"""From the regression on the prompt's embedding."""
BLEND = "blend"
"""From both."""
PRIOR = "prior"
"""From a constant: nobody knew anything."""
SOURCES = (RETRIEVAL, DECODER, BLEND, PRIOR)
LONGEST_TOKENS = 10_000_000
"""Longest output length there can be, for checks."""
_ROUNDING = 1e-9


class Estimate(NamedTuple):
    """A predicted output length in tokens; 1 <= tokens <= p90.

    Built by `bounded`, which keeps that law. Equal estimates without a similarity compare equal within one process;
    one that was sent to another process does not, as its NaN is another object. Compare fields there.
    """

    tokens: int
    """What to expect: the median, or for Algorithm 1 of ALISE a mean. Whole tokens, at least 1."""
    p90: int
    """Nine in ten requests end by here. Whole tokens, at least ``tokens``."""
    source: str
    """One of `SOURCES`."""
    neighbours: int = 0
    """Past requests that were used."""
    similarity: float = math.nan
    """Cosine similarity of the nearest of them; NaN where there is none."""


def bounded(
    tokens: float,
    p90: float,
    source: str,
    max_tokens: int,
    *,
    generated: int = 0,
    neighbours: int = 0,
    similarity: float = math.nan,
) -> Estimate:
    """Return whole tokens within what is possible: generated < tokens <= p90 <= max_tokens.

    ``tokens`` is rounded (halves to even), ``p90`` rounded up. A request that generated ``max_tokens`` already is about
    to be stopped: what is greater than ``generated`` goes before the bound then.

    Args:
        tokens: Expected output length, in tokens.
        p90: 90 % quantile, in tokens; raised to ``tokens`` where it is below.
        source: One of `SOURCES`.
        max_tokens: The client's bound, at least 1.
        generated: Tokens generated so far, at least 0.
        neighbours: Past requests used.
        similarity: Of the nearest.

    Raises:
        ValueError: a quantile is not finite, or ``max_tokens`` or ``generated`` is out of its range.
    """
    if not (math.isfinite(tokens) and math.isfinite(p90)):
        raise ValueError(f"tokens={tokens!r}, p90={p90!r}: must be finite")
    if max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens!r}: must be at least 1")
    if generated < 0:
        raise ValueError(f"generated={generated!r}: must be at least 0")
    lowest = generated + 1
    highest = max(max_tokens, lowest)
    expected = min(max(round(tokens), lowest), highest)
    # exp(log(10)) is a little above 10, which is no reason to say 11.
    bound = math.ceil(p90 * (1 - _ROUNDING))
    return Estimate(expected, min(max(bound, expected), highest), source, neighbours, similarity)
