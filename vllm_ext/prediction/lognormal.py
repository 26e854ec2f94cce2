"""Log-normal output lengths: the distribution through a median and a P90, and its quantiles beyond a length."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

_STANDARD = NormalDist()
_Z90 = _STANDARD.inv_cdf(0.9)
_FAR = 30.0
"""Standard scores beyond which the tail is taken from its expansion, as its probability would underflow at 38."""

MIN_SIGMA = 0.5
"""Least spread of the log length. A P90 near the median says how sure a predictor was, not how wrong it can be: with no
spread, a request that outlived it would be said to end with the next token, again and again. On Alpaca, ShareGPT and
Dolly 0.1 to 0.5 are alike for the decoder's estimates, 0.8 overestimates what remains."""


class LogNormal(NamedTuple):
    """ln L ~ Normal(mu, sigma), L in tokens."""

    mu: float
    sigma: float
    """Greater than 0."""

    @classmethod
    def through(cls, p50: float, p90: float, min_sigma: float = MIN_SIGMA) -> LogNormal:
        """Return the distribution with these quantiles (tokens, 0 < p50 <= p90): mu = ln p50, sigma = ln(p90/p50)/z90.

        z90 = 1.2816. The spread is at least ``min_sigma``, above 0; P90 is larger than asked for then.
        """
        return cls(math.log(p50), max(math.log(p90 / p50) / _Z90, min_sigma))

    def survival(self, length: float) -> float:
        """Return P(L > length); 0 where it underflows."""
        if length <= 0:
            return 1.0
        return 0.5 * math.erfc((math.log(length) - self.mu) / self.sigma / math.sqrt(2))

    def length_at(self, survival: float) -> float:
        """Return the length that a share ``survival`` (above 0, below 1) of requests exceeds, in tokens."""
        return math.exp(self.mu - self.sigma * _STANDARD.inv_cdf(survival))

    def quantile_beyond(self, q: float, generated: float) -> float:
        """Return the q-quantile of L given L > generated, in tokens; 0 < q < 1.

            exp(mu - sigma * Phi^-1((1 - q) * P(L > generated)))

        Far in the tail, where that probability underflows, the standard score z' of the answer follows from
        ln P(Z > z) = -z^2/2 - ln z + constant: z'^2 = z^2 + 2 (ln(1 / (1 - q)) - ln(z' / z)).
        """
        if generated <= 0:
            return self.length_at(1 - q)
        z = (math.log(generated) - self.mu) / self.sigma
        if z <= _FAR:
            return self.length_at((1 - q) * self.survival(generated))
        further = z
        for _ in range(3):
            further = math.sqrt(z * z - 2 * (math.log1p(-q) + math.log(further / z)))
        return math.exp(self.mu + self.sigma * further)
