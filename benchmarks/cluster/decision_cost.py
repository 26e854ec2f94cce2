"""What a decision of a router costs, beside a fixed piece of work. A part of the benchmarks of clusters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from vllm_ext.cluster.steering import Steering
from vllm_ext.routing.fleet import Fleet
from vllm_ext.scheduling.load_report.report import Held, LoadReport, Prices, session_key

_PRICES = Prices(base_s=0.01, prefill_token_s=1e-4, decode_s=1e-4, context_token_s=1e-7, host_token_s=1e-5)
_SESSIONS = 200
"""Conversations whose KV each replica has."""


def fleet_of(replicas: int) -> Fleet:
    """Return a fleet of busy replicas, all of which have reported at time 0, each with KV of its own conversations."""
    fleet = Fleet(stale_s=1e9)
    fleet.consist_of(f"replica-{number}" for number in range(replicas))
    for number, name in enumerate(fleet.replicas):
        resident = {session_key(f"s{number}-{one}"): Held(1000 + one, 2000) for one in range(_SESSIONS)}
        report = LoadReport(
            number=1, running=20 + number % 7, waiting=number % 3, seats=256, prefill_tokens=500 * (number % 5),
            context_tokens=30_000 + 100 * number, pool_tokens=60_000, prices=_PRICES, resident=resident,
        )  # fmt: skip
        fleet.heard(name, report, 0.0)
    return fleet


def reference() -> int:
    """A fixed piece of Python: ten thousand additions."""
    total = 0
    for one in range(10_000):
        total += one
    return total


class Decisions(NamedTuple):
    """Times of decisions in microseconds, of one thread's processor time."""

    median_us: float
    p99_us: float
    reference_us: float
    """Of `reference`, beside them."""


def decision_us(policy: str, replicas: int, decisions: int = 2000) -> Decisions:
    """Measure what a router of ours does for a request: look at its body, choose, and take note.

    Each replica reports twice a second, and a hundred requests come in that time.

    Args:
        policy: Of `routing.ROUTERS`.
        replicas: Among so many.
        decisions: So many times, of conversations with KV somewhere; `reference` runs after every tenth.
    """
    now, taken, beside = 1.0, list[float](), list[float]()
    steering = Steering(policy, clock=lambda: now)
    steering.fleet = fleet_of(replicas)
    names = [*steering.fleet.replicas]
    for number in range(decisions):
        now += 0.005
        for name in names[number % 100 :: 100]:
            report = steering.fleet.replicas[name].report
            assert report is not None
            steering.fleet.heard(name, replace(report, number=report.number + 1), now)
        body = SimpleNamespace(messages=[{"role": "user", "content": "x" * (8000 + 4 * number)}])
        session = f"s{number % replicas}-{number % _SESSIONS}"
        taken.append(_us(lambda session=session, body=body: steering.ranked(names, session, body)))  # type: ignore[misc]
        if number % 10 == 0:
            beside.append(_us(reference))
    return Decisions(*np.percentile(taken, (50, 99)).tolist(), statistics.median(beside))


def _us(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e3
