"""One random stream per purpose, so that using one never shifts another."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
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


def generator(seed: int, purpose: Purpose, *key: int) -> np.random.Generator:
    """Return the generator for a purpose, at its beginning; ``key`` tells streams of one purpose apart."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(int(purpose), *key)))


def draws(rng: np.random.Generator, draw: Callable[..., Any] = np.random.Generator.random) -> Iterator[Any]:
    """Yield random numbers without end, drawn by the thousand: ``draw(rng, size=n)`` returns an array of n."""
    while True:
        yield from draw(rng, size=_CHUNK).tolist()


def choices(weights: Sequence[float], rng: np.random.Generator) -> Iterator[int]:
    """Yield indices without end, each as often as its weight says."""
    bounds = list(itertools.accumulate(weights))
    last = max(index for index, weight in enumerate(weights) if weight > 0)
    for uniform in draws(rng):
        yield min(last, bisect.bisect_right(bounds, uniform * bounds[-1]))
