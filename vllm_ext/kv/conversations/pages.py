"""Things by ascending number, from any number on: what a listing with cursors reads page by page."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import Generic, TypeVar

_T = TypeVar("_T")
_BLOCK = 256
"""Things in a block at most; also how many a page passes over at most before it begins."""


class Pages(Generic[_T]):
    """Blocks of things, of which empty ones are taken out: a page reads as many blocks as it has rows, at most.

    Adding and removing cost a search among the blocks. Numbers are added in ascending order.
    """

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._blocks: list[dict[int, _T]] = []

    def add(self, number: int, thing: _T) -> None:
        """Add a thing, whose number is greater than all there were."""
        if not self._blocks or len(self._blocks[-1]) == _BLOCK:
            self._firsts.append(number)
            self._blocks.append({})
        self._blocks[-1][number] = thing

    def remove(self, number: int) -> None:
        """Take a thing out.

        Raises:
            KeyError: It is not there.
        """
        place = max(0, bisect_right(self._firsts, number) - 1)
        if not self._blocks:
            raise KeyError(number)
        del self._blocks[place][number]
        if not self._blocks[place]:
            del self._firsts[place], self._blocks[place]

    def after(self, number: int) -> Iterator[tuple[int, _T]]:
        """Yield what has greater numbers, in their order; nothing may be added or removed meanwhile."""
        for block in islice(self._blocks, max(0, bisect_right(self._firsts, number) - 1), None):
            for found, thing in block.items():
                if found > number:
                    yield found, thing
