"""Where the tokens of a step lie in a sequence that was kept with gaps.

vLLM knows of a request how many of its tokens are computed, and takes it that those are the first ones. A sequence of
which ``[d, m)`` was kept and ``[0, d)`` is computed together with what follows ``m`` has no such number (Pensieve,
section 4.4). It is given a virtual one: all kept tokens are counted as if they came first, so that the index of a
token among those that are computed runs on from there without a gap. From the end of the last kept range on virtual
and real positions are the same, and so is everything that vLLM derives from the count.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

ATTRIBUTE = "vllm_ext_gaps"
"""Of a step's scheduler output: the layouts of its requests that are not beyond their gaps, by request."""


class Span(NamedTuple):
    """Tokens that are computed and stand next to each other in the sequence."""

    start: int
    """Position of the first one."""
    end: int
    """Position behind the last one; the attention of the last one covers so many tokens."""


@dataclass(frozen=True)
class GapLayout:
    """The kept ranges of a sequence, in tokens.

    Args:
        kept: Ranges ``(start, end)`` whose KV is there, in order, not empty, with tokens to compute between them.

    Raises:
        ValueError: they are not so.
    """

    kept: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        last = -1
        for start, end in self.kept:
            if not last < start < end:
                raise ValueError(f"kept={self.kept!r}: must be ranges in order that do not touch each other")
            last = end
        if not self.gaps:
            raise ValueError(f"kept={self.kept!r}: must leave a gap before the last range")

    @functools.cached_property
    def gaps(self) -> tuple[Span, ...]:
        """What is to be computed before the last kept range."""
        ends = (0, *(end for _, end in self.kept))
        return tuple(Span(end, start) for end, (start, _) in zip(ends, self.kept, strict=False) if end < start)

    @functools.cached_property
    def num_kept(self) -> int:
        """Tokens kept: the virtual number of computed tokens before anything is computed."""
        return sum(end - start for start, end in self.kept)

    @property
    def end(self) -> int:
        """Position behind the last kept range; virtual indices from here on are positions."""
        return self.kept[-1][1]

    def position(self, index: int) -> int:
        """Return the position of the token of a virtual index; all before it have their KV when it is computed.

        Raises:
            ValueError: ``index`` is below `num_kept`.
        """
        return next(self._left(index), Span(index, index)).start

    def num_ahead(self, index: int) -> int:
        """Return how many gaps are still to be computed, from a virtual index on.

        Raises:
            ValueError: as `position`.
        """
        return sum(1 for _ in self._left(index))

    def spans(self, index: int, num_tokens: int) -> Iterator[Span]:
        """Yield where so many tokens lie that are computed from a virtual index on.

        Raises:
            ValueError: as `position`.
        """
        behind = max(index, self.end)
        for start, end in (*self._left(index), (behind, behind + num_tokens)):
            length = min(end - start, num_tokens)
            if length:
                yield Span(start, start + length)
            num_tokens -= length

    def _left(self, index: int) -> Iterator[Span]:
        """Yield what is left of the gaps from a virtual index on."""
        done = index - self.num_kept
        if done < 0:
            raise ValueError(f"index={index!r}: must be at least {self.num_kept}, the number of kept tokens")
        for start, end in self.gaps:
            if done < end - start:
                yield Span(start + done, end)
            done = max(0, done - (end - start))


def layouts_of(output: Any) -> Mapping[str, GapLayout]:
    """Return the layouts that a step carries, whoever they are for."""
    return getattr(output, ATTRIBUTE, None) or {}
