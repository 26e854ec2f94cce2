"""What the retention values of chunks in host memory and of blocks on the device have in common."""

from __future__ import annotations

import math

LEAST_AGE_S = 1e-6
"""Age that what was used just now is taken to have."""
LINEAR_TOKENS = 8192.0
"""Context at which attention costs as much as everything else, where nothing was measured."""
_CLASSES_PER_OCTAVE = 2


def class_of(end: int) -> int:
    """Return the class of what ends after so many tokens; in one class it costs about the same to compute again."""
    return int(_CLASSES_PER_OCTAVE * math.log2(max(end, 1)))


def middle_of(number: int) -> int:
    """Return the tokens in the middle of a class."""
    return int(2 ** ((number + 0.5) / _CLASSES_PER_OCTAVE))
