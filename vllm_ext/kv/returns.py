"""How likely a conversation comes back after so many turns, learned from those that did."""

from __future__ import annotations

_TURNS = (1, 2, 4, 8)
"""First turn counts of the classes: 1, 2 to 3, 4 to 7, and 8 or more."""
_PRIOR = 20.0
"""Conversations that a class is taken to have seen before it saw any, as many returning as overall."""
_MEMORY = 5000.0
"""Ended turns after which one counts half."""
_BOUNDS = (0.1, 10.0)


def turn_class(turns: int) -> int:
    """Return the class of a conversation that has had so many turns, from 0."""
    return sum(turns >= first for first in _TURNS[1:])


NUM_TURN_CLASSES = len(_TURNS)


class ReturnModel:
    """Shares of conversations that returned, by turns so far.

    Ours: Pensieve (section 4.3.1) takes the time since the last use alone, which treats a conversation's first turn
    like its tenth. Of real conversations many have a single turn, and those that have had several mostly go on. Who
    returns later than now counts as gone until then: that lowers all classes alike, and only their ratios are used.
    """

    def __init__(self) -> None:
        self._ended = [0.0] * NUM_TURN_CLASSES
        self._returned = [0.0] * NUM_TURN_CLASSES

    def ended(self, turns: int) -> None:
        """Note that a conversation's turn ended; it has had so many."""
        kept = 0.5 ** (1 / _MEMORY)
        self._ended = [count * kept for count in self._ended]
        self._returned = [count * kept for count in self._returned]
        self._ended[turn_class(turns)] += 1

    def returned(self, turns: int) -> None:
        """Note that a conversation came back that had had so many turns."""
        self._returned[turn_class(turns)] += 1

    def probability(self, number: int) -> float:
        """Return the share of a class that came back, from 0 to 1."""
        overall = (sum(self._returned) + 1.0) / (sum(self._ended) + 2.0)
        share = (self._returned[number] + _PRIOR * overall) / (self._ended[number] + _PRIOR)
        return min(share, 1.0)

    def factor(self, number: int) -> float:
        """Return how much more likely a class is to come back than conversations are overall."""
        overall = (sum(self._returned) + 1.0) / (sum(self._ended) + 2.0)
        low, high = _BOUNDS
        return min(max(self.probability(number) / overall, low), high)
