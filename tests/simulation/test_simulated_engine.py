"""Steps, arrivals and aborts at the moments worked out on paper, and decisions equal to those of the engine loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ext.config import ConfigError
from vllm_ext.policies.admission.best_set import BestSet
from vllm_ext.policies.ordering.remaining_time import RemainingTimeLevels
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import StepView
from vllm_ext.simulation.audit import audit_drained
from vllm_ext.simulation.engine_loop import Decision, EngineLoop, Stalled
from vllm_ext.simulation.fake_runner import FakeRunner
from vllm_ext.simulation.requests import SimRequest
from vllm_ext.simulation.run import UPSTREAM, build_scheduler
from vllm_ext.simulation.simulated_engine import IDLE_STEP_S
from vllm_ext.simulation.spec import RecordSpec
from vllm_ext.systems import System, known, register

from .parts import (
    ListWorkload,
    PerTokenCost,
    SteadyCost,
    ask,
    crowd,
    engine_spec,
    make_engine,
    make_factory,
    rows,
    simulate,
    token_times,
)

DEVICE_BOUND = SteadyCost(device=1.0, host=0.25)
HOST_BOUND = SteadyCost(device=0.25, host=1.0)


def times(workload: Any, cost: SteadyCost, **options: Any) -> dict[str, list[float]]:
    """Moments of all tokens by request."""
    return token_times(simulate(workload, cost, **options)[0].requests)


# --- timing, depth 1: schedule, host, device, output; a step takes 1.25 s ---------------------------------------------


@pytest.mark.parametrize("cost", [DEVICE_BOUND, HOST_BOUND], ids=["device-bound", "host-bound"])
def test_synchronous_step_takes_host_plus_device(cost: SteadyCost) -> None:
    assert times([ask("a")], cost) == {"a": [1.25, 2.5, 3.75]}


@pytest.mark.parametrize(
    ("arrival_s", "expected"),
    [(1.0, [2.5, 3.75]), (1.25, [2.5, 3.75]), (1.2500001, [3.75, 5.0])],
    ids=["during a step", "at its end", "just after its end"],
)
def test_synchronous_arrival_joins_the_next_step(arrival_s: float, expected: list[float]) -> None:
    found = times([ask("a"), ask("b", arrival_s, output=2)], DEVICE_BOUND)
    assert found == {"a": [1.25, 2.5, 3.75], "b": expected}


def test_idle_engine_starts_a_step_at_the_arrival() -> None:
    found = times([ask("a", output=1), ask("b", 100.5, output=2)], DEVICE_BOUND)
    assert found == {"a": [1.25], "b": [101.75, 103.0]}


def test_engine_does_not_sleep_after_the_last_request() -> None:
    """The empty step that tells the runner of the end costs nothing, so that an arrival right after it is served."""
    data, decisions = simulate([ask("a", output=1), ask("b", 1.25 + 2.0**-20, output=1)], DEVICE_BOUND)
    assert token_times(data.requests)["b"] == [2.5 + 2.0**-20]
    assert [decision.num_tokens for decision in decisions] == [10, 0, 10, 0]
    assert data.duration_s == 2.5 + 2.0**-20
    assert data.counters["empty_steps"] == 2


def test_requests_of_one_moment_are_served_in_the_order_they_are_given() -> None:
    found = simulate([ask("b", 0.5, output=1), ask("a", 0.5, output=1)], DEVICE_BOUND, max_num_seqs=1)[0].requests
    assert token_times(found) == {"b": [1.75], "a": [3.0]}


def test_chunked_prompt_yields_its_first_token_after_the_last_chunk() -> None:
    data, decisions = simulate([ask("a", prompt=70, output=2)], DEVICE_BOUND, max_num_batched_tokens=32)
    assert token_times(data.requests) == {"a": [3.75, 5.0]}
    assert [decision.num_tokens for decision in decisions] == [32, 32, 6, 1, 0]


def test_request_waits_for_a_seat() -> None:
    data, _ = simulate([ask("a", output=2), ask("b", 0.5, output=1)], DEVICE_BOUND, max_num_seqs=1)
    row = rows(data.requests)["b"]
    assert (row["first_scheduled_s"], row["first_token_s"], row["finish_s"]) == (2.5, 3.75, 3.75)
    assert row["waited_s"] == 2.0


# --- timing, depth 2 --------------------------------------------------------------------------------------------------


def test_asynchronous_device_bound_steps_follow_each_other_without_a_gap() -> None:
    """s1 at 0, device 0.25-1.25; s2 at 0.25, device until 2.25; u1, s3 at 1.25, device until 3.25; u2 at 2.25; ..."""
    data, decisions = simulate([ask("a", max_tokens=3)], DEVICE_BOUND, async_scheduling=True)
    assert token_times(data.requests) == {"a": [1.25, 2.25, 3.25]}
    assert [decision.num_tokens for decision in decisions] == [10, 1, 1, 0, 0]
    assert data.counters["device_busy_s"] == 3.0


def test_asynchronous_step_after_an_unforeseen_end_is_wasted() -> None:
    """The end token of step 3 is seen at 3.25, when step 4 has been on the device since then."""
    data, decisions = simulate([ask("a")], DEVICE_BOUND, async_scheduling=True)
    assert token_times(data.requests) == {"a": [1.25, 2.25, 3.25]}
    assert [decision.num_tokens for decision in decisions][:4] == [10, 1, 1, 1]
    assert data.counters["device_busy_s"] == 4.0


def test_asynchronous_host_bound_steps_take_the_hosts_time_each() -> None:
    """s1 at 0; s2 at 1, and the host is busy with it until 2, when it sees step 1; s3 at 2, u2 at 3; u3 waits to 3.25.

    A host that schedules step 3 while it still prepares step 2 would serve two steps in the time of one.
    """
    assert times([ask("a", max_tokens=3)], HOST_BOUND, async_scheduling=True) == {"a": [2.0, 3.0, 3.25]}


def test_asynchronous_host_bound_rate_is_that_of_the_host() -> None:
    data, _ = simulate([ask("a", output=40)], HOST_BOUND, async_scheduling=True)
    assert set(data_gaps(data)[:-1]) == {1.0}
    assert data.duration_s >= 40 * 1.0


def data_gaps(data: Any) -> list[float]:
    moments = token_times(data.requests)["a"]
    return [after - before for before, after in zip(moments, moments[1:], strict=False)]


@pytest.mark.parametrize(
    ("arrival_s", "first_token_s"),
    [(0.25, 2.25), (0.3, 3.25), (1.0, 3.25), (1.25, 3.25), (1.3, 4.25)],
    ids=["while step 1 is launched", "while step 2 is launched", "blocked on step 1", "at its end", "just after it"],
)
def test_asynchronous_arrival_joins_the_next_step_to_be_scheduled(arrival_s: float, first_token_s: float) -> None:
    found = times([ask("a", output=20, max_tokens=20), ask("b", arrival_s, output=1)], DEVICE_BOUND,
                  async_scheduling=True)  # fmt: skip
    assert found["b"] == [first_token_s]
    assert found["a"] == [1.25 + step for step in range(20)]


def test_asynchronous_core_sleeps_when_it_scheduled_nothing_and_looks_again() -> None:
    """b arrives after a's last step (3.25) while the core sleeps: scheduled at its end, as in ``_process_engine_step``."""
    late = 3.25 + IDLE_STEP_S / 2
    data, _ = simulate([ask("a", max_tokens=3), ask("b", late, output=1, max_tokens=1)], DEVICE_BOUND,
                       async_scheduling=True)  # fmt: skip
    assert rows(data.requests)["b"]["first_scheduled_s"] == 3.25 + IDLE_STEP_S


# --- aborts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("abort_after_s", "reason", "tokens"),
    [(1.25, "abort", 0), (1.26, "stop", 1), (0.5, "abort", 0), (0.0, "abort", 0)],
    ids=["at the end of its step", "after it", "during its step", "at once"],
)
def test_abort_by_the_end_of_a_step_comes_before_its_output(
    depth: int, abort_after_s: float, reason: str, tokens: int
) -> None:
    asked = [ask("a", output=1, abort_after_s=abort_after_s)]
    engine = make_engine(asked, DEVICE_BOUND, async_scheduling=depth == 2)
    engine.run()
    row = rows(engine._collector.table)["a"]
    assert (row["finish_reason"], row["output_tokens"]) == (reason, tokens)
    assert row["finish_s"] == (0.0 if abort_after_s == 0 else 1.25)
    audit_drained(engine.scheduler)


def test_abort_in_the_middle_keeps_the_tokens_that_came() -> None:
    data, _ = simulate([ask("a", output=30, abort_after_s=3.0)], DEVICE_BOUND)
    row = rows(data.requests)["a"]
    assert (row["finish_reason"], row["output_tokens"], row["finish_s"]) == ("abort", 2, 3.75)
    assert token_times(data.requests)["a"] == [1.25, 2.5]


def test_abort_while_waiting_for_a_seat_leaves_no_trace_of_service() -> None:
    asked = [ask("a"), ask("b", 0.5, abort_after_s=1.0), ask("c", 0.75, output=1)]
    data, decisions = simulate(asked, DEVICE_BOUND, max_num_seqs=1)
    row = rows(data.requests)["b"]
    assert (row["finish_reason"], row["finish_s"], row["waited_s"]) == ("abort", 2.5, 2.0)
    assert math.isnan(row["first_scheduled_s"])
    assert math.isnan(row["first_token_s"])
    assert all("b" not in dict(decision.scheduled) for decision in decisions)
    assert token_times(data.requests)["c"] == [5.0]


def test_abort_before_the_engine_core_looked_is_never_scheduled() -> None:
    """It comes and goes while step 1 runs."""
    data, decisions = simulate([ask("a"), ask("b", 0.5, abort_after_s=0.25)], DEVICE_BOUND)
    assert rows(data.requests)["b"]["finish_reason"] == "abort"
    assert rows(data.requests)["b"]["finish_s"] == 1.25
    assert all(decision.new == ("a",) for decision in decisions[:1])
    assert all("b" not in decision.new for decision in decisions)


def test_abort_after_the_end_changes_nothing() -> None:
    without, _ = simulate([ask("a"), ask("b", 10.0)], DEVICE_BOUND)
    with_abort, _ = simulate([ask("a", abort_after_s=5.0), ask("b", 10.0)], DEVICE_BOUND)
    assert list(without.requests.rows()).__repr__() == list(with_abort.requests.rows()).__repr__()
    assert len(with_abort.requests) == 2


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_seat_of_an_aborted_request_goes_to_the_next(depth: int) -> None:
    asked = [ask("a", output=30, abort_after_s=2.0), ask("b", 0.5, output=1)]
    engine = make_engine(asked, DEVICE_BOUND, max_num_seqs=1, async_scheduling=depth == 2)
    engine.run()
    found = rows(engine._collector.table)
    assert found["b"]["first_scheduled_s"] == found["a"]["finish_s"] == (2.5 if depth == 1 else 2.25)
    audit_drained(engine.scheduler)


# --- clients that go on -----------------------------------------------------------------------------------------------


def chain(think_s: float, turns: int) -> Callable[[SimRequest, float, Any], list[SimRequest]]:
    """A client that asks again after thinking."""

    def follow_ups(request: SimRequest, finished_s: float, output_ids: Any) -> list[SimRequest]:
        turn = int(request.req_id[1:]) + 1
        return [ask(f"t{turn}", finished_s + think_s, output=2)] if turn < turns else []

    return follow_ups


@pytest.mark.parametrize("think_s", [0.0, 0.0001, 0.5], ids=["none", "shorter than a sleep", "long"])
def test_closed_loop_cycle_is_service_plus_think(think_s: float) -> None:
    workload = ListWorkload([ask("t0", output=2)], chain(think_s, 5))
    data, _ = simulate(workload, DEVICE_BOUND)
    ends = [row["finish_s"] for row in data.requests.rows()]
    assert ends == pytest.approx([2.5 + turn * (2.5 + think_s) for turn in range(5)], rel=0, abs=1e-12)


def test_client_learns_when_its_request_ended_and_what_it_got() -> None:
    workload = ListWorkload([ask("a"), ask("b", max_tokens=2), ask("c", output=30, abort_after_s=1.5)])
    simulate(workload, DEVICE_BOUND)
    assert sorted(workload.ended) == [("a", 3.75, [16, 16, 2]), ("b", 2.5, [16, 16]), ("c", 2.5, [16])]


def test_follow_up_of_an_aborted_request_joins_the_step_of_that_moment() -> None:
    """b is aborted in the queue, seen at 2.5; what its client sends next reaches the core before it schedules."""

    def again(request: SimRequest, finished_s: float, output_ids: Any) -> list[SimRequest]:
        return [ask("again", finished_s, output=1)] if request.req_id == "b" else []

    asked = [ask("a", output=9), ask("b", 1.5, output=9, abort_after_s=0.5)]
    data, _ = simulate(ListWorkload(asked, again), DEVICE_BOUND)
    assert rows(data.requests)["again"]["first_scheduled_s"] == 2.5


def test_rejected_request_is_counted_and_its_client_goes_on() -> None:
    def again(request: SimRequest, finished_s: float, output_ids: Any) -> list[SimRequest]:
        return [ask("short", finished_s + 1.0)] if request.req_id == "long" else []

    workload = ListWorkload([ask("long", 0.5, prompt=160), ask("other", 0.75)], again)
    data, _ = simulate(workload, DEVICE_BOUND)
    assert data.counters["rejected_requests"] == 1
    assert sorted(data.requests.texts("req_id")) == ["other", "short"]
    assert workload.ended[0] == ("long", 0.5, [])
    assert rows(data.requests)["short"]["arrival_s"] == 1.5


# --- edges ------------------------------------------------------------------------------------------------------------


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
    row = rows(engine._collector.table)["a"]
    assert (row["finish_reason"], row["output_tokens"]) == (reason, tokens)
    assert row["true_output_tokens"] == options["output"]
    audit_drained(engine.scheduler)


def test_stop_at_a_moment_counts_what_is_left() -> None:
    """At 10: a has been answered, b runs, c arrived during the last step, d has not come."""
    asked = [ask("a"), ask("b", 5.0, output=60), ask("c", 9.9), ask("d", 10.5), ask("e", 50.0)]
    data, _ = simulate(asked, max_time_s=10.0)
    assert data.requests.texts("req_id") == ["a"]
    assert data.counters["unfinished_requests"] == 2
    assert data.duration_s == 10.0


def test_stop_while_idle_is_exact() -> None:
    data, _ = simulate([ask("a"), ask("b", 50.0)], max_time_s=10.0)
    assert (data.duration_s, data.counters["unfinished_requests"]) == (10.0, 0)


def test_pool_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_model_len=160: must fit.*holds 144 tokens \(10 blocks of 16"):
        simulate([ask("a")], num_blocks=10)
    simulate([ask("a", prompt=150, output=9)], num_blocks=11)


def test_unknown_system_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"(?s)no-such.*fcfs.*alise"):
        simulate([], system="no-such")


def test_options_with_vllm_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="options=.*must be empty for upstream-fcfs"):
        simulate([], options={"ordering": {}})


@pytest.mark.parametrize("arrival_s", [0.5, -1.0, math.nan, math.inf])
def test_workload_out_of_order_is_an_error(arrival_s: float) -> None:
    with pytest.raises(ValueError, match="arrival_s=.* of b: must be a number, and not below 1.0"):
        simulate([ask("a", 1.0), ask("b", arrival_s)])


def test_follow_up_from_the_past_is_an_error() -> None:
    workload = ListWorkload([ask("a")], lambda request, finished_s, ids: [ask("b", finished_s - 1)])
    with pytest.raises(ValueError, match=r"arrival_s=2.0 of b: .*not below 3.0, when a ended"):
        simulate(workload)


def test_id_that_is_taken_is_an_error() -> None:
    with pytest.raises(ValueError, match="req_id='a'"):
        simulate([ask("a"), ask("a", 0.5)])


@pytest.mark.parametrize("broken", [{"prompt": 0}, {"output": 0}, {"max_tokens": 0}])
def test_lengths_below_one_are_an_error_and_no_rejection(broken: Any) -> None:
    with pytest.raises(ValueError, match="of a: must be at least 1"):
        simulate([ask("a", **broken)])


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_scheduler_that_admits_nobody_is_noticed(depth: int) -> None:
    engine = make_engine([ask("a")], async_scheduling=depth == 2)
    engine.scheduler.max_num_active_reqs = 0
    with pytest.raises(Stalled, match="unfinished: .'a'"):
        engine.run()


def test_scheduler_that_admits_nobody_may_still_wait_for_an_abort() -> None:
    engine = make_engine([ask("a", abort_after_s=30.0)])
    engine.scheduler.max_num_active_reqs = 0
    engine.run()
    assert rows(engine._collector.table)["a"]["finish_s"] == pytest.approx(30.0, abs=2 * IDLE_STEP_S)


@dataclass(frozen=True, kw_only=True)
class HoldsEverybody(BestSet):
    def plan(self, step: StepView) -> AdmissionPlan:
        return AdmissionPlan(hold=frozenset(request.req_id for request in step.waiting()))


register(System(name="test-sim-holds-everybody", ordering=RemainingTimeLevels, admission=HoldsEverybody))


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
def test_policy_that_holds_everybody_costs_time_and_not_the_run(depth: int) -> None:
    """The steered scheduler takes the plan away for a step: a is admitted after one sleep."""
    data, _ = simulate([ask("a")], system="test-sim-holds-everybody", async_scheduling=depth == 2)
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
    spec = engine_spec(system=system, prefix_caching=caching, async_scheduling=depth == 2)
    scheduler: Scheduler = build_scheduler(spec, 14)
    if hasattr(scheduler, "clock"):
        scheduler.clock = clock
    lengths = {request.req_id: request.output_tokens for request in crowd()}
    loop = EngineLoop(scheduler, FakeRunner(output_lengths=lengths, pipelined=depth == 2), depth=depth)
    factory = make_factory(spec)
    for request in crowd():
        loop.add(factory(request))
    loop.run_until_idle(max_steps=4000)
    return loop.decisions


@pytest.mark.parametrize("caching", [False, True], ids=["uncached", "cached"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("system", [*UPSTREAM, *(name for name in known() if not name.startswith("test-"))])
def test_decisions_equal_those_of_the_engine_loop(system: str, depth: int, caching: bool) -> None:
    """The simulated run goes first and notes what the clock said; the loop's scheduler reads the same, in order."""
    engine = make_engine(
        crowd(), PerTokenCost(), num_blocks=14, system=system, prefix_caching=caching, async_scheduling=depth == 2
    )
    readings: list[float] = []
    if hasattr(engine.scheduler, "clock"):
        engine.scheduler.clock = lambda: readings.append(engine.clock()) or readings[-1]  # type: ignore[func-returns-value]
    engine.run()
    assert engine.decisions
    replayed = iter(readings)
    assert engine.decisions == decisions_of_loop(system, depth, caching, lambda: next(replayed))
    assert next(replayed, None) is None, "the loop asked for the time less often"
    audit_drained(engine.scheduler)
    if system in ("fcfs", *UPSTREAM):
        assert engine._collector.preemptions, "the pool was large enough after all"


def test_decisions_are_kept_only_when_asked_for() -> None:
    assert simulate([ask("a")], record=RecordSpec())[1] == []
