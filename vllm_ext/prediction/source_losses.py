"""Which of the sources that answered is believed: the one that was less far off recently."""

from __future__ import annotations

import math
from collections.abc import Mapping

LEVELS = (0.5, 0.9)
"""Quantiles that are judged: what an order goes by, and what memory is kept for."""
_ENOUGH, _REMEMBERED = 50, 500
"""Requests after which losses are believed rather than the order of the sources, and after which they count half."""

Answers = Mapping[str, tuple[int, ...]]
"""By source, the quantiles at `LEVELS` of what it said of one request, within its bound, in tokens."""


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
        """Learn from a request that generated at least one token; of one answer alone nothing is learned."""
        if len(answers) < 2:
            return
        for source, said in answers.items():
            missed = [(level, math.log(output_tokens / one)) for level, one in zip(LEVELS, said, strict=True)]
            loss = sum(max(level * one, (level - 1) * one) for level, one in missed)
            self._losses[source] = self._losses.get(source, 0.0) + loss
        self._requests += 1
        if self._requests >= 2 * _REMEMBERED:
            self._requests /= 2
            self._losses = {source: loss / 2 for source, loss in self._losses.items()}

    def is_nearer(self, source: str, other: str) -> bool | None:
        """Whether a source is less far off than another; None where too little was seen of the two."""
        if self._requests < _ENOUGH or source not in self._losses or other not in self._losses:
            return None
        return self._losses[source] < self._losses[other]
