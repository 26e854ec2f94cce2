"""How many conversations come back after so many turns, learned from those that did."""

from __future__ import annotations

from collections.abc import Callable

from vllm_ext.config.kv_tier import BY_AGE
from vllm_ext.kv.eviction.worth import LEAST_AGE_S

NUM_TURN_CLASSES = 6
"""1 turn, 2 to 3, 4 to 7, ..., and 32 or more."""
_PRIOR = 20.0
"""Conversations of each class that are taken to have come back before any was seen."""
_MEMORY = 5000.0
"""Ended turns after which one counts half."""


def turn_class(turns: int) -> int:
    """Return the class of a conversation that has had so many turns, from 0."""
    return min(max(turns, 1).bit_length(), NUM_TURN_CLASSES) - 1


def by_age(_: int, after_s: float) -> float:
    """Return 1 / time, whatever the turns so far."""
    return 1.0 / max(after_s, LEAST_AGE_S)


class ReturnModel:
    """Shares of conversations that come back, by turns so far.

    Who ended a turn a moment ago and has not had the time counts as one that did not, which lowers all shares by a
    little.
    """

    def __init__(self) -> None:
        self._ended = [0.0] * NUM_TURN_CLASSES
        self._returned = [0.0] * NUM_TURN_CLASSES

    def ended(self, turns: int) -> None:
        """Note that a conversation's turn ended; it has had so many."""
        kept = 0.5 ** (1 / _MEMORY)
        self._ended = [kept * count for count in self._ended]
        self._returned = [kept * count for count in self._returned]
        self._ended[turn_class(turns)] += 1

    def returned(self, turns: int) -> None:
        """Note that a conversation came back that had had so many turns."""
        self._returned[turn_class(turns)] += 1

    def share(self, turns: int) -> float:
        """Return which share of conversations comes back that have had so many turns; all, until some were seen."""
        return self._share_of_class(turn_class(turns))

    def by(self, kind: str) -> Callable[[int, float], float]:
        """Return what gives a rate of return, per second, by class of turns and time since the last one ended.

        Args:
            kind: ``age``: 1 / time (Pensieve's equation, section 4.3.1). ``turns``: the share that comes back after so
                many turns, over the time (its text). Neither ever rises.
        """
        if kind == BY_AGE:
            return by_age
        return lambda number, after_s: self._share_of_class(number) * by_age(number, after_s)

    def _share_of_class(self, number: int) -> float:
        return (self._returned[number] + _PRIOR) / (self._ended[number] + _PRIOR)
