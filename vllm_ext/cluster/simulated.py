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
from dataclasses import dataclass, field, replace

from vllm.v1.request import RequestStatus

from vllm_ext.cluster.fleet import Ask, Fleet
from vllm_ext.cluster.report import LoadReport, Prices, session_key
from vllm_ext.cluster.residency import Residency
from vllm_ext.cluster.routing import Router, make_router
from vllm_ext.simulation.cost.profiled import runtime_model
from vllm_ext.simulation.cost.spec import build as build_cost
from vllm_ext.simulation.engine.simulated_engine import SimulatedEngine
from vllm_ext.simulation.measure.run_data import GapHistogram, RequestRow, RequestTable, RunData, TimeSeries
from vllm_ext.simulation.run import build_scheduler, make_engine, quiet_vllm, rare_collections, run_data
from vllm_ext.simulation.spec import Resolved, SimulationSpec, resolve
from vllm_ext.simulation.workloads.build import build as build_workload
from vllm_ext.simulation.workloads.requests import SimRequest, Workload

_MEMORY = 0.05
"""Weight of each request in the mean output of those that ended lately."""
_MEANS = ("_fraction", "mean_")
"""Counters that are averaged over the replicas; others are summed up."""


@dataclass(kw_only=True)
class ClusterRun:
    """What a cluster's run leaves behind."""

    replicas: list[RunData]
    whole: RunData
    """All of them as one: rows by the order of their ends, totals summed up, shares averaged."""
    moved: int
    """Turns of conversations that went to another replica than the one before."""


@dataclass
class _Replica:
    """An engine, and what it reports of itself."""

    engine: SimulatedEngine
    prices: Prices
    number: int = 0
    output_tokens: float = 256.0
    residency: Residency = field(init=False)

    def __post_init__(self) -> None:
        self.residency = Residency(self.engine.scheduler)

    def report(self) -> LoadReport:
        """Return its state."""
        scheduler, self.number = self.engine.scheduler, self.number + 1
        running, waiting = scheduler.get_request_counts()
        queue = [one for one in scheduler.requests.values() if one.status is not RequestStatus.RUNNING]
        begun = sum(max(0, one.num_prompt_tokens - one.num_computed_tokens) for one in scheduler.running)
        pool, size = scheduler.kv_cache_manager.block_pool, scheduler.block_size
        used = (pool.num_gpu_blocks - pool.get_num_free_blocks()) * size
        return LoadReport(
            number=self.number, running=running, waiting=waiting, seats=scheduler.max_num_running_reqs,
            prefill_tokens=begun + self.residency.uncached_tokens(queue),
            context_tokens=used + sum(one.num_tokens for one in queue), pool_tokens=pool.num_gpu_blocks * size,
            output_tokens=self.output_tokens, prices=self.prices, resident=self.residency.held(),
        )  # fmt: skip

    def ended(self, output_tokens: int) -> None:
        """Learn from a request."""
        self.output_tokens += _MEMORY * (max(1, output_tokens) - self.output_tokens)


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
    """Equal replicas behind a router.

    Args:
        resolved: Describes a replica, and what is served.
        replicas: How many, at least 1.
        router: Chooses.
        report_s: Virtual seconds between reports.

    Raises:
        ValueError: one of the numbers can't be, or the description.
    """

    def __init__(self, resolved: Resolved, *, replicas: int, router: Router, report_s: float = 0.5) -> None:
        if replicas < 1:
            raise ValueError(f"replicas={replicas!r}: must be at least 1")
        if not 0 < report_s < math.inf:
            raise ValueError(f"report_s={report_s!r}: must be a number of seconds, greater than 0")
        spec = resolved.spec
        self._resolved, self._router, self._report_s = resolved, router, report_s
        self._workload: Workload = build_workload(spec.workload)
        cost, size = build_cost(resolved.hardware, spec.cost), spec.engine.block_size
        price = runtime_model(cost, resolved.limits).coefficients
        link_bytes_per_s = spec.cost.apply(resolved.hardware.device).pcie_bytes_per_s
        prices = Prices(
            base_s=price.base_s, prefill_token_s=price.prefill_token_s, decode_s=price.decode_s,
            context_token_s=price.context_token_s,
            host_token_s=resolved.hardware.kv_bytes_per_block(size) / size / link_bytes_per_s,
        )  # fmt: skip
        self.replicas = {
            name: _Replica(make_engine(resolved, build_scheduler(resolved), _Handed(self, name), cost), prices)
            for name in (f"replica-{number}" for number in range(replicas))
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
            busy = [one.engine for one in self.replicas.values() if one.engine.busy and one.engine.clock() < ends_s]
            engine = min(busy, key=lambda one: one.clock(), default=None)
            arrives_s = self._coming[0][0] if self._coming and self._coming[0][0] < ends_s else math.inf
            if engine is not None and engine.clock() < arrives_s:
                engine.horizon_s = arrives_s
                engine.advance()
            elif arrives_s < math.inf:
                self._route(heapq.heappop(self._coming)[2])
            else:
                break
        if ends_s < math.inf and (self._coming or any(one.engine.busy for one in self.replicas.values())):
            for one in self.replicas.values():
                one.engine.stop(ends_s)

    def ended(self, replica: str, request: SimRequest, finished_s: float, output_ids: Sequence[int]) -> None:
        """Take in what a client sends next."""
        self.fleet.ended(replica, failed=False, now=finished_s)
        self.replicas[replica].ended(len(output_ids))
        for follow_up in self._workload.after(request, finished_s, output_ids):
            self._push(follow_up)

    def _push(self, request: SimRequest) -> None:
        self._count += 1
        heapq.heappush(self._coming, (request.arrival_s, self._count, request))

    def _route(self, request: SimRequest) -> None:
        now = request.arrival_s
        if now >= self._next_report_s:
            for name, replica in self.replicas.items():
                self.fleet.heard(name, replica.report(), now)
            self._next_report_s = (math.floor(now / self._report_s) + 1) * self._report_s
        session = None if request.session_id is None else session_key(request.session_id)
        ask = Ask(request.prompt_tokens, session)
        before = None if session is None else self.fleet.homes.get(session)
        chosen = self._router.choose(ask, self.fleet, now)
        self.fleet.sent(chosen, ask, now)
        self.moved += before not in (None, chosen)
        self.replicas[chosen].engine.deliver(request)


def simulate_cluster(
    spec: SimulationSpec, *, replicas: int, router: str | Router, report_s: float = 0.5, label: str = ""
) -> ClusterRun:
    """Serve a workload by equal replicas behind a router, in virtual time.

    Args:
        spec: Describes a replica, and the workload of all.
        replicas: How many.
        router: A name of `routing.ROUTERS`, or a policy of one's own, which serves this run alone.
        report_s: Virtual seconds between reports of a replica.
        label: For legends; by default what is served by whom.

    Raises:
        ValueError: (ConfigError included) the description or a number asks for what can't be; the message names it.
        Stalled: a scheduler stopped scheduling with requests left.
    """
    began, resolved = time.perf_counter(), resolve(spec)
    with rare_collections(), quiet_vllm():
        chosen = make_router(router) if isinstance(router, str) else router
        cluster = SimulatedCluster(resolved, replicas=replicas, router=chosen, report_s=report_s)
        cluster.run()
        wall_s = time.perf_counter() - began
        runs = [run_data(one.engine, resolved, wall_s=wall_s) for one in cluster.replicas.values()]
    name = router if isinstance(router, str) else type(router).__name__
    label = label or f"{replicas} x {spec.engine.system}, {name}"
    return ClusterRun(replicas=runs, whole=_together(runs, label), moved=cluster.moved)


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
