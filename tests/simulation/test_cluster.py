"""Several simulated engines under one clock: one alone is what `simulate` is, and routers are told what is true."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from vllm_ext.routing.fleet import Ask, Fleet
from vllm_ext.routing.routers import ROUTERS, make_router
from vllm_ext.scheduling.load_report.report import session_key
from vllm_ext.simulation.cluster import SimulatedCluster, simulate_cluster
from vllm_ext.simulation.engine.simulated_engine import SimulatedEngine
from vllm_ext.simulation.measure.metrics import summarise
from vllm_ext.simulation.measure.run_data import COLUMNS, RunData
from vllm_ext.simulation.run import simulate
from vllm_ext.simulation.spec import SimulationSpec, checked, parse, resolve
from vllm_ext.simulation.sweep.pools import simulate_point

CHATS = {"source": "pensieve-sharegpt", "arrivals": "poisson", "rate_per_s": 2.0,
         "num_requests": 40, "think_s": 5.0}  # fmt: skip
SINGLE = {"source": "sharegpt-like", "arrivals": "poisson", "rate_per_s": 6.0, "num_requests": 120}


def spec_of(workload: dict[str, Any], system: str = "fcfs", **fields: Any) -> SimulationSpec:
    engine = {"system": system, "max_model_len": 4096, **fields.pop("engine", {})}
    return checked(parse(SimulationSpec, {"engine": engine, "workload": workload, **fields}))


def same(one: RunData, other: RunData) -> None:
    for table in ("requests", "unserved"):
        mine, theirs = getattr(one, table), getattr(other, table)
        assert len(mine) == len(theirs)
        for name in COLUMNS:
            assert np.array_equal(mine.column(name), theirs.column(name), equal_nan=COLUMNS[name] == "float"), name
    assert one.counters == other.counters
    assert one.duration_s == other.duration_s
    assert summarise(one) == summarise(other)


@pytest.mark.parametrize(
    "spec",
    [
        spec_of(CHATS, "alise"),
        spec_of(SINGLE),
        spec_of(SINGLE, engine={"async_scheduling": False}),
        spec_of(CHATS, "pensieve", engine={"options": {"kv_tier": {"gib": 2.0}}, "num_blocks": 600}),
        spec_of({**SINGLE, "rate_per_s": 30.0}, "alise", max_time_s=9.0),
    ],
    ids=["chats, alise", "requests, by arrival", "synchronous", "chats, a tier", "cut off"],
)
def test_one_replica_is_what_an_engine_alone_is(spec: SimulationSpec) -> None:
    alone = simulate(spec)
    assert len(alone.requests) > 10
    for router in ("round-robin", "marginal"):
        run = simulate_cluster(spec, replicas=1, router=router)
        same(run.whole, alone)
        assert run.moved == 0


@pytest.mark.parametrize("router", ROUTERS)
def test_every_request_is_served_once_whoever_routes(router: str) -> None:
    spec = spec_of(CHATS)
    run = simulate_cluster(spec, replicas=3, router=router)
    alone = simulate(spec)
    served = [name for one in run.replicas for name in one.requests.column("req_id")]
    assert sorted(served) == sorted(alone.requests.column("req_id"))
    assert [*run.whole.requests.column("finish_s")] == sorted(run.whole.requests.column("finish_s"))
    assert run.whole.counters["steps"] == sum(one.counters["steps"] for one in run.replicas)
    assert 0 <= run.whole.counters["mean_kv_used_fraction"] <= 1
    assert run.whole.gaps.count == sum(one.gaps.count for one in run.replicas)
    assert run.whole.gaps.max_s == max(one.gaps.max_s for one in run.replicas)


def test_a_policy_of_ones_own_may_route() -> None:
    class Last:
        def choose(self, _ask: Ask, fleet: Fleet, _now: float) -> str:
            return max(fleet.replicas)

    run = simulate_cluster(spec_of({**SINGLE, "num_requests": 20}), replicas=2, router=Last())
    assert [len(one.requests) for one in run.replicas] == [0, 20]
    assert run.whole.label == "2 x fcfs, Last"


def test_the_same_run_twice_is_the_same() -> None:
    first, second = (simulate_cluster(spec_of(CHATS), replicas=3, router="marginal") for _ in range(2))
    same(first.whole, second.whole)
    assert first.moved == second.moved


def test_affinity_finds_histories_and_round_robin_computes_them_again() -> None:
    chats = {**CHATS, "rate_per_s": 1.0, "num_requests": 30}
    found = {
        router: simulate_cluster(spec_of(chats), replicas=4, router=router)
        for router in ("round-robin", "home", "marginal")
    }
    computed = {router: run.whole.counters["prefill_tokens"] for router, run in found.items()}
    assert computed["home"] < 0.8 * computed["round-robin"]
    assert computed["marginal"] < 0.8 * computed["round-robin"]
    assert found["home"].moved < found["round-robin"].moved


def test_reports_tell_what_there_is() -> None:
    """In the middle of a run: queues, memory, and histories that a look-up of the scheduler's would find as well."""
    resolved = resolve(spec_of({**CHATS, "rate_per_s": 8.0, "think_s": 300.0}, max_time_s=40.0))
    cluster = SimulatedCluster(resolved, replicas=2, router=make_router("marginal"))
    cluster.run()
    reports = cluster.reports()
    for name, engine in cluster.replicas.items():
        report, scheduler = reports[name], engine.scheduler
        assert (report.running, report.waiting) == scheduler.get_request_counts()
        assert 0 <= report.context_tokens <= report.pool_tokens
        assert report.pool_tokens == resolved.num_blocks * 16
        rows = [row for row in engine.collector.table.rows() if row["session_id"]]
        longest = {row["session_id"]: row["prompt_tokens"] + row["output_tokens"] for row in rows}  # the last turn's
        held = {session: report.resident.get(session_key(session), (0,))[0] for session in longest}
        assert len(longest) > 5
        assert all(0 <= tokens - held[session] < 3 * 16 for session, tokens in longest.items()), (
            "an empty pool keeps all"
        )
        assert report.number > 10


def test_reports_have_what_host_memory_holds_of_conversations() -> None:
    """So little memory on the device that most of it is there alone; a next turn finds as much."""
    small = {"options": {"kv_tier": {"gib": 4.0}}, "num_blocks": 300}
    resolved = resolve(
        spec_of({**CHATS, "rate_per_s": 6.0, "think_s": 1000.0}, "pensieve", engine=small, max_time_s=60.0)
    )
    cluster = SimulatedCluster(resolved, replicas=1, router=make_router("home"))
    cluster.run()
    (engine,) = cluster.replicas.values()
    rows = [row for row in engine.collector.table.rows() if row["session_id"]]
    longest = {session_key(row["session_id"]): row["prompt_tokens"] + row["output_tokens"] for row in rows}
    held = cluster.reports()["replica-0"].resident
    behind = [name for name, one in held.items() if one.host > one.device]
    assert len(behind) >= 5, held
    assert all(max(one) <= longest[name] for name, one in held.items() if name in longest)
    assert sum(max(one) for one in held.values()) > 0.7 * sum(longest.values())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"replicas": 0}, "replicas=0: must be at least 1"),
        ({"report_s": 0.0}, r"report_s=0\.0: must be a number of seconds, greater than 0"),
        ({"router": "best"}, "router='best': must be one of"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulate_cluster(spec_of(SINGLE), **{"replicas": 2, "router": "least", **fields})


def test_vllm_alone_tells_nothing_and_is_served_by_counts_or_refused() -> None:
    spec = spec_of({**SINGLE, "num_requests": 20}, "upstream-fcfs")
    with pytest.raises(ValueError, match="system='upstream-fcfs': must be one of ours"):
        simulate_cluster(spec, replicas=2, router="marginal")
    run = simulate_cluster(spec, replicas=2, router="least")
    assert all(len(one.requests) >= 5 for one in run.replicas)


@pytest.mark.parametrize(("system", "router"), [("fcfs", "marginal"), ("upstream-fcfs", "round-robin")])
def test_a_description_of_several_replicas_is_served_by_a_router_that_its_system_can_have(
    system: str, router: str
) -> None:
    alone = spec_of({**SINGLE, "num_requests": 20}, system)
    several = alone.model_copy(update={"replicas": 2})
    found = simulate_point(several)
    run = simulate_cluster(alone, replicas=2, router=router).whole
    assert found["requests"] == 20
    assert {name: found[name] for name in ("e2e_mean_ms", "steps")} == {
        name: summarise(run)[name] for name in ("e2e_mean_ms", "steps")
    }
    assert 0 < found["device_busy_fraction"] <= 1
    with pytest.raises(ValueError, match="replicas=2: must be 1 here"):
        simulate(several)


def test_nothing_is_left_of_the_engines_of_a_run() -> None:
    """Benchmarks run hundreds of clusters in one process."""
    before = {id(one) for one in engines()}
    simulate_cluster(spec_of(SINGLE | {"num_requests": 10}), replicas=2, router="least")
    assert not [one for one in engines() if id(one) not in before]


def engines() -> list[SimulatedEngine]:
    return [one for one in gc.get_objects() if isinstance(one, SimulatedEngine)]
