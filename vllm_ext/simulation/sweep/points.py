"""Runs points: hands them to a pool, keeps what is done, and lets searches ask for more."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.pools import Pool
from vllm_ext.simulation.sweep.store import Outcome, PointStore

T = TypeVar("T")
Plan = Generator[SimulationSpec, Outcome, T]
"""Asks for one run after the other, and returns what it makes of them. Equal outcomes give equal requests."""
OnPoint = Callable[[SimulationSpec, Outcome, bool], None]
"""Called for every outcome that a plan gets; the last argument says whether it was there already."""


def run_points(
    specs: Sequence[SimulationSpec], store: PointStore, pool: Pool, on_point: OnPoint | None = None
) -> list[Outcome]:
    """Run every point that is not stored yet.

    Returns:
        The outcomes in the order of the points; one that failed says so, and the others are not touched by it.
    """
    return run_plans([_single(spec) for spec in specs], store, pool, on_point)


def run_plans(plans: Sequence[Plan[T]], store: PointStore, pool: Pool, on_point: OnPoint | None = None) -> list[T]:
    """Run plans side by side; a point that two plans ask for is run once. Earlier plans' points go first.

    Finished points are stored as they come, so that an exception, Ctrl-C included, costs those under way only. Failed
    points are not stored: the next time they are tried again.

    Returns:
        What the plans returned, in their order.
    """
    results: dict[int, T] = {}
    asked: dict[str, tuple[SimulationSpec, list[int]]] = {}  # by key: what is not there yet, and the plans that wait
    queue: list[tuple[int, str]] = []  # heap of points that no worker has yet: plan that asked first, key
    failed: dict[str, Outcome] = {}
    tell = on_point or (lambda *_: None)

    def advance(index: int, outcome: Any) -> None:
        """Let a plan go on, at first with None, until it wants a run that is not there, or ends."""
        while True:
            try:
                spec = plans[index].send(outcome)
            except StopIteration as stop:
                results[index] = stop.value
                return
            key = store.key(spec)
            if key in asked:
                asked[key][1].append(index)
                return
            outcome = failed.get(key) or store.load(key)
            if outcome is None:
                asked[key] = spec, [index]
                heapq.heappush(queue, (index, key))
                return
            tell(spec, outcome, True)

    for index in range(len(plans)):
        advance(index, None)
    running: dict[Future[Outcome], str] = {}
    while queue or running:
        while queue and len(running) < pool.places:
            _, key = heapq.heappop(queue)
            running[pool.submit(asked[key][0])] = key
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            key, outcome = running.pop(future), future.result()
            spec, waiting = asked.pop(key)
            if outcome.metrics is None:
                failed[key] = outcome
            else:
                store.save(key, spec, outcome)
            for place, index in enumerate(waiting):
                tell(spec, outcome, place > 0)
                advance(index, outcome)
    return [results[index] for index in range(len(plans))]


def _single(spec: SimulationSpec) -> Plan[Outcome]:
    return (yield spec)
