"""Length distribution of Past-Future: what recently finished requests generated, to be sampled from every step.

numpy only: the scheduler's process imports this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


class LengthDistribution:
    """Output lengths of the last ``window`` finished requests, P(l) = count(l) / observations (eq. 1).

    At the start the window holds ``start_size`` requests that generated ``start_tokens`` (the server's
    ``max_new_tokens``), so that a scheduler that knows nothing yet is careful. They are the oldest: each leaves when
    the window is full and a request finishes.

    An update costs O(log n) comparisons and moves at most 8 n bytes within the sorted window (8 kB by default), so that
    sampling needs no further work. Not thread-safe. Every sampling method draws exactly one number per request.

    Source: Past-Future, section 3.1, eq. 1; window 1000 as in its section 4. The paper starts from the preset maximum
    and leaves open with how many entries; half a window is our choice.
    """

    def __init__(self, start_tokens: int, *, window: int = 1000, start_size: int | None = None) -> None:
        """Start from what a server knows before anything finished.

        Args:
            start_tokens: Longest output the server allows, in tokens.
            window: Requests remembered.
            start_size: Entries of ``start_tokens`` at the start, 1 to ``window``; None for half a window.

        Raises:
            ValueError: an argument is out of its range.
        """
        if window < 1:
            raise ValueError(f"window={window!r}: must be at least 1")
        size = (window + 1) // 2 if start_size is None else start_size
        if not 1 <= size <= window:
            raise ValueError(f"start_size={start_size!r}: must be 1 to window={window}")
        self.start_tokens = _checked("start_tokens", start_tokens)
        self.window = window
        self.num_observed = 0
        """Requests observed since the start, those that left the window included."""
        self._recent: Lengths = np.full(window, start_tokens, dtype=np.int64)  # a ring in order of arrival
        self._sorted: Lengths = np.full(window, start_tokens, dtype=np.int64)  # the first `size` entries count
        self._size = size
        self._next = size % window

    def __len__(self) -> int:
        """Return how many lengths the window holds, those of the start included."""
        return self._size

    def observe(self, length: int) -> None:
        """Remember the output length of a finished request, in tokens; the oldest leaves a full window.

        Raises:
            ValueError: the length is below 1; nothing is changed.
        """
        _checked("length", length)
        held = self._sorted
        place = int(held[: self._size].searchsorted(length, side="right"))
        if self._size < self.window:
            held[place + 1 : self._size + 1] = held[place : self._size]
            held[place] = length
            self._size += 1
        else:
            gone = int(held.searchsorted(self._recent[self._next]))
            if gone < place:
                held[gone : place - 1] = held[gone + 1 : place]
                held[place - 1] = length
            else:
                held[place + 1 : gone + 1] = held[place:gone]
                held[place] = length
        self._recent[self._next] = length
        self._next = (self._next + 1) % self.window
        self.num_observed += 1

    def recent(self) -> Lengths:
        """Return the observed lengths in the window, oldest first, shape [n]; those of the start are left out.

        A new distribution of the same options that observes them in order holds the same window.
        """
        count = min(self.num_observed, self.window)
        kept: Lengths = self._recent[(self._next + np.arange(-count, 0)) % self.window]
        return kept

    def probabilities(self) -> tuple[Lengths, npt.NDArray[np.float64]]:
        """Return the distinct lengths, ascending, and P(l) of each, both of shape [m] (eq. 1)."""
        lengths, counts = np.unique(self._sorted[: self._size], return_counts=True)
        return lengths, counts / self._size

    def quantile(self, q: float, generated: int = 0) -> int:
        """Return the smallest l with P(L <= l | L > generated) >= q, in tokens; beyond the window, `start_tokens`.

        Raises:
            ValueError: q is not within 0 to 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q={q!r}: must be 0 to 1")
        return int(self._pick(np.array([generated]), np.array([q]), None, upper=False)[0])

    def sample(self, rng: np.random.Generator, size: int, bounds: npt.ArrayLike | None = None) -> Lengths:
        """Draw a length from P(l) for each of ``size`` requests that have not begun; shape [size], in tokens.

        Args:
            rng: Source of chance; ``size`` numbers are drawn.
            size: Number of requests.
            bounds: What no sample may exceed (``max_tokens``): [size] or one for all.
        """
        return self._pick(np.zeros(size, dtype=np.int64), rng.random(size), bounds)

    def sample_beyond(
        self, rng: np.random.Generator, generated: npt.ArrayLike, bounds: npt.ArrayLike | None = None
    ) -> Lengths:
        """Draw a length from P(l | l > generated) for each running request; shape [n], in tokens.

        A request that outlived the whole window gets its bound, or `start_tokens` where no bounds are given: the only
        length known to be enough. A sample is at most the bound, and always at least ``generated + 1``, even where that
        exceeds the bound.

        Args:
            rng: Source of chance; n numbers are drawn.
            generated: Tokens generated so far, [n].
            bounds: ``max_tokens`` of the requests: [n] or one for all.

        Source: Past-Future, Algorithm 1.
        """
        beyond = np.asarray(generated, dtype=np.int64)
        return self._pick(beyond, rng.random(len(beyond)), bounds)

    def _pick(
        self, generated: Lengths, u: npt.NDArray[np.float64], bounds: npt.ArrayLike | None, *, upper: bool = True
    ) -> Lengths:
        """Return the lengths at ``u`` (0 to 1) of the part of the window above ``generated``; shapes [n].

        ``upper`` tells how u falls on a step of the distribution: True for u in [0, 1) drawn by chance, False for
        quantiles.
        """
        held = self._sorted[: self._size]
        first = held.searchsorted(generated, side="right")
        position = (self._size - first) * u
        # A product can be rounded up to the next whole number, hence the bounds on both sides.
        offset = np.floor(position) if upper else np.ceil(position - 1e-9) - 1
        index = np.clip(first + offset.astype(np.int64), first, self._size - 1)
        limit = self.start_tokens if bounds is None else np.asarray(bounds, dtype=np.int64)
        picked = np.where(first < self._size, held[index], limit)
        if bounds is not None:
            picked = np.minimum(picked, limit)
        beyond: Lengths = np.maximum(picked, generated + 1)
        return beyond


class TaggedLengthDistributions:
    """One `LengthDistribution` over everything, and one per tag (API key, tenant, ``tag`` hint) that was seen enough.

    At most ``max_tags`` tags are held; the one that finished nothing for longest goes first. Memory is about
    16 * window bytes per tag.
    """

    def __init__(self, start_tokens: int, *, window: int = 1000, max_tags: int = 64, min_observed: int = 100) -> None:
        """Start without tags.

        Args:
            start_tokens: As of `LengthDistribution`.
            window: Requests remembered, in all and per tag.
            max_tags: Tags held, at least 1.
            min_observed: Finished requests of a tag before its own distribution is used, at least 1.

        Raises:
            ValueError: an argument is out of its range.
        """
        if max_tags < 1:
            raise ValueError(f"max_tags={max_tags!r}: must be at least 1")
        if not 1 <= min_observed <= window:
            raise ValueError(f"min_observed={min_observed!r}: must be 1 to window={window}")
        self.overall = LengthDistribution(start_tokens, window=window)
        self._max_tags = max_tags
        self._min_observed = min_observed
        self._by_tag: OrderedDict[str, LengthDistribution] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of tags held."""
        return len(self._by_tag)

    def observe(self, length: int, tag: str | None = None) -> None:
        """Remember a finished request's output length (tokens) for all and, if it has one, for its tag.

        Raises:
            ValueError: the length is below 1; nothing is changed.
        """
        self.overall.observe(length)
        if tag is None:
            return
        held = self._by_tag.get(tag)
        if held is None:
            if len(self._by_tag) == self._max_tags:
                self._by_tag.popitem(last=False)
            # One entry of the start: by the time the tag is believed it weighs 1 in min_observed + 1.
            held = LengthDistribution(self.overall.start_tokens, window=self.overall.window, start_size=1)
            self._by_tag[tag] = held
        self._by_tag.move_to_end(tag)
        held.observe(length)

    def of(self, tag: str | None) -> LengthDistribution:
        """Return the tag's distribution, or the overall one for no tag, an unknown one or one seen too rarely."""
        held = None if tag is None else self._by_tag.get(tag)
        return self.overall if held is None or held.num_observed < self._min_observed else held


def observe_all(distribution: LengthDistribution, lengths: Iterable[int]) -> None:
    """Observe lengths in order, such as those that `LengthDistribution.recent` gave before a restart."""
    for length in lengths:
        distribution.observe(int(length))


def _checked(name: str, length: int) -> int:
    if length < 1:
        raise ValueError(f"{name}={length!r}: must be at least 1 token")
    return length
