"""What the retention values of chunks in host memory and of blocks on the device have in common."""

from __future__ import annotations

import math
from collections.abc import Callable

LEAST_AGE_S = 1e-6
"""Age that what was used just now is taken to have."""
LINEAR_TOKENS = 8192.0
"""Context at which attention costs as much as everything else, where nothing was measured."""
_CLASSES_PER_OCTAVE = 2
_PRICED_FOR = 20_000
"""Uses until costs are asked for again: they are learned, and change slowly."""


def class_of(end: int) -> int:
    """Return the class of what ends after so many tokens; in one class it costs about the same to compute again."""
    return int(_CLASSES_PER_OCTAVE * math.log2(max(end, 1)))


def middle_of(number: int) -> int:
    """Return the tokens in the middle of a class."""
    return int(2 ** ((number + 0.5) / _CLASSES_PER_OCTAVE))


class ClassCosts:
    """What it costs to compute again what is in a class, remembered for a while.

    Args:
        cost: By the tokens up to the end; in any unit.
    """

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.cost = cost
        self._known: dict[int, float] = {}
        self._uses = 0

    def of(self, number: int) -> float:
        """Return the cost in the middle of a class."""
        self._uses += 1
        if self._uses % _PRICED_FOR == 0:
            self._known.clear()
        found = self._known.get(number)
        if found is None:
            found = self._known[number] = self.cost(middle_of(number))
        return found
