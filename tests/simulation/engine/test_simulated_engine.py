"""Steps, arrivals and aborts at the moments worked out on paper."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.audit import audit_drained
from tests.support.simulation_parts import ListWorkload, SteadyCost, ask, make_engine, rows, simulate, token_times
from vllm_ext.simulation.engine.simulated_engine import IDLE_STEP_S
from vllm_ext.simulation.workloads.requests import SimRequest

DEVICE_BOUND = SteadyCost(device=1.0, host=0.25)
HOST_BOUND = SteadyCost(device=0.25, host=1.0)


LONG = {"a": [1.25 + step for step in range(20)]}
ASYNC = {"async_scheduling": True}


def long_and(arrival_s: float) -> list[SimRequest]:
    return [ask("a", output=20, max_tokens=20), ask("b", arrival_s, output=1)]


@pytest.mark.parametrize(
    ("asked", "cost", "options", "expected"),
    [
        # Synchronous: schedule, host, device, output; a step takes 1.25 s whoever of the two takes longer.
        ([ask("a")], DEVICE_BOUND, {}, {"a": [1.25, 2.5, 3.75]}),
        ([ask("a")], HOST_BOUND, {}, {"a": [1.25, 2.5, 3.75]}),
        # Whoever arrives during a step, or at its end, joins the next one.
        ([ask("a"), ask("b", 1.0, output=2)], DEVICE_BOUND, {}, {"a": [1.25, 2.5, 3.75], "b": [2.5, 3.75]}),
        ([ask("a"), ask("b", 1.25, output=2)], DEVICE_BOUND, {}, {"a": [1.25, 2.5, 3.75], "b": [2.5, 3.75]}),
        ([ask("a"), ask("b", 1.2500001, output=2)], DEVICE_BOUND, {}, {"a": [1.25, 2.5, 3.75], "b": [3.75, 5.0]}),
        # An idle engine starts a step at the arrival.
        ([ask("a", output=1), ask("b", 100.5, output=2)], DEVICE_BOUND, {}, {"a": [1.25], "b": [101.75, 103.0]}),
        # Requests of one moment are served in the order in which they are given.
        ([ask("b", 0.5, output=1), ask("a", 0.5, output=1)], DEVICE_BOUND, {"max_num_seqs": 1},
         {"b": [1.75], "a": [3.0]}),
        # Asynchronous: s1 at 0, device 0.25-1.25; s2 at 0.25, device until 2.25; u1, s3 at 1.25, device until 3.25; ...
        ([ask("a", max_tokens=3)], DEVICE_BOUND, ASYNC, {"a": [1.25, 2.25, 3.25]}),
        # s1 at 0; s2 at 1, and the host is busy with it until 2, when it sees step 1; s3 at 2, u2 at 3; u3 waits to
        # 3.25. A host that schedules step 3 while it still prepares step 2 would serve two steps in the time of one.
        ([ask("a", max_tokens=3)], HOST_BOUND, ASYNC, {"a": [2.0, 3.0, 3.25]}),
        # An arrival joins the next step to be scheduled: while step 1 is launched, while step 2 is, while the host is
        # blocked on step 1, at its end, just after it.
        (long_and(0.25), DEVICE_BOUND, ASYNC, {**LONG, "b": [2.25]}),
        (long_and(0.3), DEVICE_BOUND, ASYNC, {**LONG, "b": [3.25]}),
        (long_and(1.0), DEVICE_BOUND, ASYNC, {**LONG, "b": [3.25]}),
        (long_and(1.25), DEVICE_BOUND, ASYNC, {**LONG, "b": [3.25]}),
        (long_and(1.3), DEVICE_BOUND, ASYNC, {**LONG, "b": [4.25]}),
    ],
)  # fmt: skip
def test_tokens_come_at_the_moments_worked_out_on_paper(
    asked: list[SimRequest], cost: SteadyCost, options: dict[str, Any], expected: dict[str, list[float]]
) -> None:
    assert token_times(simulate(asked, cost, **options)[0].requests) == expected


def test_engine_does_not_sleep_after_the_last_request() -> None:
    """The empty step that tells the runner of the end costs nothing, so that an arrival right after it is served."""
    data, decisions = simulate([ask("a", output=1), ask("b", 1.25 + 2.0**-20, output=1)], DEVICE_BOUND)
    assert token_times(data.requests)["b"] == [2.5 + 2.0**-20]
    assert [decision.num_tokens for decision in decisions] == [10, 0, 10, 0]
    assert data.duration_s == 2.5 + 2.0**-20
    assert data.counters["empty_steps"] == 2


def test_chunked_prompt_yields_its_first_token_after_the_last_chunk() -> None:
    data, decisions = simulate([ask("a", prompt=70, output=2)], DEVICE_BOUND, max_num_batched_tokens=32)
    assert token_times(data.requests) == {"a": [3.75, 5.0]}
    assert [decision.num_tokens for decision in decisions] == [32, 32, 6, 1, 0]


def test_request_waits_for_a_seat() -> None:
    data, _ = simulate([ask("a", output=2), ask("b", 0.5, output=1)], DEVICE_BOUND, max_num_seqs=1)
    row = rows(data.requests)["b"]
    assert (row["first_scheduled_s"], row["first_token_s"], row["finish_s"]) == (2.5, 3.75, 3.75)
    assert row["waited_s"] == 2.0


def test_asynchronous_step_after_an_unforeseen_end_is_wasted() -> None:
    """The end token of step 3 is seen at 3.25, when step 4 has been on the device since then."""
    data, decisions = simulate([ask("a")], DEVICE_BOUND, async_scheduling=True)
    assert token_times(data.requests) == {"a": [1.25, 2.25, 3.25]}
    assert [decision.num_tokens for decision in decisions][:4] == [10, 1, 1, 1]
    assert data.counters["device_busy_s"] == 4.0


def test_asynchronous_host_bound_rate_is_that_of_the_host() -> None:
    data, _ = simulate([ask("a", output=40)], HOST_BOUND, async_scheduling=True)
    gaps = [after - before for before, after in itertools.pairwise(token_times(data.requests)["a"])]
    assert set(gaps[:-1]) == {1.0}
    assert data.duration_s >= 40 * 1.0


def test_asynchronous_core_sleeps_when_it_scheduled_nothing_and_looks_again() -> None:
    """b arrives after a's last step (3.25) while the core sleeps: scheduled when it wakes."""
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
    row = rows(engine.collector.table)["a"]
    assert (row["finish_reason"], row["output_tokens"]) == (reason, tokens)
    assert row["finish_s"] == (0.0 if abort_after_s == 0 else 1.25)
    audit_drained(engine.scheduler)


@pytest.mark.parametrize(
    ("asked", "options", "expected"),
    [
        # In the middle: the tokens that came are kept.
        ([ask("a", output=30, abort_after_s=3.0)], {}, {"a": ("abort", 2, 3.75)}),
        # While it waits for a seat.
        ([ask("a"), ask("b", 0.5, abort_after_s=1.0), ask("c", 0.75, output=1)], {"max_num_seqs": 1},
         {"a": ("stop", 3, 3.75), "b": ("abort", 0, 2.5), "c": ("stop", 1, 5.0)}),
        # Without patience it leaves only while it has no token: a has its first after 1.25 s, b would after 5.
        ([ask("a", patience_s=1.5), ask("b", patience_s=1.5), ask("c", 0.5, patience_s=6.0, output=1)],
         {"max_num_seqs": 1}, {"a": ("stop", 3, 3.75), "b": ("abort", 0, 2.5), "c": ("stop", 1, 5.0)}),
        # It comes and goes while step 1 runs.
        ([ask("a"), ask("b", 0.5, abort_after_s=0.25)], {}, {"a": ("stop", 3, 3.75), "b": ("abort", 0, 1.25)}),
    ],
    ids=["midway", "in the queue", "no patience", "not yet seen"],
)  # fmt: skip
def test_abort_keeps_what_came_and_leaves_no_trace_of_service_where_there_was_none(
    asked: list[SimRequest], options: dict[str, Any], expected: dict[str, tuple[str, int, float]]
) -> None:
    data, decisions = simulate(asked, DEVICE_BOUND, **options)
    found = rows(data.requests)
    assert {
        name: (row["finish_reason"], row["output_tokens"], row["finish_s"]) for name, row in found.items()
    } == expected
    for name, row in found.items():
        if not row["output_tokens"]:
            assert math.isnan(row["first_scheduled_s"])
            assert math.isnan(row["first_token_s"])
            assert row["waited_s"] == row["finish_s"] - row["arrival_s"]
            assert all(name not in dict(decision.scheduled) for decision in decisions)


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
    found = rows(engine.collector.table)
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
    assert [(row["req_id"], row["finish_reason"]) for row in data.unserved.rows()] == [("long", "rejected")]
    assert sorted(data.requests.column("req_id").tolist()) == ["other", "short"]
    assert workload.ended[0] == ("long", 0.5, [])
    assert rows(data.requests)["short"]["arrival_s"] == 1.5


@pytest.mark.parametrize("exact", [True, False])
def test_what_a_predictor_said_orders_who_waits(exact: bool) -> None:
    asked = [ask("first", output=5, max_tokens=400)]
    for name, said in (("long", 300), ("short", 3)):
        asked.append(ask(name, 0.1, output=20, max_tokens=400))
        asked[-1].predicted = (said,) * 9
    sources = {"prediction": {"sources": ["retrieval", "history"]}}
    engine = make_engine(asked, DEVICE_BOUND, system="alise", options=sources, max_num_seqs=1, exact=exact)
    engine.run()
    times = token_times(engine.collector.table)
    assert times["first"][-1] < times["short"][0] < times["short"][-1] < times["long"][0]
