"""When requests reach the server, and how many there are."""

from __future__ import annotations

import tracemalloc
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_ext.datasets import DatasetError
from vllm_ext.simulation.requests import SimRequest, Workload
from vllm_ext.simulation.workloads.build import build
from vllm_ext.simulation.workloads.spec import WorkloadSpec


def workload(**fields: Any) -> Workload:
    return build(WorkloadSpec.model_validate({"source": "fixed:10:20"} | fields))


def times(**fields: Any) -> np.ndarray[Any, Any]:
    return np.array([r.arrival_s for r in workload(**fields).start()])


def trace(folder: Path, *arrivals_s: float) -> str:
    path = folder / "trace.csv"
    rows = "".join(f"{t},m,{10 + i},5,x,x\n" for i, t in enumerate(arrivals_s))
    path.write_text("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n" + rows)
    return str(path)


def serve(load: Workload, latency_s: float) -> list[SimRequest]:
    """A server that answers each request after the same time; returns the requests by arrival."""
    waiting, served = deque(load.start()), []
    while waiting:
        request = waiting.popleft()
        served.append(request)
        waiting.extend(load.after(request, request.arrival_s + latency_s, [7] * request.output_tokens))
        waiting = deque(sorted(waiting, key=lambda r: r.arrival_s))
    return served


@pytest.mark.parametrize("fields", [{}, {"arrivals": "gamma", "cv": 3.0}], ids=["poisson", "gamma"])
def test_two_rates_differ_by_the_time_scale_only(fields: dict[str, Any]) -> None:
    slow, fast = (times(num_requests=9000, rate_per_s=rate, **fields) for rate in (2.0, 8.0))
    np.testing.assert_allclose(slow, fast * 4)
    assert 9000 / slow[-1] == pytest.approx(2.0, rel=0.1)


def test_two_iterations_of_one_workload_are_equal_and_another_seed_differs() -> None:
    fields: dict[str, Any] = {"source": "sharegpt-like", "num_requests": 300, "announce": "hint", "announce_error": 0.1}
    load = workload(**fields)
    first, again = list(load.start()), list(load.start())
    assert first == again
    assert first != list(workload(**fields, seed=1).start())


def test_duration_ends_the_arrivals_and_the_expected_count_is_right() -> None:
    load = workload(rate_per_s=5, duration_s=200)
    arrived = [r.arrival_s for r in load.start()]
    assert arrived[-1] < 200
    assert len(arrived) == load.expected_requests == pytest.approx(1000, rel=0.1)


def test_at_once_all_arrive_at_the_start() -> None:
    load = workload(arrivals="at-once", num_requests=7)
    assert [r.arrival_s for r in load.start()] == [0.0] * 7
    assert load.expected_requests == 7


def test_recorded_times_start_at_zero_and_keep_their_gaps(tmp_path: Path) -> None:
    source = trace(tmp_path, 100, 100, 101, 104)
    assert times(source=source, arrivals="recorded").tolist() == [0, 0, 1, 4]
    assert times(source=source, arrivals="recorded", rate_per_s=0.5).tolist() == [0, 0, 1.5, 6]
    assert times(source=source, arrivals="recorded", duration_s=4).tolist() == [0, 0, 1]
    assert times(source=source, arrivals="recorded", num_requests=2).tolist() == [0, 0]


def test_recorded_times_of_one_request_need_no_rate(tmp_path: Path) -> None:
    assert times(source=trace(tmp_path, 55), arrivals="recorded", rate_per_s=2).tolist() == [0]


def test_filter_keeps_the_recorded_times_of_what_is_left(tmp_path: Path) -> None:
    kept = times(source=trace(tmp_path, 1, 2, 4, 9), arrivals="recorded", min_prompt_tokens=11)
    assert kept.tolist() == [0, 2, 7]


def test_recorded_times_must_not_decrease_and_must_exist(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"trace.csv: usable row 3: arrives 3 s before the row above"):
        workload(source=trace(tmp_path, 1, 5, 2), arrivals="recorded")
    with pytest.raises(ValueError, match=r"arrivals='recorded': fixed:10:20 has no arrival time"):
        workload(arrivals="recorded", num_requests=1)


def test_closed_loop_clients_send_when_their_last_request_ended_and_they_have_thought() -> None:
    load = workload(arrivals="closed-loop", clients=2, think_s=3, think="constant", num_requests=5)
    assert load.expected_requests == 5
    served = serve(load, latency_s=2)
    assert [r.arrival_s for r in served] == [0, 0, 5, 5, 10]
    assert len({r.req_id for r in served}) == 5


def test_closed_loop_think_times_are_exponential() -> None:
    served = serve(workload(arrivals="closed-loop", think_s=4, num_requests=4000), latency_s=1)
    thought = np.diff([r.arrival_s for r in served]) - 1
    assert thought.mean() == pytest.approx(4, rel=0.05)
    assert thought.std() == pytest.approx(4, rel=0.08)


def test_closed_loop_client_comes_back_after_an_aborted_request_and_stops_at_the_end() -> None:
    load = workload(arrivals="closed-loop", think="constant", duration_s=6, abort_share=1, abort_mean_s=1)
    first = next(load.start())
    assert load.expected_requests is None
    (following,) = load.after(first, 5.9, [])
    assert following.arrival_s == 5.9
    assert list(load.after(following, 6.0, [7])) == []


def test_closed_loop_begins_anew_after_a_run_that_was_broken_off() -> None:
    load = workload(source="sharegpt-like", arrivals="closed-loop", clients=3, num_requests=9)
    list(load.after(next(load.start()), 1.0, [7]))
    assert serve(load, 1.0) == serve(load, 1.0)


@given(clients=st.integers(1, 6), count=st.integers(0, 20), latency_s=st.floats(0.1, 5))
def test_closed_loop_never_has_more_in_flight_than_clients_and_sends_all(
    clients: int, count: int, latency_s: float
) -> None:
    served = serve(
        workload(arrivals="closed-loop", clients=clients, think_s=0.5, num_requests=count), latency_s=latency_s
    )
    assert len(served) == count
    for request in served:
        in_flight = [r for r in served if r.arrival_s <= request.arrival_s < r.arrival_s + latency_s]
        assert len(in_flight) <= clients


@pytest.mark.parametrize("arrivals", ["poisson", "gamma", "at-once", "closed-loop"])
def test_empty_workload_yields_nothing(arrivals: str) -> None:
    load = workload(arrivals=arrivals, num_requests=0)
    assert list(load.start()) == []
    assert load.expected_requests == 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"num_requests=None, duration_s=None: one must be given; fixed:10:20 has no end"),
        ({"arrivals": "at-once", "duration_s": 1}, r"num_requests=None: must be given for arrivals='at-once'"),
        ({"source": "no-such"}, r"source='no-such': must be a file, or one of the presets alpaca-like, .*fixed:PROMPT"),
        ({"sample": "with-replacement", "num_requests": 1}, r"sample='with-replacement': must be left out; .*a preset"),
        ({"max_model_len": 30, "system_prompt_tokens": 29}, r"system_prompt_tokens=29: must leave at least 2"),
        ({"min_turns": 2, "num_requests": 1}, r"min_turns=2: must be left out; .* a preset without conversations"),
        ({"max_prompt_tokens": 9, "num_requests": 1}, r"'fixed:10:20': 100000 requests in a row were left out; widen"),
    ],
)
def test_what_cannot_be_built_is_refused_naming_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workload(**fields)


def test_rate_zero_in_a_changed_copy_is_refused_too() -> None:
    spec = WorkloadSpec(source="fixed:1:1", num_requests=1).model_copy(update={"rate_per_s": 0.0})
    with pytest.raises(ValidationError, match=r"rate_per_s\n"):
        build(spec)


def test_file_that_would_run_out_is_refused(tmp_path: Path) -> None:
    source = trace(tmp_path, 1, 2, 3)
    with pytest.raises(ValueError, match=r"num_requests=4: too many, trace.csv has 3 usable rows"):
        workload(source=source, num_requests=4)
    with pytest.raises(ValueError, match=r"duration_s=1000.0: too long, after .* trace.csv has 3 usable rows"):
        workload(source=source, duration_s=1000)
    assert len(times(source=source)) == 3, "without a bound the file is served once"
    assert len(times(source=source, sample="with-replacement", num_requests=50)) == 50


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    load = workload(source="sharegpt-vllm", rate_per_s=10, num_requests=40_000)
    tracemalloc.start()
    try:
        sizes = [tracemalloc.get_traced_memory()[0] for i, _ in enumerate(load.start()) if i in (5000, 39_999)]
    finally:
        tracemalloc.stop()
    assert sizes[1] < sizes[0] + 50_000, "less than a byte per request"
