"""One random stream per purpose, so that using one never shifts another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import numpy as np

_CHUNK = 1024


class Purpose(IntEnum):
    """What random numbers are for. The values are part of what a seed means: never renumber them."""

    ARRIVALS = 1
    LENGTHS = 2
    ROWS = 3
    MIX = 4
    PROMPT_LENGTHS = 5
    THINK = 6
    ANNOUNCE = 7
    TIER = 8
    SLO_TTFT = 9
    SLO_TBT = 10
    SLO_E2E = 11
    ABORT = 12
    ABORT_TIME = 13
    TOKEN_IDS = 14


def sequence(seed: int, purpose: Purpose, *key: int) -> np.random.SeedSequence:
    """Return the seed of the stream for a purpose; ``key`` tells streams of one purpose apart."""
    return np.random.SeedSequence(seed, spawn_key=(int(purpose), *key))


def generator(seed: int, purpose: Purpose, *key: int) -> np.random.Generator:
    """Return the generator for a purpose, at its beginning."""
    return np.random.default_rng(sequence(seed, purpose, *key))


def draws(rng: np.random.Generator, draw: Callable[[np.random.Generator, int], Any]) -> Iterator[float]:
    """Yield random numbers without end, drawn by the thousand.

    Args:
        rng: The stream.
        draw: Returns an array of as many numbers as it is told.
    """
    while True:
        yield from draw(rng, _CHUNK).tolist()
