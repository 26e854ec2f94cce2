"""Which of the sources that answered is believed: the one that was less far off recently."""

from __future__ import annotations

import math
from collections.abc import Mapping

from vllm_ext.contract.length_distribution import LengthDistribution

_LEVELS = (0.5, 0.9)
"""Quantiles that are judged: what an order goes by, and what memory is kept for."""
_ENOUGH = 50
"""Requests after which losses are believed rather than the order in which the sources were named."""
_REMEMBERED = 500
"""Requests after which what was seen counts half: prompts change, and a predictor learns."""

Answers = Mapping[str, tuple[int, ...]]
"""By source, the quantiles at `_LEVELS`, in tokens, that it gave for one request."""


def quantiles(distribution: LengthDistribution) -> tuple[int, ...]:
    """Return what of a source's answer is kept until the request has ended."""
    return tuple(distribution.quantile(level) for level in _LEVELS)


class SourceLosses:
    """The pinball loss of each source, on requests for which all of them answered.

    Of a quantile q at level p for a length n it is max(p * d, (p - 1) * d) with d = ln n - ln q: least, in the mean,
    where a share p of the lengths is below q (Koenker and Bassett, 1978). Summed over the median and the P90.
    """

    def __init__(self) -> None:
        """Start with nobody."""
        self._losses: dict[str, float] = {}
        self._requests = 0.0

    def observe(self, answers: Answers, output_tokens: int) -> None:
        """Learn from a finished request.

        Args:
            answers: By all sources that answered; of one alone nothing is learned.
            output_tokens: What was generated, at least 1.
        """
        if len(answers) < 2:
            return
        for source, found in answers.items():
            self._losses[source] = self._losses.get(source, 0.0) + _loss(found, output_tokens)
        self._requests += 1
        if self._requests >= 2 * _REMEMBERED:
            self._requests /= 2
            self._losses = {source: loss / 2 for source, loss in self._losses.items()}

    def is_nearer(self, source: str, other: str) -> bool | None:
        """Whether a source is less far off than another; None where too little was seen of the two."""
        if self._requests < _ENOUGH or source not in self._losses or other not in self._losses:
            return None
        return self._losses[source] < self._losses[other]


def _loss(found: tuple[int, ...], output_tokens: int) -> float:
    missed = [math.log(output_tokens / tokens) for tokens in found]
    return sum(max(level * one, (level - 1) * one) for level, one in zip(_LEVELS, missed, strict=True))
