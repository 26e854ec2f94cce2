"""Length history: the distribution of what recently finished requests generated, by prompt length and tag."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vllm_ext.contract.length_distribution import CELLS, LengthDistribution, cells

if TYPE_CHECKING:
    from vllm_ext.prediction.query import LengthQuery

_SHRINKAGE = 8
"""Observations at which the distribution of a kind weighs as much as that of all."""
_MAX_TAGS = 64
"""Clients choose tags: a bound on what they can make us keep."""


class Window:
    """The last ``size`` lengths, kept sorted beside their order of arrival."""

    def __init__(self, size: int) -> None:
        self._order: deque[int] = deque(maxlen=size)
        self._sorted: list[int] = []
        self._array: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, length: int) -> None:
        """Take a length in; the oldest goes when the window is full. Cost: a move within the window."""
        if len(self._order) == self._order.maxlen:
            del self._sorted[bisect_left(self._sorted, self._order[0])]
        self._order.append(length)
        insort(self._sorted, length)
        self._array = None

    def ascending(self) -> npt.NDArray[np.int64]:
        """Return the lengths in ascending order, shape [at most ``size`` of the window]; not to be changed."""
        if self._array is None:
            self._array = np.array(self._sorted, dtype=np.int64)
        return self._array

    def longer(self, length: int) -> int:
        """Return how many lengths exceed ``length``."""
        return len(self._sorted) - bisect_right(self._sorted, length)

    def quantile(self, q: float, beyond: int = 0) -> float:
        """Return the q-quantile of the lengths above ``beyond``, interpolated linearly; there must be one."""
        first = bisect_right(self._sorted, beyond)
        position = first + q * (len(self._sorted) - 1 - first)
        low = int(position)
        high = min(low + 1, len(self._sorted) - 1)
        return self._sorted[low] + (position - low) * (self._sorted[high] - self._sorted[low])


class _Lengths:
    """The distribution of the last ``size`` lengths."""

    def __init__(self, size: int) -> None:
        self._cells: deque[int] = deque(maxlen=size)
        self._counts = np.zeros(CELLS)
        self._distribution: LengthDistribution | None = None

    def __len__(self) -> int:
        return len(self._cells)

    def add(self, length: int) -> None:
        if len(self._cells) == self._cells.maxlen:
            self._counts[self._cells[0]] -= 1
        cell = int(cells(length))
        self._cells.append(cell)
        self._counts[cell] += 1
        self._distribution = None

    @property
    def distribution(self) -> LengthDistribution:
        if self._distribution is None:
            self._distribution = LengthDistribution(self._counts)
        return self._distribution


class LengthHistory:
    """The distribution of recent output lengths of requests with prompts of like length, or of the same tag.

    Prompts fall into buckets by powers of two. A bucket with n observations has the share n / (n + 8) of it, all
    requests have the rest, so that a rare prompt length does not follow its few examples blindly. A tag has its share
    of that in the same way. Of tags, the 64 that finished something last are held.

    Source: Past-Future keeps such a window (its default is 1000 requests); buckets and tags are ours.
    """

    name = "history"

    def __init__(self, window: int) -> None:
        self._window = window
        self._all = _Lengths(window)
        self._buckets: dict[int, _Lengths] = {}
        self._tags: OrderedDict[str, _Lengths] = OrderedDict()

    def predict(self, query: LengthQuery) -> LengthDistribution | None:
        """Return the distribution of the output length, or None before anything finished."""
        if not len(self._all):
            return None
        distribution = self._all.distribution
        bucket = self._buckets.get(query.num_prompt_tokens.bit_length())
        tagged = None if query.tag is None else self._tags.get(query.tag)
        for kind in (bucket, tagged):
            if kind is not None:
                distribution = distribution.mixed(kind.distribution, len(kind) / (len(kind) + _SHRINKAGE))
        return distribution

    def observe(self, query: LengthQuery, output_tokens: int) -> None:
        """Remember the output length of a finished request; the oldest one leaves a full window."""
        self._all.add(output_tokens)
        key = query.num_prompt_tokens.bit_length()
        self._buckets.setdefault(key, _Lengths(self._window)).add(output_tokens)
        if query.tag is not None:
            self._tags.setdefault(query.tag, _Lengths(self._window)).add(output_tokens)
            self._tags.move_to_end(query.tag)
            if len(self._tags) > _MAX_TAGS:
                self._tags.popitem(last=False)
