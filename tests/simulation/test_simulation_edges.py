"""Edges of the simulator: nothing to do, too much, or nonsense; and decisions equal to those of the engine loop."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.audit import audit_drained
from tests.support.engine_loop import EngineLoop
from tests.support.fake_runner import FakeRunner
from tests.support.simulation_parts import (
    ListWorkload,
    PerTokenCost,
    ask,
    crowd,
    make_engine,
    rows,
    simulate,
)
from vllm_ext.config import ConfigError
from vllm_ext.contract import Admission, Room, Step
from vllm_ext.simulation import run
from vllm_ext.simulation.engine.simulated_engine import IDLE_STEP_S
from vllm_ext.simulation.measure.run_data import Decision, Stalled
from vllm_ext.simulation.run import build_scheduler
from vllm_ext.simulation.spec import UPSTREAM, EngineSpec, RecordSpec, SimulationSpec, checked
from vllm_ext.simulation.workloads.requests import SimRequest, Slo
from vllm_ext.simulation.workloads.spec import WorkloadSpec
from vllm_ext.systems import System, known, register
from vllm_ext.systems.alise import RemainingTimeLevels


@pytest.mark.parametrize(("system", "sources", "refused"), [
    ("alise", None, True), ("alise", ["retrieval"], False), ("past-future", None, False),
    ("upstream-fcfs", None, False),
])  # fmt: skip
def test_predictions_that_nobody_would_hear_are_refused(system: str, sources: list[str] | None, refused: bool) -> None:
    options = {} if sources is None else {"prediction": {"sources": sources}}
    spec = SimulationSpec(
        engine=EngineSpec(system=system, options=options), workload=WorkloadSpec(announce="predicted", num_requests=1)
    )
    if refused:
        with pytest.raises(ConfigError, match=r"engine.options.prediction.sources=.*: must name 'retrieval' where"):
            checked(spec)
    else:
        assert checked(spec).workload == spec.workload


def test_empty_workload_takes_no_time() -> None:
    data, decisions = simulate([])
    assert (len(data.requests), decisions, data.duration_s, data.counters["steps"]) == (0, [], 0.0, 0)


def test_single_token_answer_has_no_gap() -> None:
    data, _ = simulate([ask("a", prompt=1, output=1)])
    row = rows(data.requests)["a"]
    assert row["first_token_s"] == row["finish_s"] == 1.0
    assert math.isnan(row["max_gap_s"])
    assert data.gaps.count == 0


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("options", "reason", "tokens"),
    [
        ({"output": 9, "max_tokens": 4}, "length", 4),
        ({"output": 4, "max_tokens": 4}, "stop", 4),
        ({"prompt": 150, "output": 50, "max_tokens": 50}, "length", 10),
        ({"prompt": 159, "output": 50, "max_tokens": 50}, "length", 1),
    ],
    ids=["bound", "end at the bound", "context full", "one token of room"],
)
def test_output_is_cut_at_the_bound_and_the_context(depth: int, options: Any, reason: str, tokens: int) -> None:
    engine = make_engine([ask("a", **options)], async_scheduling=depth == 2)
    engine.run()
    row = rows(engine.collector.table)["a"]
    assert (row["finish_reason"], row["output_tokens"]) == (reason, tokens)
    assert row["true_output_tokens"] == options["output"]
    audit_drained(engine.scheduler)


def test_stop_at_a_moment_counts_what_is_left() -> None:
    """At 10: a has been answered, b runs, c arrived during the last step, d has not come."""
    asked = [ask("a"), ask("b", 5.0, output=60), ask("c", 9.9), ask("d", 10.5), ask("e", 50.0)]
    data, _ = simulate(asked, max_time_s=10.0)
    assert data.requests.column("req_id").tolist() == ["a"]
    assert data.counters["unfinished_requests"] == 2
    assert data.duration_s == 10.0
    left = rows(data.unserved)
    assert {name: (row["finish_reason"], row["output_tokens"]) for name, row in left.items()} == {
        "b": ("unfinished", 5),
        "c": ("unfinished", 0),
    }


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_requests_that_are_cut_off_have_all_their_tokens_whoever_is_hidden(depth: int) -> None:
    asked = [ask(f"r{i}", i / 4, prompt=10 + i, output=100, max_tokens=140, slo=Slo(tbt_s=2.0)) for i in range(6)]
    found = []
    for exact in (True, False):
        engine = make_engine(asked, exact=exact, async_scheduling=depth == 2)
        engine.run(33.5)
        found.append(list(engine.collector.unserved.rows()))
        assert {row["output_tokens"] for row in found[-1]} <= set(range(25, 35))
    assert repr(found[0]) == repr(found[1])


def test_gap_of_a_preempted_request_counts_until_the_run_is_cut_off() -> None:
    engine = make_engine(crowd(), num_blocks=14)
    engine.run(25.0)
    left = rows(engine.collector.unserved)
    open_s = {name: 25.0 - live.last_token_s for name, live in engine.collector.live.items() if live.output_tokens}
    assert max(open_s.values()) > 1.0, "somebody lost its KV and waits"
    assert all(left[name]["max_gap_s"] >= gap_s for name, gap_s in open_s.items())


def test_stop_while_idle_is_exact() -> None:
    data, _ = simulate([ask("a"), ask("b", 50.0)], max_time_s=10.0)
    assert (data.duration_s, data.counters["unfinished_requests"]) == (10.0, 0)


def test_pool_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_model_len=160: must fit.*holds 144 tokens \(10 blocks of 16"):
        simulate([ask("a")], num_blocks=10)
    simulate([ask("a", prompt=150, output=9)], num_blocks=11)


def _late(request: SimRequest, finished_s: float, output_ids: Any) -> list[SimRequest]:
    return [ask("b", finished_s - 1)]


@pytest.mark.parametrize(
    ("workload", "options", "message"),
    [
        ([], {"system": "no-such"}, r"(?s)no-such.*fcfs.*alise"),
        ([], {"options": {"ordering": {}}}, r"options=.*must be empty for upstream-fcfs"),
        *(
            ([ask("a", 1.0), ask("b", moment)], {}, r"arrival_s=.* of b: must be a number, and not below 1\.0")
            for moment in (0.5, -1.0, math.nan, math.inf)
        ),
        (ListWorkload([ask("a")], _late), {}, r"arrival_s=2.0 of b: .*not below 3.0, when a ended"),
        ([ask("a"), ask("a", 0.5)], {}, "req_id='a'"),
        *(([ask("a", **{name: 0})], {}, "of a: must be at least 1") for name in ("prompt", "output", "max_tokens")),
    ],
)
def test_what_can_not_be_run_is_an_error_and_no_rejection(workload: Any, options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(workload, **options)


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_scheduler_that_admits_nobody_is_noticed(depth: int) -> None:
    engine = make_engine([ask("a")], async_scheduling=depth == 2)
    engine.scheduler.max_num_active_reqs = 0
    with pytest.raises(Stalled, match=r"unfinished: .'a'"):
        engine.run()


def test_scheduler_that_admits_nobody_may_still_wait_for_an_abort() -> None:
    engine = make_engine([ask("a", abort_after_s=30.0)])
    engine.scheduler.max_num_active_reqs = 0
    engine.run()
    assert rows(engine.collector.table)["a"]["finish_s"] == pytest.approx(30.0, abs=2 * IDLE_STEP_S)


@dataclass(frozen=True, kw_only=True)
class AdmitsNobody(Admission):
    def select(self, step: Step, room: Room) -> None:
        pass


register(System(name="test-sim-admits-nobody", ordering=RemainingTimeLevels, admission=AdmitsNobody))


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_policy_that_admits_nobody_costs_time_and_not_the_run(depth: int) -> None:
    """The steered scheduler takes the plan away for a step: a is admitted after one sleep."""
    data, _ = simulate([ask("a")], system="test-sim-admits-nobody", async_scheduling=depth == 2)
    assert rows(data.requests)["a"]["first_scheduled_s"] == IDLE_STEP_S
    assert data.counters["empty_steps"] >= 1


def test_progress_is_reported_at_the_end() -> None:
    engine = make_engine([ask(f"r{i}", output=60) for i in range(40)], max_num_seqs=4)
    seen: list[tuple[float, int]] = []
    engine._on_progress = lambda now, ended: seen.append((now, ended))
    engine.run()
    assert seen
    assert seen == sorted(seen)


# --- the same decisions as the loop that checks the KV ----------------------------------------------------------------


def decisions_of_loop(system: str, depth: int, caching: bool, clock: Callable[[], float]) -> list[Decision]:
    """What the engine loop decides for the crowd, with a runner that checks every KV slot."""
    engine = make_engine([], num_blocks=14, system=system, prefix_caching=caching, async_scheduling=depth == 2)
    scheduler = engine.scheduler
    if hasattr(scheduler, "clock"):
        scheduler.clock = clock
    lengths = {request.req_id: request.output_tokens for request in crowd()}
    loop = EngineLoop(scheduler, FakeRunner(output_lengths=lengths, pipelined=depth == 2), depth=depth)
    for request in crowd():
        loop.add(engine._make_request(request))
    loop.run_until_idle(max_steps=4000)
    return loop.decisions


_LONG_S = 100.0
"""The crowd takes vLLM 2 s of virtual time."""


@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("system", [*UPSTREAM, *(n for n in known(unserved=True) if not n.startswith("test-"))])
def test_decisions_equal_those_of_the_engine_loop(system: str, depth: int, caching: bool) -> None:
    """The simulated run goes first and notes what the clock said; the loop's scheduler reads the same, in order."""
    engine = make_engine(
        crowd(), PerTokenCost(), num_blocks=14, system=system, prefix_caching=caching, async_scheduling=depth == 2
    )
    readings: list[float] = []
    if hasattr(engine.scheduler, "clock"):
        engine.scheduler.clock = lambda: readings.append(engine.clock()) or readings[-1]  # type: ignore[func-returns-value]
    engine.run(_LONG_S)
    assert not list(engine.collector.unserved.rows()), "it goes on for ever"
    replayed = iter(readings)
    assert engine.decisions == decisions_of_loop(system, depth, caching, lambda: next(replayed))
    assert next(replayed, None) is None, "the loop asked for the time less often"
    audit_drained(engine.scheduler)
    if system in ("fcfs", *UPSTREAM):
        assert engine.collector.preemptions, "the pool was large enough after all"


def test_decisions_are_kept_only_when_asked_for() -> None:
    assert simulate([ask("a")], record=RecordSpec())[1] == []


def test_a_run_that_ended_leaves_no_scheduler_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scheduler and engine form a cycle; in a sweep of hundreds of runs in one process they must not add up."""
    built: list[weakref.ref[Any]] = []

    def remember(*args: Any, **options: Any) -> Any:
        scheduler = build_scheduler(*args, **options)
        built.append(weakref.ref(scheduler))
        return scheduler

    monkeypatch.setattr(run, "build_scheduler", remember)
    for system in ("upstream-fcfs", "alise"):
        engine = EngineSpec(system=system, max_num_seqs=4)
        run.simulate(SimulationSpec(engine=engine, workload=WorkloadSpec(source="alpaca-like", num_requests=5)))
    assert [reference() for reference in built] == [None, None]
