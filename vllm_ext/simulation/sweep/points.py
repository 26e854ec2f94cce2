"""Runs points: hands them to a pool, keeps what is done, and lets searches ask for more."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Generic, TypeVar

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
    work = _Work(plans, store, on_point)
    running: dict[Future[Outcome], tuple[str, SimulationSpec]] = {}
    while work.queue or running:
        while work.queue and len(running) < pool.places:
            _, key, spec = heapq.heappop(work.queue)
            running[pool.submit(spec)] = (key, spec)
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            work.finish(*running.pop(future), future.result())
    return [work.results[index] for index in range(len(plans))]


class _Work(Generic[T]):
    """How far the plans are."""

    def __init__(self, plans: Sequence[Plan[T]], store: PointStore, on_point: OnPoint | None) -> None:
        self.results: dict[int, T] = {}
        self.queue: list[tuple[int, str, SimulationSpec]] = []
        """Heap of points that no worker has yet: number of the plan that asked first, key, description."""
        self._plans = plans
        self._store = store
        self._on_point = on_point
        self._waiting: dict[str, list[int]] = {}
        """Key of a point -> plans that asked for it."""
        self._failed: dict[str, Outcome] = {}
        for index in range(len(plans)):
            self._advance(index, None)

    def finish(self, key: str, spec: SimulationSpec, outcome: Outcome) -> None:
        """Keep an outcome and let the plans that asked for it go on."""
        if outcome.metrics is None:
            self._failed[key] = outcome
        else:
            self._store.save(key, spec, outcome.metrics)
        for place, index in enumerate(self._waiting.pop(key)):
            self._tell(spec, outcome, place > 0)
            self._advance(index, outcome)

    def _advance(self, index: int, outcome: Outcome | None) -> None:
        """Let a plan go on until it wants a run that is not there, or ends."""
        while True:
            try:
                spec = next(self._plans[index]) if outcome is None else self._plans[index].send(outcome)
            except StopIteration as stop:
                self.results[index] = stop.value
                return
            key = self._store.key(spec)
            if key in self._waiting:
                self._waiting[key].append(index)
                return
            outcome = self._failed.get(key) or self._store.load(key)
            if outcome is None:
                self._waiting[key] = [index]
                heapq.heappush(self.queue, (index, key, spec))
                return
            self._tell(spec, outcome, True)

    def _tell(self, spec: SimulationSpec, outcome: Outcome, reused: bool) -> None:
        if self._on_point is not None:
            self._on_point(spec, outcome, reused)


def _single(spec: SimulationSpec) -> Plan[Outcome]:
    return (yield spec)
