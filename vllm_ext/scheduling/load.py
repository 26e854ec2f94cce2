"""How loaded an engine is, and who pays for its order: what an operator looks at before changing it."""

from __future__ import annotations

import math

_WINDOW_S = 120.0
"""Time over which shares are averaged."""
_GENERATION_S = 150.0
"""Longest waits are those of the last one to two generations."""


class Load:
    """Shares of the last minutes: with somebody waiting, and of KV memory in use.

    A share of waiting near 0 is a server that no order can make faster; near 1, one that is saturated.
    """

    def __init__(self) -> None:
        self.waiting_share = self.kv_share = 0.0
        self._at = -math.inf

    def stepped(self, now: float, *, waiting: bool, kv_used: float) -> None:
        """Note a scheduled step.

        Args:
            now: Clock time, s. What the step says holds since the one before, a pause between them included.
            waiting: Whether anybody waits who did not join.
            kv_used: Share of the KV blocks in use.
        """
        passed_s, self._at = now - self._at, now
        weight = -math.expm1(-passed_s / _WINDOW_S)
        self.waiting_share += weight * (waiting - self.waiting_share)
        self.kv_share += weight * (kv_used - self.kv_share)

    def state(self) -> dict[str, float]:
        """Return both, fit for JSON."""
        return {"waiting_share": self.waiting_share, "kv_share": self.kv_share}


class LongestWaits:
    """The longest time from arrival to admission, by level, among those admitted in the last minutes."""

    def __init__(self) -> None:
        self._new: dict[int, float] = {}
        self._old: dict[int, float] = {}
        self._since = -math.inf

    def admitted(self, level: int, waited_s: float, now: float) -> None:
        """Note that a request of a level joins at clock time ``now`` (s)."""
        self._turn(now)
        if waited_s > self._new.get(level, 0.0):
            self._new[level] = waited_s

    def state(self, now: float) -> dict[str, float]:
        """Return seconds by level, fit for JSON."""
        self._turn(now)
        return {
            str(level): max(self._new.get(level, 0.0), self._old.get(level, 0.0))
            for level in sorted({*self._new, *self._old})
        }

    def _turn(self, now: float) -> None:
        if now - self._since >= _GENERATION_S:
            self._old = self._new if now - self._since < 2 * _GENERATION_S else {}
            self._new, self._since = {}, now
