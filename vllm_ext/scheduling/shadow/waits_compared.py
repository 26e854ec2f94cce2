"""Waits as they were beside waits as they would have been, summed up."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

SAME_S = 0.1
"""Difference of two waits, in seconds, below which they count as the same."""
_LEAST_S, _TIMES = 0.01, 1.05
"""Upper bound of the first bucket of waits, in seconds, and the times by which each is above the one before."""


@dataclass(slots=True)
class Waits:
    """Sum, largest and quantiles of waits in seconds; quantiles are exact to 5 %."""

    total_s: float = 0.0
    longest_s: float = 0.0
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, wait_s: float) -> None:
        """Add a wait."""
        self.total_s += wait_s
        self.longest_s = max(self.longest_s, wait_s)
        self.buckets[math.ceil(math.log(max(wait_s / _LEAST_S, 1.0), _TIMES))] += 1

    def quantile(self, share: float) -> float:
        """Return the least wait, in seconds, that so large a share of all did not exceed."""
        left = share * self.buckets.total()
        for bucket, number in sorted(self.buckets.items()):
            left -= number
            if left <= 0:
                return min(_LEAST_S * _TIMES**bucket, self.longest_s)
        return self.longest_s


@dataclass(slots=True)
class WaitsCompared:
    """Waits of the same requests in two orders."""

    real: Waits = field(default_factory=Waits)
    shadow: Waits = field(default_factory=Waits)
    service_s: float = 0.0
    """From first step to end, in seconds: the same in both."""
    outcomes: dict[str, int] = field(default_factory=lambda: {"sooner": 0, "same": 0, "later": 0})
    """Requests by when they would have started."""

    @property
    def requests(self) -> int:
        """Requests that were compared."""
        return sum(self.outcomes.values())

    def add(self, real_s: float, shadow_s: float, service_s: float) -> None:
        """Add a request by its two waits and its service, in seconds."""
        self.real.add(real_s)
        self.shadow.add(shadow_s)
        self.service_s += service_s
        later_s = shadow_s - real_s
        self.outcomes["same" if abs(later_s) < SAME_S else "later" if later_s > 0 else "sooner"] += 1

    def __str__(self) -> str:
        """Say in one line what the other order would have changed."""
        count = self.requests
        if max(self.real.longest_s, self.shadow.longest_s) < SAME_S:
            return f"{count:,} requests, nobody waited: no order would change anything"
        real_s, shadow_s = self.real.total_s / count, self.shadow.total_s / count
        change = 1 - shadow_s / real_s if real_s else 0.0
        return (
            f"{count:,} requests, mean wait {real_s:.2f} s, it would have been {shadow_s:.2f} s "
            f"({abs(change):.0%} {'higher' if change < 0 else 'lower'}); "
            f"P99 {self.real.quantile(0.99):.3g} s -> {self.shadow.quantile(0.99):.3g} s, "
            f"longest {self.real.longest_s:.3g} s -> {self.shadow.longest_s:.3g} s; "
            f"{self.outcomes['later'] / count:.0%} of the requests would have waited longer"
        )
