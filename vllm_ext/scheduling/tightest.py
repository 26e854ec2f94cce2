"""Knows the tightest objective of those who run, without asking them all."""

from __future__ import annotations


class Tightest:
    """A multiset of numbers that tells its smallest; members come and go."""

    def __init__(self) -> None:
        self._counts: dict[float, int] = {}
        self._smallest: float | None = None

    @property
    def smallest(self) -> float | None:
        """The smallest member; None if there is none."""
        return self._smallest

    def add(self, value: float | None) -> None:
        """Take a member in; None is passed over."""
        if value is None:
            return
        self._counts[value] = self._counts.get(value, 0) + 1
        if self._smallest is None or value < self._smallest:
            self._smallest = value

    def remove(self, value: float | None) -> None:
        """Let a member go; None is passed over.

        Raises:
            KeyError: it is no member.
        """
        if value is None:
            return
        left = self._counts[value] - 1
        if left:
            self._counts[value] = left
            return
        del self._counts[value]
        if value == self._smallest:  # rare, and there are at most as many values as seats
            self._smallest = min(self._counts, default=None)
