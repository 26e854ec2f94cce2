"""Length history: quantiles of what recently finished requests generated, by prompt length."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict, deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from vllm_ext.prediction.length import LengthQuery

_SHRINKAGE = 8
"""Observations at which a bucket's quantile weighs as much as the quantile over all buckets."""
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


class LengthHistory:
    """Predict a quantile of recent output lengths of requests with prompts of like length, or of the same tag.

    Prompts fall into buckets by powers of two. A bucket with n observations is trusted n / (n + 8), the rest of the
    weight goes to the quantile over all buckets, so that a rare prompt length does not follow its few examples blindly.
    A tag's window is trusted over that in the same way. Of tags, the 64 that finished something last are held.

    Source: Past-Future keeps such a window (its default is 1000 requests); buckets and tags are ours.
    """

    name = "history"

    def __init__(self, window: int, quantile: float) -> None:
        self._window = window
        self._quantile = quantile
        self._all = Window(window)
        self._buckets: dict[int, Window] = {}
        self._tags: OrderedDict[str, Window] = OrderedDict()

    def predict(self, query: LengthQuery) -> int | None:
        """Return the predicted output length in tokens, or None before anything finished."""
        if not len(self._all):
            return None
        predicted = self._all.quantile(self._quantile)
        for window in self._special(query):
            weight = len(window) / (len(window) + _SHRINKAGE)
            predicted = weight * window.quantile(self._quantile) + (1 - weight) * predicted
        return round(predicted)

    def beyond(self, query: LengthQuery, generated: int) -> int | None:
        """Return the median of the lengths above ``generated``, or None if there is none: P(l | l > generated).

        Taken from the tag, else from like prompts, where enough of them were as long, else from all.

        Source: Past-Future, Algorithm 1, for the condition.
        """
        for window in reversed(self._special(query)):
            if window.longer(generated) >= _SHRINKAGE:
                return round(window.quantile(0.5, generated))
        return round(self._all.quantile(0.5, generated)) if self._all.longer(generated) else None

    def observe(self, query: LengthQuery, output_tokens: int) -> None:
        """Remember the output length of a finished request; the oldest one leaves a full window."""
        self._all.add(output_tokens)
        key = query.num_prompt_tokens.bit_length()
        self._buckets.setdefault(key, Window(self._window)).add(output_tokens)
        if query.tag is not None:
            self._tags.setdefault(query.tag, Window(self._window)).add(output_tokens)
            self._tags.move_to_end(query.tag)
            if len(self._tags) > _MAX_TAGS:
                self._tags.popitem(last=False)

    def _special(self, query: LengthQuery) -> list[Window]:
        """The windows of the request's kind, the more telling one last; none of them is empty."""
        bucket = self._buckets.get(query.num_prompt_tokens.bit_length())
        tagged = None if query.tag is None else self._tags.get(query.tag)
        return [window for window in (bucket, tagged) if window is not None]
