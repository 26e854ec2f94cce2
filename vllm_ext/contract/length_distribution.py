"""The distribution of an output length: probabilities on some 80 cells of tokens, exact below 8 and a fifth wide above.

Predictions, the history and what a client says are all one shape, so that an order may ask for what it needs: a
quantile, what remains after so many tokens, a moment. Nine quantiles of it go from process to process.

Pure: numpy, and no vLLM, torch or clock.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

LEVELS = (0.02, 0.1, 0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Of the nine quantiles that stand for a distribution in messages."""
_FINE = 8
_PER_OCTAVE = 4
_OCTAVES = range(3, 20)
EDGES: npt.NDArray[np.int64] = np.unique(
    [
        *range(_FINE + 1),
        *(round(2 ** (octave + part / _PER_OCTAVE)) for octave in _OCTAVES for part in range(1, _PER_OCTAVE + 1)),
    ]
)
"""Bounds of the cells, in tokens, [CELLS + 1]: cell i holds the lengths above ``EDGES[i]``, up to ``EDGES[i + 1]``."""
CELLS = len(EDGES) - 1
LONGEST = int(EDGES[-1])
"""What is longer counts as that long, in tokens."""
_LOG_ROUNDED: list[float] = np.log(EDGES[1:-1] + 0.5).tolist()
_NOTHING = 1e-9
"""Probability below which nobody is left, and rounding of sums."""


class LengthDistribution:
    """Probability of an output length of 1, 2, ... tokens; uniform within a cell.

    Not to be changed once made.
    """

    def __init__(self, mass: Floats, edges: npt.NDArray[np.int64] = EDGES, most: int = LONGEST) -> None:
        """Take probabilities.

        Args:
            mass: By cell, [n]; none below 0, the sum above 0. Scaled to sum to 1.
            edges: Bounds of the cells in tokens, [n + 1], ascending; those that all share, but for exact ones.
            most: Bound on the length, in tokens: quantiles stop there, within the cell as well.

        Raises:
            ValueError: ``mass`` is no such thing.
        """
        total = float(mass.sum())
        if mass.shape != (len(edges) - 1,) or not (0 < total < math.inf) or mass.min() < 0:
            raise ValueError(f"mass={mass!r}: must be {len(edges) - 1} numbers of at least 0 with a finite sum above 0")
        self.mass: Floats = mass / total
        self.edges = edges
        self.most = most
        self._stopped = 0.0
        """Probability of exactly ``most``: of those that the bound stops."""
        self._known: dict[float, int] = {}
        """Quantiles that it was made of: these are exact, whatever the cells."""

    # --- made of ----------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, lengths: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> LengthDistribution:
        """Return the distribution of observed lengths, in tokens, [n], n >= 1, of equal weight if none is given."""
        return cls(np.bincount(cells(lengths), weights, minlength=CELLS).astype(np.float64))

    @classmethod
    def exact(cls, lengths: npt.ArrayLike, weights: npt.ArrayLike | None = None) -> LengthDistribution:
        """Return the distribution of a few observed lengths as they are, on cells of its own; arguments as of `of`."""
        whole = np.clip(np.asarray(lengths, dtype=np.int64), 1, LONGEST)
        edges = np.unique(np.concatenate((whole - 1, whole)))
        mass = np.bincount(np.searchsorted(edges, whole) - 1, weights, minlength=len(edges) - 1)
        return cls(mass.astype(np.float64), edges)

    @classmethod
    def point(cls, tokens: int) -> LengthDistribution:
        """Return the distribution of somebody who is sure."""
        return cls(np.ones(1), np.array([tokens - 1, tokens], dtype=np.int64))

    @classmethod
    def lognormal(cls, mu: float, sigma: float) -> LengthDistribution:
        """Return the distribution of exp(mu + sigma * x), x standard normal; sigma > 0, in nats.

        A length is rounded to the nearest token, to 1 at least.
        """
        scale = math.sqrt(2) * sigma
        reached = [0.5 + 0.5 * math.erf((x - mu) / scale) for x in _LOG_ROUNDED]
        return cls(np.diff(reached, prepend=0.0, append=1.0))

    @classmethod
    def through(cls, quantiles: Sequence[int]) -> LengthDistribution:
        """Return a distribution with these quantiles at `LEVELS`, in tokens, ascending, the least at least 1.

        Log-linear between them. The ends go on as far, in ratio, as the outermost two are apart.

        Raises:
            ValueError: they are no such thing.
        """
        if (
            len(quantiles) != len(LEVELS)
            or not all(isinstance(tokens, int) for tokens in quantiles)
            or quantiles[0] < 1
            or any(low > high for low, high in itertools.pairwise(quantiles))
        ):
            raise ValueError(f"quantiles={quantiles!r}: must be {len(LEVELS)} ascending whole numbers of tokens from 1")
        if quantiles[0] == quantiles[-1]:
            return cls.point(quantiles[0])
        at = [min(quantiles[0] - 1, quantiles[0] ** 2 / quantiles[1])]
        levels = [0.0]
        for tokens, level in zip(quantiles, LEVELS, strict=True):
            if tokens > at[-1]:
                at.append(tokens)
                levels.append(level)
            else:  # a step: up to the token before, no more than the first of the equals says
                if len(at) > 1 and at[-2] < tokens - 1:
                    at.insert(-1, tokens - 1)
                    levels.insert(-1, levels[-1])
                levels[-1] = level
        if (highest := quantiles[-1] ** 2 / quantiles[-2]) > at[-1]:
            at.append(highest)
            levels.append(1.0)
        reached = np.interp(_log(EDGES), _log(at), levels)
        reached[0], reached[-1] = 0.0, 1.0
        distribution = cls(np.diff(reached))
        distribution._known = dict(zip(LEVELS, quantiles, strict=True))
        return distribution

    def mixed(self, other: LengthDistribution, weight: float) -> LengthDistribution:
        """Return that of a choice: ``other`` with probability ``weight``, else this one; on the cells of both."""
        if np.array_equal(self.edges, other.edges):
            return LengthDistribution((1 - weight) * self.mass + weight * other.mass, self.edges)
        edges = np.union1d(self.edges, other.edges)
        mine, theirs = (
            np.diff(np.interp(edges, distribution.edges, distribution._reached)) for distribution in (self, other)
        )
        return LengthDistribution((1 - weight) * mine + weight * theirs, edges)

    def capped(self, max_tokens: int) -> LengthDistribution:
        """Return the distribution of those that are stopped at ``max_tokens`` at the latest; at least 1."""
        if max_tokens >= self.most or self.survival(max_tokens) <= 0:
            return self
        if len(self.mass) == 1:
            return LengthDistribution.point(max_tokens)
        at = int(np.searchsorted(self.edges, max_tokens)) - 1
        if at < 0:  # all are longer
            return LengthDistribution.point(max_tokens)
        mass = self.mass.copy()
        mass[at] += mass[at + 1 :].sum()
        mass[at + 1 :] = 0
        capped = LengthDistribution(mass, self.edges, most=max_tokens)
        capped._stopped = self.survival(max_tokens)
        capped._known = self._known
        return capped

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LengthDistribution):
            return NotImplemented
        same = self.most == other.most and self._stopped == other._stopped and self._known == other._known
        return same and np.array_equal(self.edges, other.edges) and np.array_equal(self.mass, other.mass)

    def __hash__(self) -> int:
        return hash((self.most, self.mass.tobytes()))

    # --- asked for --------------------------------------------------------------------------------------------------

    @cached_property
    def _reached(self) -> Floats:
        """P(length <= edge), [n + 1]."""
        return np.concatenate(([0.0], np.minimum(np.cumsum(self.mass), 1.0)))

    @cached_property
    def _beyond(self) -> Floats:
        """Expected tokens generated beyond an edge, [n + 1]: the integral of the survival."""
        left = 1 - self._reached
        tokens = np.diff(self.edges) * (left[:-1] + left[1:]) / 2
        return np.concatenate((np.cumsum(tokens[::-1])[::-1], [0.0]))

    def survival(self, tokens: float) -> float:
        """Return P(length > ``tokens``)."""
        if tokens >= self.most:
            return 0.0
        left = 1 - float(np.interp(tokens, self.edges, self._reached))
        return left if left > _NOTHING else 0.0

    def quantile(self, q: float, beyond: int = 0) -> int:
        """Return the least length that a share ``q`` of those longer than ``beyond`` does not exceed, in tokens.

        Where none is longer, twice ``beyond``: ALISE, section 3.1, doubles an estimate that was outlived.

        Args:
            q: 0 to 1.
            beyond: Tokens generated so far.
        """
        if not beyond and q in self._known:
            return min(self._known[q], self.most)
        left = self.survival(beyond)
        if left <= 0:
            return 2 * beyond
        reached = 1 - left * (1 - q)
        if self._stopped and reached > 1 - self._stopped:
            return self.most
        at = int(np.searchsorted(self._reached, reached - _NOTHING))
        if at == 0:
            return beyond + 1
        low, high = self._reached[at - 1], self._reached[min(at, len(self.mass))]
        start, width = self.edges[at - 1], self.edges[at] - self.edges[at - 1]
        share = (reached - low) / (high - low) if high > low else 1.0
        tokens = math.ceil(float(start + share * width) - 1e-6)
        return min(max(beyond + 1, tokens), self.most)

    @cached_property
    def p50(self) -> int:
        """The median, in tokens."""
        return self.quantile(0.5)

    @cached_property
    def p90(self) -> int:
        """What nine in ten do not exceed, in tokens."""
        return self.quantile(0.9)

    def quantiles(self) -> tuple[int, ...]:
        """Return the nine at `LEVELS`, in tokens."""
        return tuple(self.quantile(level) for level in LEVELS)

    def remaining(self, generated: int) -> float:
        """Return E[length - generated | length > generated], in tokens; ``generated`` where none is longer."""
        left = self.survival(generated)
        if left <= 0:
            return float(max(generated, 1))
        at = min(int(np.searchsorted(self.edges, generated, side="right")), len(self.mass))
        part = (self.edges[at] - generated) * (left + 1 - self._reached[at]) / 2
        # Lengths are whole: the integral of a survival that falls in steps lies half a token above.
        return max(1.0, float(part + self._beyond[at]) / left + 0.5)

    def moment(self, power: float) -> float:
        """Return E[length ** power], in tokens ** power."""
        return float(self.mass @ _powers(self.edges.tobytes(), power))

    def gittins(self, generated: int) -> float:
        """Return the Gittins index of one that generated so much, in 1 / tokens: the greater, the sooner it should go.

        The greatest ratio, over all places to stop at, of the probability to end by then to the expected tokens until
        then. 1 / ``generated`` where none is longer.

        Source: Gittins (1979); for queues with unknown sizes Aalto, Ayesta and Righter (2009).
        """
        left = self.survival(generated)
        if left <= 0:
            return 1 / max(generated, 1)
        at = int(np.searchsorted(self.edges, generated, side="right"))
        ended = left - (1 - self._reached[at:])
        part = (self.edges[at] - generated) * (left + 1 - self._reached[at]) / 2
        tokens = part + self._beyond[at] - self._beyond[at:]
        return float(np.max(ended / np.maximum(tokens + ended / 2, _NOTHING)))


class Prediction(NamedTuple):
    """An answer to how long an output becomes, and who gave it."""

    distribution: LengthDistribution
    source: str
    neighbours: int = 0
    """Finished requests that were looked at."""
    similarity: float = math.nan
    """Cosine similarity of the nearest of them; NaN where there is none."""
    beside: str = ""
    """Of a client's hint that was weighed: the source it was weighed with."""

    @property
    def tokens(self) -> int:
        """The median, in tokens."""
        return self.distribution.p50

    @property
    def p90(self) -> int:
        """What nine in ten do not exceed, in tokens; at least the median."""
        return self.distribution.p90


def cells(lengths: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Return the cell of each length, in tokens, at least 1; [n] or a scalar, as given."""
    return np.clip(np.searchsorted(EDGES, lengths) - 1, 0, CELLS - 1)


def _log(tokens: npt.ArrayLike) -> Floats:
    logs: Floats = np.log(np.maximum(np.asarray(tokens, dtype=np.float64), 0.5))
    return logs


@lru_cache(maxsize=256)
def _powers(edges: bytes, power: float) -> Floats:
    """Return the mean of length ** power over each cell, [n]."""
    bounds = np.frombuffer(edges, dtype=np.int64).astype(np.float64)
    low, high = bounds[:-1] + 0.5, bounds[1:] + 0.5
    if power == -1:
        mean = np.log(high / low) / (high - low)
    else:
        mean = (high ** (power + 1) - low ** (power + 1)) / ((power + 1) * (high - low))
    single = np.diff(bounds) == 1
    mean[single] = bounds[1:][single] ** power
    return mean
