"""A cluster in virtual time: real schedulers, one for each replica, under one clock, behind a router that serves.

An engine goes on whenever its own clock is the earliest, and a request is routed when no engine's is before its
arrival: so each engine does what it would alone with the requests that it gets, and with one replica all that
`simulate` does, to the last digit. Reports are taken at even distances of virtual time, as they stand at the ends of
steps.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm_ext.routing.fleet import Ask, Fleet
from vllm_ext.routing.routers import Marginal, Router, make_router
from vllm_ext.scheduling.load_report.report import LoadReport, session_key
from vllm_ext.scheduling.scheduler import SteeredScheduler
from vllm_ext.simulation.cost.spec import build as build_cost
from vllm_ext.simulation.cost.step_shape import CostModel, StepShape
from vllm_ext.simulation.engine.simulated_engine import SimulatedEngine
from vllm_ext.simulation.measure.run_data import GapHistogram, RequestRow, RequestTable, RunData, TimeSeries
from vllm_ext.simulation.run import (
    build_scheduler,
    in_milliseconds,
    make_engine,
    quiet_vllm,
    rare_collections,
    run_data,
)
from vllm_ext.simulation.spec import UPSTREAM, Resolved, SimulationSpec, resolve
from vllm_ext.simulation.workloads.build import build as build_workload
from vllm_ext.simulation.workloads.requests import SimRequest, Workload

_MEANS = ("_fraction", "mean_", "device_busy_s")
"""Counters that are averaged over the replicas; others are summed up."""


@dataclass(kw_only=True)
class ClusterRun:
    """What a cluster's run leaves behind."""

    replicas: list[RunData]
    whole: RunData
    """All of them as one: rows by the order of their ends, totals summed up, shares averaged."""
    moved: int
    """Turns of conversations that went to another replica than the one before."""


@dataclass(frozen=True)
class _Slower:
    """Times of a replica whose steps take several times as long."""

    cost: CostModel
    times: float

    def device_s(self, shape: StepShape) -> float:
        """Return the device's time of a step, in seconds."""
        return self.times * self.cost.device_s(shape)

    def host_s(self, shape: StepShape) -> float:
        """Return the engine core's time of a step, in seconds."""
        return self.times * self.cost.host_s(shape)


@dataclass
class _Handed:
    """The workload of one replica: nothing of its own; who comes next is told the cluster."""

    cluster: SimulatedCluster
    replica: str
    name: str = "cluster"
    rows: int = 0
    sha256: str = ""

    def start(self) -> Iterator[SimRequest]:
        """Yield nothing."""
        return iter(())

    def after(self, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> Iterable[SimRequest]:
        """Tell the cluster."""
        self.cluster.ended(self.replica, request, finished_s, output_ids)
        return ()


class SimulatedCluster:
    """Replicas behind a router, all equal but for the first, which may be slower.

    Args:
        resolved: Describes a replica, and what is served.
        replicas: How many, at least 1.
        router: Chooses.
        report_s: Virtual seconds between reports.
        slow: How many times as long a step of the first replica takes; its reports tell its own prices.
        workload: Takes the place of the one described.

    Raises:
        ValueError: one of the numbers can't be, or the description.
    """

    def __init__(
        self, resolved: Resolved, *, replicas: int, router: Router, report_s: float = 0.5, slow: float = 1.0,
        workload: Workload | None = None,
    ) -> None:  # fmt: skip
        if replicas < 1:
            raise ValueError(f"replicas={replicas!r}: must be at least 1")
        if not 0 < report_s < math.inf:
            raise ValueError(f"report_s={report_s!r}: must be a number of seconds, greater than 0")
        if resolved.system is None and isinstance(router, Marginal):
            raise ValueError(
                f"system={resolved.spec.engine.system!r}: must be one of ours, fcfs for vLLM's order: vLLM alone tells "
                "the router marginal nothing of itself"
            )
        if not 1 <= slow < math.inf:
            raise ValueError(f"slow={slow!r}: must be a factor of at least 1")
        self._resolved, self._router, self._report_s = resolved, router, report_s
        self._workload: Workload = workload or build_workload(resolved.spec.workload)
        cost = build_cost(resolved.hardware, resolved.spec.cost)
        costs: list[CostModel] = [cost] * replicas
        if slow > 1:
            costs[0] = _Slower(cost, slow)
        resolved = in_milliseconds(resolved, cost)
        self.replicas: dict[str, SimulatedEngine] = {
            name: make_engine(resolved, build_scheduler(resolved), _Handed(self, name), one)
            for name, one in ((f"replica-{number}", one) for number, one in enumerate(costs))
        }
        schedulers = {name: one.scheduler for name, one in self.replicas.items()}
        self._reporters = {
            name: one.load_reporter for name, one in schedulers.items() if isinstance(one, SteeredScheduler)
        }
        # What was sent before a report is taken is in it: the way takes no time here.
        self.fleet = Fleet(stale_s=4 * report_s + 1, lag_s=0.0)
        self.fleet.consist_of(self.replicas)
        self._next_report_s = 0.0
        self._coming: list[tuple[float, int, SimRequest]] = []
        self._count = self.moved = 0

    def run(self) -> None:
        """Serve the workload to its end, or until the description's ``max_time_s``.

        Raises:
            Stalled: as `SimulatedEngine.run`.
            ValueError: the workload yields a request with lengths that can't be.
        """
        ends_s = self._resolved.spec.max_time_s or math.inf
        first_turns = self._workload.start()
        upcoming = next(first_turns, None)
        while True:
            while upcoming is not None and (not self._coming or upcoming.arrival_s <= self._coming[0][0]):
                self._push(upcoming)
                upcoming = next(first_turns, None)
            busy = [one for one in self.replicas.values() if one.busy and one.clock() < ends_s]
            engine = min(busy, key=lambda one: one.clock(), default=None)
            arrives_s = self._coming[0][0] if self._coming and self._coming[0][0] < ends_s else math.inf
            if engine is not None and engine.clock() < arrives_s:
                engine.horizon_s = arrives_s
                engine.advance()
            elif arrives_s < math.inf:
                self._route(heapq.heappop(self._coming)[2])
            else:
                break
        if ends_s < math.inf and (self._coming or any(one.busy for one in self.replicas.values())):
            for one in self.replicas.values():
                one.stop(ends_s)

    def ended(self, replica: str, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> None:
        """Take in what a client sends next."""
        self.fleet.ended(replica)
        for follow_up in self._workload.after(request, finished_s, output_ids):
            self._push(follow_up)

    def reports(self) -> dict[str, LoadReport]:
        """Return what the replicas tell at this moment."""
        return {name: one.report() for name, one in self._reporters.items()}

    def _push(self, request: SimRequest) -> None:
        self._count += 1
        heapq.heappush(self._coming, (request.arrival_s, self._count, request))

    def _route(self, request: SimRequest) -> None:
        now = request.arrival_s
        if now >= self._next_report_s:
            for name, report in self.reports().items():
                self.fleet.heard(name, report, now)
            self._next_report_s = (math.floor(now / self._report_s) + 1) * self._report_s
        session = None if request.session_id is None else session_key(request.session_id)
        ask = Ask(request.prompt_tokens, session)
        before = None if session is None else self.fleet.homes.get(session)
        chosen = self._router.choose(ask, self.fleet, now)
        self.fleet.sent(chosen, ask, now)
        self.moved += before not in (None, chosen)
        self.replicas[chosen].deliver(request)


def simulate_cluster(
    spec: SimulationSpec, *, replicas: int, router: str | Router, report_s: float = 0.5, slow: float = 1.0,
    workload: Workload | None = None, label: str = "",
) -> ClusterRun:  # fmt: skip
    """Serve a workload by replicas behind a router, in virtual time.

    Args:
        spec: Describes a replica, and the workload of all.
        replicas: How many.
        router: A name of `routing.ROUTERS`, or a policy of one's own, which serves this run alone.
        report_s: Virtual seconds between reports of a replica.
        slow: How many times as long a step of the first replica takes.
        workload: Takes the place of the one described.
        label: For legends; by default what is served by whom.

    Raises:
        ValueError: (ConfigError included) the description or a number asks for what can't be; the message names it.
        Stalled: a scheduler stopped scheduling with requests left.
    """
    chosen = make_router(router) if isinstance(router, str) else router
    name = router if isinstance(router, str) else type(router).__name__
    label = label or f"{replicas} x {spec.engine.system}, {name}"
    resolved = resolve(spec)
    with rare_collections(), quiet_vllm():  # nothing here holds on to what `_run` made
        return _run(resolved, label, replicas=replicas, router=chosen, report_s=report_s, slow=slow, workload=workload)


def _run(resolved: Resolved, label: str, **parts: Any) -> ClusterRun:
    began = time.perf_counter()
    cluster = SimulatedCluster(resolved, **parts)
    cluster.run()
    wall_s = time.perf_counter() - began
    runs = [run_data(one, resolved, wall_s=wall_s) for one in cluster.replicas.values()]
    return ClusterRun(replicas=runs, whole=_together(runs, label), moved=cluster.moved)


def simulate_replicas(spec: SimulationSpec) -> RunData:
    """Return the run of a description that has replicas of its own, all of them as one.

    Raises:
        ValueError, Stalled: as `simulate_cluster`.
    """
    router = spec.router or "marginal"
    if router == "marginal" and spec.engine.system in UPSTREAM:  # which tells routers nothing
        router = "round-robin"
    one = spec.model_copy(update={"replicas": 1, "router": ""})
    return simulate_cluster(one, replicas=spec.replicas, router=router).whole


def _together(runs: Sequence[RunData], label: str) -> RunData:
    """Return several runs as one."""
    if len(runs) == 1:
        return replace(runs[0], label=label)
    gaps, totals = GapHistogram(), Counter[str]()
    for run in runs:
        gaps.merge(run.gaps)
        totals.update(run.counters)
    means = {name: value / len(runs) for name, value in totals.items() if any(part in name for part in _MEANS)}
    return RunData(
        label=label,
        requests=_rows_of([run.requests for run in runs]),
        unserved=_rows_of([run.unserved for run in runs]),
        gaps=gaps,
        series=TimeSeries(),
        counters={**totals, **means},
        duration_s=max(run.duration_s for run in runs),
        wall_s=runs[0].wall_s,
    )


def _rows_of(tables: Sequence[RequestTable]) -> RequestTable:
    rows = [(row, times) for table in tables for row, times in zip(table.rows(), table.token_times, strict=True)]
    whole = RequestTable()
    for row, times in sorted(rows, key=lambda pair: pair[0]["finish_s"]):
        whole.append(RequestRow(**row), times)
    return whole
