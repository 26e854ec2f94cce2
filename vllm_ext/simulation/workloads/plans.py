"""What a session will do, drawn when it begins, so that nothing the server does changes a draw."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from vllm_ext.simulation.workloads.expectations import Aborts, Expectations, Factors
from vllm_ext.simulation.workloads.randomness import Purpose, draws, generator
from vllm_ext.simulation.workloads.sessions import Exchange, Session
from vllm_ext.simulation.workloads.spec import TierSpec, WorkloadSpec


class Turn(NamedTuple):
    """One request to come."""

    exchange: Exchange
    think_s: float
    """From the end of the client's last request, in seconds; unused where there was none."""
    error: float
    """Standard normal number behind the announced length."""
    factors: Factors
    """Choose the objectives."""
    abort_after_s: float | None


class Plan(NamedTuple):
    """Everything about a session but its times."""

    number: int
    """Sessions are counted from 0, in the order in which they begin."""
    session: Session
    tier: TierSpec | None
    turns: tuple[Turn, ...]


class Planner:
    """Draws plans; every kind of draw has a random stream of its own."""

    def __init__(self, spec: WorkloadSpec, think_s: float | None) -> None:
        seed = spec.seed
        self._tiers = Expectations(spec.tiers, seed)
        self._factors: Iterator[Factors] = itertools.repeat((0.0, 0.0, 0.0))
        if spec.tiers:
            self._factors = iter(self._tiers.factors, None)
        self._aborts = Aborts(spec.abort_share, spec.abort_mean_s, seed)
        self._errors: Iterator[float] = itertools.repeat(0.0)
        if spec.announce == "hint":
            self._errors = draws(generator(seed, Purpose.ANNOUNCE), lambda rng, count: rng.normal(size=count))
        self._thinks = _think_times(spec, think_s or 0.0)

    def plan(self, number: int, session: Session) -> Plan:
        """Draw what the client of a session will do."""
        return Plan(
            number,
            session,
            self._tiers.tier(session.tier),
            tuple(
                Turn(exchange, next(self._thinks), next(self._errors), next(self._factors), self._aborts.after_s())
                for exchange in session.turns
            ),
        )


def _think_times(spec: WorkloadSpec, mean_s: float) -> Iterator[float]:
    if spec.think == "constant" or mean_s == 0:
        return itertools.repeat(mean_s)

    def thought(rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return rng.exponential(mean_s, size=count)

    return draws(generator(spec.seed, Purpose.THINK), thought)
