"""What a decision of a router costs, beside a fixed piece of work. A part of the benchmarks of clusters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from vllm_ext.routing.fleet import Ask, Fleet
from vllm_ext.routing.routers import Router
from vllm_ext.scheduling.load_report.report import Held, LoadReport, Prices

_PRICES = Prices(base_s=0.01, prefill_token_s=1e-4, decode_s=1e-4, context_token_s=1e-7, host_token_s=1e-5)
_SESSIONS = 200
"""Conversations whose KV each replica has."""


def fleet_of(replicas: int) -> Fleet:
    """Return a fleet of busy replicas, all of which have reported at time 0, each with KV of its own conversations."""
    fleet = Fleet(stale_s=1e9)
    fleet.consist_of(f"replica-{number}" for number in range(replicas))
    for number, name in enumerate(fleet.replicas):
        resident = {f"s{number}-{one}": Held(1000 + one, 2000) for one in range(_SESSIONS)}
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


def decision_us(router: Router, replicas: int, decisions: int = 2000) -> tuple[float, float]:
    """Return the median time of a decision with its note in the fleet, and of `reference`, in microseconds.

    It is processor time of one thread.

    Args:
        router: Chooses.
        replicas: Among so many.
        decisions: So many times, of conversations with KV somewhere; `reference` runs after every tenth.
    """
    fleet, taken, beside = fleet_of(replicas), list[float](), list[float]()
    for number in range(decisions):
        ask = Ask(2000 + number, f"s{number % replicas}-{number % _SESSIONS}")
        taken.append(_us(lambda ask=ask: fleet.sent(router.choose(ask, fleet, 1.0), ask, 1.0)))  # type: ignore[misc]
        if number % 10 == 0:
            beside.append(_us(reference))
        if number % 100 == 0:
            for replica in fleet.replicas.values():
                replica.forget(2.0)
    return statistics.median(taken), statistics.median(beside)


def _us(work: Callable[[], object]) -> float:
    began = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - began) / 1e3
