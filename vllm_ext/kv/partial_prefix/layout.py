"""Where the tokens of a step lie in a sequence that was kept with gaps.

vLLM knows of a request how many of its tokens are computed, and takes it that those are the first ones. A sequence of
which ``[d, m)`` was kept and ``[0, d)`` is computed together with what follows ``m`` has no such number (Pensieve,
section 4.4). It is given a virtual one: all kept tokens are counted as if they came first, so that the index of a
token among those that are computed runs on from there without a gap. From the end of the last kept range on virtual
and real positions are the same, and so is everything that vLLM derives from the count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    _virtual_starts: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """Virtual index at which the computed tokens before each kept range begin, and at last those behind all of them."""

    def __post_init__(self) -> None:
        last = -1
        for start, end in self.kept:
            if not last < start < end:
                raise ValueError(f"kept={self.kept!r}: must be ranges in order that do not touch each other")
            last = end
        if not self.kept or self.kept[-1][0] == 0:
            raise ValueError(f"kept={self.kept!r}: must leave a gap before the last range")
        starts, index, position = [], self.num_kept, 0
        for start, end in self.kept:
            starts.append(index)
            index += start - position
            position = end
        object.__setattr__(self, "_virtual_starts", (*starts, index))

    @property
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
        if index < self.num_kept:
            raise ValueError(f"index={index!r}: must be at least {self.num_kept}, the number of kept tokens")
        # Of several starts alike, the ranges between them have nothing before them: the last one counts.
        number = bisect_right(self._virtual_starts, index) - 1
        after = self.kept[number - 1][1] if number else 0
        return after + index - self._virtual_starts[number]

    def room(self, index: int) -> int | None:
        """Return how many tokens are computed from a virtual index on before a kept range; None: none is ahead.

        Raises:
            ValueError: as `position`.
        """
        start = self.position(index)
        return next((kept - start for kept, _ in self.kept if kept > start), None)

    def num_ahead(self, index: int) -> int:
        """Return how many kept ranges begin behind the token of a virtual index: so many gaps are still to be computed.

        Raises:
            ValueError: as `position`.
        """
        position = self.position(index)
        return sum(start > position for start, _ in self.kept)

    def spans(self, index: int, num_tokens: int) -> Iterator[Span]:
        """Yield where so many tokens lie that are computed from a virtual index on.

        Raises:
            ValueError: as `position`.
        """
        while num_tokens > 0:
            start = self.position(index)
            room = self.room(index)
            length = num_tokens if room is None else min(room, num_tokens)
            yield Span(start, start + length)
            index += length
            num_tokens -= length


def layouts_of(output: Any) -> Mapping[str, GapLayout]:
    """Return the layouts that a step carries, whoever they are for."""
    return getattr(output, ATTRIBUTE, None) or {}


def kept_ranges(kept_blocks: Sequence[tuple[int, int]], block_size: int) -> tuple[tuple[int, int], ...]:
    """Return ranges of blocks as ranges of tokens, those that touch each other as one.

    Args:
        kept_blocks: Ranges ``(start, end)`` in order.
        block_size: Tokens of a block.
    """
    ranges: list[tuple[int, int]] = []
    for first, behind in kept_blocks:
        if ranges and ranges[-1][1] == first * block_size:
            ranges[-1] = (ranges[-1][0], behind * block_size)
        else:
            ranges.append((first * block_size, behind * block_size))
    return tuple(ranges)
