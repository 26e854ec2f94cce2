"""At which rate conversations come back after so many turns and so long a time, learned from those that did."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vllm_ext.config.kv_tier import BY_AGE, BY_TURNS, LEARNED
from vllm_ext.kv.keeping.worth import LEAST_AGE_S

_TURNS = (1, 2, 4, 8, 16, 32)
"""First turn counts of the classes: 1, 2 to 3, 4 to 7, ..., and 32 or more."""
_BINS_PER_OCTAVE = 4
_OCTAVES = 16
_EDGES = np.concatenate([[0.0], 2.0 ** (np.arange(_OCTAVES * _BINS_PER_OCTAVE + 1) / _BINS_PER_OCTAVE)])
"""Of the bins of time since the last turn, in seconds: one up to a second, then four to an octave up to 18 hours."""
_BINS = len(_EDGES) - 1
_LAST_S = float(_EDGES[-2])
_PRIOR = 20.0
"""Conversations that a bin is taken to have seen before it saw any: of all classes, returning at a rate that falls with
the time, as in the paper; of one class, returning as all do."""
_PRIOR_SHARE = 1.0 - 0.7 ** (1.0 / _BINS_PER_OCTAVE)
"""Of those: with three tenths in each octave the rate is as 1 / T."""
_MEMORY = 5000.0
"""Ended turns after which one counts half."""
_LEARNED_FOR = 64
"""Ended turns until the rates are made again."""
_MOST_SHARE = 0.999


def turn_class(turns: int) -> int:
    """Return the class of a conversation that has had so many turns, from 0."""
    return sum(turns >= first for first in _TURNS[1:])


def by_age(_: int, after_s: float) -> float:
    """Return 1 / time, whatever the turns so far."""
    return 1.0 / max(after_s, LEAST_AGE_S)


NUM_TURN_CLASSES = len(_TURNS)


class ReturnModel:
    """Rates of return of conversations, by turns so far and time since the last one ended.

    Ours: Pensieve's equation (section 4.3.1) has the time since the last use alone, as 1 / T, which treats a
    conversation's first turn like its tenth, and takes it that those who did not come back in a minute will in an hour.
    Of real conversations many have a single turn, those that have had several mostly go on, and after some minutes
    hardly any does. A rate says how much a chunk is asked for, and so what it is worth to keep it for the next moment.
    Until enough is seen it is as the paper's.

    A rate is made of the share that comes back within a bin of time, of those who had not by then. Who ended a turn a
    moment ago and has not had the time counts as one of these, which lowers the rates of all classes by a little.
    """

    def __init__(self) -> None:
        self._ended = np.zeros(NUM_TURN_CLASSES)
        self._returned = np.zeros((NUM_TURN_CLASSES, _BINS))
        self._log_rates: list[list[float]] | None = None
        self._seen = 0

    def ended(self, turns: int) -> None:
        """Note that a conversation's turn ended; it has had so many."""
        kept = 0.5 ** (1 / _MEMORY)
        self._ended *= kept
        self._returned *= kept
        self._ended[turn_class(turns)] += 1
        self._seen += 1
        if self._seen % _LEARNED_FOR == 0:
            self._log_rates = None

    def returned(self, turns: int, after_s: float) -> None:
        """Note that a conversation came back that had had so many turns, the last of which ended so long before."""
        self._returned[turn_class(turns), min(int(_place(after_s)), _BINS - 1)] += 1

    def share(self, turns: int) -> float:
        """Return which share of conversations comes back that have had so many turns; all, until some were seen."""
        return self._share(turn_class(turns))

    def by(self, kind: str) -> Callable[[int, float], float]:
        """Return what gives a rate of return, per second, by class of turns and time since the last one ended.

        Args:
            kind: ``learned``: of both, `rate`. ``turns``: the share that comes back after so many turns, over the time
                (Pensieve, section 4.3.1, in words). ``age``: 1 / time (its equation). None of them ever rises.
        """
        return {LEARNED: self.rate, BY_TURNS: self._share_over_age, BY_AGE: by_age}[kind]

    def rate(self, number: int, after_s: float) -> float:
        """Return the rate at which conversations of a class come back after a time, per second; it never rises."""
        if self._log_rates is None:
            self._log_rates = self._learned()
        place, rates = _place(after_s), self._log_rates[number]
        below = int(min(place, _BINS - 1))
        if below == _BINS - 1:
            return math.exp(rates[-1]) * _LAST_S / max(after_s, _LAST_S)
        share = place - below
        return math.exp(rates[below] * (1 - share) + rates[below + 1] * share)

    def _share(self, number: int) -> float:
        return float((self._returned[number].sum() + _PRIOR) / (self._ended[number] + _PRIOR))

    def _share_over_age(self, number: int, after_s: float) -> float:
        return self._share(number) * by_age(number, after_s)

    def _learned(self) -> list[list[float]]:
        """Return logarithms of the rates, by class and bin."""
        shares_of_all = _shares(self._ended.sum(), self._returned.sum(axis=0), _PRIOR_SHARE)
        found = []
        for ended, returned in zip(self._ended, self._returned, strict=True):
            rates = -np.log1p(-np.minimum(_shares(ended, returned, shares_of_all), _MOST_SHARE)) / np.diff(_EDGES)
            # Tails of a class are compared by age alone: what is rare now may be worth keeping for what comes later.
            never_rising = np.maximum.accumulate(rates[::-1])[::-1]
            found.append([float(value) for value in np.log(never_rising)])
        return found


def _shares(ended: float, returned: NDArray[np.float64], prior: NDArray[np.float64] | float) -> NDArray[np.float64]:
    """Return by bin which share came back in it, of those who had not before."""
    still_away = np.maximum(ended - (np.cumsum(returned) - returned), 0.0)
    shares: NDArray[np.float64] = (returned + _PRIOR * prior) / (still_away + _PRIOR)
    return shares


def _place(after_s: float) -> float:
    """Return where a time stands among the bins: the number of its bin, and how far in it is."""
    if after_s < 1.0:
        return max(after_s, 0.0)
    return 1.0 + _BINS_PER_OCTAVE * math.log2(after_s) if after_s < math.inf else math.inf
