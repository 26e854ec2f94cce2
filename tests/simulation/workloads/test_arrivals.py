"""When requests reach the server, how many there are, and what holds of every workload."""

from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.datasets import DatasetError
from vllm_ext.simulation.workloads import arrivals
from vllm_ext.simulation.workloads.build import mean_rate
from vllm_ext.simulation.workloads.requests import SimRequest

from .parts import jsonl, requests, serve, workload


def times(**fields: Any) -> np.ndarray[Any, Any]:
    return np.array([r.arrival_s for r in requests(**fields)])


def trace(folder: Path, *arrivals_s: float) -> str:
    rows = enumerate(arrivals_s)
    return jsonl(folder, *({"prompt_tokens": 10 + i, "output_tokens": 5, "timestamp": t} for i, t in rows))


def first(count: int, **options: float) -> np.ndarray[Any, Any]:
    return np.fromiter(itertools.islice(arrivals.stream(np.random.default_rng(5), **options), count), float)


@pytest.mark.parametrize("cv", [0.2, 1.0, 3.0])
def test_gaps_have_the_wanted_mean_and_coefficient_of_variation(cv: float) -> None:
    gaps = np.diff(first(100_000, rate_per_s=4.0, cv=cv))
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_poisson_process_is_the_beginning_of_the_stream() -> None:
    assert np.array_equal(arrivals.poisson(rate_per_s=3.0, count=5000, seed=5), first(5000, rate_per_s=3.0))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("field", ["rate_per_s", "cv"])
def test_stream_refuses_what_is_not_positive_before_it_begins(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        arrivals.stream(np.random.default_rng(0), **({"rate_per_s": 1.0, "cv": 1.0} | {field: value}))


@pytest.mark.parametrize("fields", [{}, {"arrivals": "gamma", "cv": 3.0}], ids=["poisson", "gamma"])
def test_two_rates_differ_by_the_time_scale_only(fields: dict[str, Any]) -> None:
    slow, fast = (times(num_requests=9000, rate_per_s=rate, **fields) for rate in (2.0, 8.0))
    np.testing.assert_allclose(slow, fast * 4)
    assert 9000 / slow[-1] == pytest.approx(2.0, rel=0.1)


def test_at_once_all_arrive_at_the_start() -> None:
    assert times(arrivals="at-once", num_requests=7).tolist() == [0.0] * 7


@pytest.mark.parametrize(
    ("recorded", "fields", "expected"),
    [
        ((100, 100, 101, 104), {}, [0, 0, 1, 4]),
        ((100, 100, 101, 104), {"rate_per_s": 0.5}, [0, 0, 1.5, 6]),
        ((100, 100, 101, 104), {"duration_s": 4}, [0, 0, 1]),
        ((100, 100, 101, 104), {"num_requests": 2}, [0, 0]),
        ((100, 100, 101, 104, 300), {"num_requests": 4, "rate_per_s": 0.5}, [0, 0, 1.5, 6]),
        ((100, 100, 101, 104, 300), {"duration_s": 5, "rate_per_s": 0.25}, [0, 0, 3, 12]),
        ((55,), {"rate_per_s": 2}, [0]),
        ((1, 2, 4, 9), {"min_prompt_tokens": 11}, [0, 2, 7]),
        ((1, 2, 4, 9, 11), {"skip_requests": 2, "num_requests": 2}, [0, 5]),
        ((1, 2, 4, 9, 11), {"skip_requests": 2, "duration_s": 6}, [0, 5]),
    ],
    ids=[
        "as they are",
        "stretched",
        "ended by time",
        "ended by number",
        "a number, then stretched",
        "a time, then stretched",
        "one needs no rate",
        "filtered",
        "a part by numbers",
        "a part by number and time",
    ],
)
def test_recorded_times_start_at_zero_and_keep_their_gaps(
    tmp_path: Path, recorded: tuple[float, ...], fields: dict[str, Any], expected: list[float]
) -> None:
    assert times(source=trace(tmp_path, *recorded), arrivals="recorded", **fields).tolist() == expected


def test_part_of_a_recording_at_its_own_rate_arrives_as_recorded_bit_for_bit(tmp_path: Path) -> None:
    """Once the gaps of the whole file were stretched: the first minute of a bursty trace ran five times too fast."""
    source = trace(tmp_path, *(0.1 * i**1.5 for i in range(50)), *(1000.0 + i for i in range(50)))
    part = {"source": source, "arrivals": "recorded", "num_requests": 37}
    as_recorded = times(**part)
    own_rate = mean_rate(as_recorded.tolist())
    assert times(**part, rate_per_s=own_rate).tolist() == as_recorded.tolist()
    np.testing.assert_allclose(times(**part, rate_per_s=3 * own_rate) * 3, as_recorded, rtol=1e-12)


def test_recorded_times_must_exist_not_decrease_and_span_what_is_stretched(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"rows.jsonl: usable row 3: arrives 3 s before the row above"):
        workload(source=trace(tmp_path, 1, 5, 2), arrivals="recorded")
    with pytest.raises(ValueError, match=r"rate_per_s=2.0: must be left out; all requests of rows.jsonl arrive at onc"):
        workload(source=trace(tmp_path, 3, 3), arrivals="recorded", rate_per_s=2)
    with pytest.raises(ValueError, match=r"arrivals='recorded': fixed:10:20 has no arrival time"):
        workload(arrivals="recorded", num_requests=1)


def test_closed_loop_clients_send_when_their_last_request_ended_and_they_have_thought() -> None:
    load = workload(arrivals="closed-loop", clients=2, think_s=3, think="constant", num_requests=5)
    served = serve(load, latency_s=2)
    assert [r.arrival_s for r in served] == [0, 0, 5, 5, 10]
    assert len({r.req_id for r in served}) == 5


def test_closed_loop_client_comes_back_after_an_aborted_request_and_stops_at_the_end() -> None:
    load = workload(arrivals="closed-loop", think="constant", duration_s=6, abort_share=1, abort_mean_s=1)
    request = next(load.start())
    (following,) = load.after(request, 5.9, [])
    assert following.arrival_s == 5.9
    assert list(load.after(following, 6.0, [7])) == []


def test_file_that_would_run_out_is_refused(tmp_path: Path) -> None:
    source = trace(tmp_path, 1, 2, 3)
    with pytest.raises(ValueError, match=r"num_requests=4: too many, rows.jsonl has 3 usable rows"):
        workload(source=source, num_requests=4)
    with pytest.raises(ValueError, match=r"num_requests=3: too many, rows.jsonl has 3 usable rows"):
        workload(source=source, num_requests=3, skip_requests=1)
    with pytest.raises(ValueError, match=r"skip_requests=3: too many, rows.jsonl has 3 usable rows"):
        workload(source=source, skip_requests=3)
    with pytest.raises(ValueError, match=r"duration_s=1000.0: too long, after .* rows.jsonl has 3 usable rows"):
        workload(source=source, duration_s=1000)
    assert len(times(source=source)) == 3, "without a bound the file is served once"
    assert len(times(source=source, sample="with-replacement", num_requests=50)) == 50


def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    load = workload(source="sharegpt-vllm", rate_per_s=10, num_requests=15_000)
    tracemalloc.start()
    try:
        sizes = [tracemalloc.get_traced_memory()[0] for i, _ in enumerate(load.start()) if i in (3000, 14_999)]
    finally:
        tracemalloc.stop()
    assert sizes[1] < sizes[0] + 50_000, "a few bytes per request at most"


KINDS = st.sampled_from(
    [{}, {"arrivals": "gamma", "cv": 2.0}, {"arrivals": "at-once"}]
    + [{"arrivals": "closed-loop", "clients": clients} for clients in (1, 2, 5)]
)
FIELDS = st.fixed_dictionaries(
    {
        "source": st.sampled_from(["pensieve-sharegpt", "alpaca-like", "fixed:10:20"]),
        "num_requests": st.integers(0, 12),
        "think_s": st.sampled_from([0.0, 0.5, 60.0]),
        "system_prompt_tokens": st.integers(0, 32),
        "over_context": st.sampled_from(["drop", "cut"]),
        "seed": st.integers(0, 50),
    },
    optional={"max_model_len": st.integers(64, 2048), "duration_s": st.sampled_from([5.0, 40.0])},
)


@settings(max_examples=150)
@given(fields=FIELDS, kind=KINDS, latency_s=st.sampled_from([0.25, 1.0, 4.0]))
def test_laws_of_every_workload(fields: dict[str, Any], kind: dict[str, Any], latency_s: float) -> None:
    load = workload(**fields, **kind)
    next(load.start(), None)  # a run that is broken off leaves nothing behind
    served = serve(load, latency_s)
    assert served == serve(load, latency_s)
    sessions: dict[str, list[SimRequest]] = {}
    for request in served:
        sessions.setdefault(request.req_id.split(".")[0], []).append(request)
    assert len({r.req_id for r in served}) == len(served)
    assert len(sessions) == fields["num_requests"] or (
        len(sessions) < fields["num_requests"] and "duration_s" in fields
    )
    if kind.get("clients") is not None:
        assert all(
            sum(s.arrival_s <= r.arrival_s < s.arrival_s + latency_s for s in served) <= kind["clients"] for r in served
        )
    firsts = [turns[0].token_ids[0] for turns in sessions.values() if turns[0].token_ids]
    assert len(set(firsts)) == len(firsts) or fields["system_prompt_tokens"]
    for turns in sessions.values():
        for number, r in enumerate(turns):
            assert r.arrival_s < fields.get("duration_s", float("inf"))
            assert min(r.prompt_tokens, r.output_tokens, r.max_tokens) >= 1
            assert r.prompt_tokens + min(r.output_tokens, r.max_tokens) <= fields.get("max_model_len", float("inf"))
            assert len(r.token_ids or ()) in (0, r.prompt_tokens)
            if number:
                before = turns[number - 1]
                assert r.arrival_s >= before.arrival_s + latency_s
                assert r.session_id == before.session_id is not None
                if fields["over_context"] == "drop":
                    assert list(r.token_ids or ())[: before.prompt_tokens] == list(before.token_ids or ())
