"""Traces parsed back: complete slices, no overlap in a lane, and sums that agree with the events."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.measure import perfetto
from vllm_ext.simulation.measure.perfetto import ENGINE, REQUESTS, write_trace
from vllm_ext.simulation.measure.run_data import (
    COLUMNS,
    Events,
    GapHistogram,
    RequestEvent,
    RequestRow,
    RequestTable,
    RunData,
    StepEvent,
    TimeSeries,
)

Trace = list[dict[str, Any]]


def make_run(
    requests: list[tuple[float, str, str]],
    steps: list[StepEvent] | None = None,
    *,
    series: TimeSeries | None = None,
    dropped: int = 0,
    duration_s: float = 20.0,
) -> RunData:
    return RunData(
        label="fcfs",
        requests=RequestTable(),
        gaps=GapHistogram(),
        series=series or TimeSeries(),
        events=Events(
            limit=100, steps=steps or [], requests=[RequestEvent(*event) for event in requests], dropped=dropped
        ),
        duration_s=duration_s,
    )


def load(path: Path) -> Trace:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: Trace = json.loads(data)["traceEvents"]
    return events


def trace_of(run: RunData, tmp_path: Path) -> Trace:
    write_trace(run, tmp_path / "trace.json")
    return load(tmp_path / "trace.json")


def slices(trace: Trace, pid: int) -> Trace:
    return [event for event in trace if event["ph"] == "X" and event["pid"] == pid]


def ns(microseconds: float) -> int:
    return round(microseconds * 1000)


def check_nesting(trace: Trace) -> None:
    """Within a lane slices are in order of time, and each lies wholly within or after the one before."""
    lanes: dict[tuple[int, int], Trace] = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    for lane in lanes.values():
        starts = [event["ts"] for event in lane]
        assert starts == sorted(starts)
        open_until: list[int] = []
        for event in lane:
            start, end = ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])
            assert end >= start
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1]
            open_until.append(end)


ONE_LIFE = [
    (1.0, "a", "waiting"),
    (2.0, "a", "prefill"),
    (2.5, "a", "decode"),
    (4.0, "a", "preempted"),
    (6.0, "a", "prefill"),
    (6.25, "a", "decode"),
    (7.0, "a", "stop"),
]


def test_a_request_is_one_slice_that_holds_a_slice_per_state_in_a_named_lane(tmp_path: Path) -> None:
    run = make_run(ONE_LIFE, [StepEvent(0.0, 1.0, 1, 1, 0, ())])
    numbers = {name: 7 for name, kind in COLUMNS.items() if kind == "int"}
    run.requests.append(RequestRow(req_id="a", tier="gold", **numbers))
    trace = trace_of(run, tmp_path)
    found = slices(trace, REQUESTS)
    assert [(s["name"], s["ts"] / 1e6, s["dur"] / 1e6) for s in found] == [
        ("a", 1.0, 6.0),
        ("waiting", 1.0, 1.0),
        ("prefill", 2.0, 0.5),
        ("decode", 2.5, 1.5),
        ("preempted", 4.0, 2.0),
        ("prefill", 6.0, 0.25),
        ("decode", 6.25, 0.75),
    ]
    assert [(i["name"], i["ts"] / 1e6, i["s"]) for i in trace if i["ph"] == "i"] == [
        ("preempted", 4.0, "t"),
        ("stop", 7.0, "t"),
    ]
    assert found[0]["args"] == {
        "outcome": "stop", "tier": "gold", "prompt_tokens": 7, "cached_prompt_tokens": 7, "output_tokens": 7,
        "predicted_tokens": 7, "preemptions": 7,
    }  # fmt: skip
    named = {(m["pid"], m["tid"]) for m in trace if m["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in trace if event["ph"] in "Xi"} == named
    assert {m["args"]["name"] for m in trace if m["name"] == "process_name"} == {"engine: fcfs", "requests"}


def test_steps_are_named_by_their_work_and_carry_it(tmp_path: Path) -> None:
    steps = [
        StepEvent(0.0, 0.5, 2, 100, 0, ()),
        StepEvent(0.5, 0.6, 3, 20, 2, ("a",)),
        StepEvent(0.6, 0.7, 2, 0, 2, ()),
    ]
    found = slices(trace_of(make_run([], steps), tmp_path), ENGINE)
    assert [step["name"] for step in found] == ["prefill", "prefill+decode", "decode"]
    assert found[1]["args"] == {"requests": 3, "prefill_tokens": 20, "decode_tokens": 2, "preempted": ["a"]}
    assert {step["tid"] for step in found} == {1}
    assert [(step["ts"], step["dur"]) for step in found] == [(0.0, 5e5), (5e5, 1e5), (6e5, 1e5)]


def test_counters_follow_the_time_series(tmp_path: Path) -> None:
    series = TimeSeries()
    series.add(0.0, 3, 5, 0.25, 0.0, 0.0, 0, 0, 0, 0)
    series.add(2.0, 4, 6, 0.5, 0.0, 8e6, 0, 0, 0, 0)
    trace = trace_of(make_run([], series=series), tmp_path)
    found = [(c["name"], c["ts"], c["args"]) for c in trace if c["ph"] == "C"]
    assert found == [
        ("running", 0.0, {"requests": 3.0}),
        ("running", 2e6, {"requests": 4.0}),
        ("waiting", 0.0, {"requests": 5.0}),
        ("waiting", 2e6, {"requests": 6.0}),
        ("KV cache used", 0.0, {"%": 25.0}),
        ("KV cache used", 2e6, {"%": 50.0}),
        ("transfers", 0.0, {"MB/s": 4.0}),
        ("transfers", 2e6, {"MB/s": 0.0}),
    ]


@pytest.mark.parametrize(("max_lanes", "lanes"), [(2, {"a": 1, "b": 2, "c": 1}), (1, {"a": 1, "c": 1})])
def test_requests_that_do_not_overlap_share_a_lane_and_those_beyond_the_lanes_are_counted(
    tmp_path: Path, max_lanes: int, lanes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perfetto, "MAX_LANES", max_lanes)
    events = [(0.0, "a", "waiting"), (1.0, "b", "waiting"), (2.0, "a", "stop"), (2.0, "c", "waiting")]
    run = make_run([*events, (3.0, "b", "abort"), (4.0, "c", "length")], dropped=9)
    summary = write_trace(run, tmp_path / "t.json")
    left_out = 3 - len(lanes)
    counts = {"steps": 0, "requests": len(lanes), "requests_without_lane": left_out, "dropped_events": 9}
    assert summary == counts
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["requests_without_lane"] == str(left_out)
    assert {s["name"]: s["tid"] for s in slices(load(tmp_path / "t.json"), REQUESTS) if s["name"] in "abc"} == lanes


def test_a_request_that_did_not_end_lasts_to_the_end_of_what_was_kept(tmp_path: Path) -> None:
    events = [(0.0, "a", "waiting"), (1.0, "a", "prefill"), (5.0, "b", "waiting")]
    for dropped, end_us in ((0, 20e6), (1, 5e6)):
        trace = trace_of(make_run(events, dropped=dropped), tmp_path)
        (whole,) = (s for s in slices(trace, REQUESTS) if s["name"] == "a")
        assert whole["ts"] + whole["dur"] == end_us
        assert whole["args"]["outcome"] == "not ended"
        check_nesting(trace)


def test_a_request_refused_on_arrival_has_no_state(tmp_path: Path) -> None:
    trace = trace_of(make_run([(1.0, "a", "abort"), (1.0, "b", "waiting"), (1.0, "b", "abort")]), tmp_path)
    assert [(s["name"], s["dur"]) for s in slices(trace, REQUESTS)] == [("a", 0.0), ("b", 0.0)]
    check_nesting(trace)


def test_compressed_traces_have_the_same_content_and_repeatable_bytes(tmp_path: Path) -> None:
    run = make_run(ONE_LIFE)
    for name in ("a.json", "a.json.gz", "b.json.gz"):
        write_trace(run, tmp_path / name)
    assert load(tmp_path / "a.json") == load(tmp_path / "a.json.gz")
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_runs_without_events_and_wrong_arguments_are_refused(tmp_path: Path) -> None:
    run = make_run(ONE_LIFE)
    with pytest.raises(ValueError, match=r"path='x.txt'"):
        write_trace(run, tmp_path / "x.txt")
    run.events = None
    with pytest.raises(ValueError, match=r"record\.events"):
        write_trace(run, tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[float, str, str]]:
    events: list[tuple[float, str, str]] = []
    for index in range(draw(st.integers(1, 12))):
        now = draw(st.floats(0, 10))
        events.append((now, f"q{index}", "waiting"))
        for state in draw(st.lists(st.sampled_from(["prefill", "decode", "preempted"]), max_size=5)):
            now += draw(st.floats(0, 2))
            events.append((now, f"q{index}", state))
        if draw(st.booleans()):
            events.append((now + draw(st.floats(0, 1)), f"q{index}", draw(st.sampled_from(["stop", "abort"]))))
    return sorted(events, key=lambda event: event[0])


@given(lives(), st.integers(0, 1))
def test_any_history_nests_and_its_times_add_up(
    tmp_path_factory: pytest.TempPathFactory, events: list[tuple[float, str, str]], dropped: int
) -> None:
    trace = trace_of(make_run(events, dropped=dropped, duration_s=40.0), tmp_path_factory.getbasetemp())
    check_nesting(trace)
    whole = {s["name"]: s for s in slices(trace, REQUESTS) if s["name"].startswith("q")}
    parts = [s for s in slices(trace, REQUESTS) if not s["name"].startswith("q")]
    assert whole.keys() == {req_id for _, req_id, _ in events}
    assert sum(ns(s["dur"]) for s in parts) == sum(ns(s["dur"]) for s in whole.values())
    for req_id, life in whole.items():
        assert ns(life["ts"]) == round(min(t for t, r, _ in events if r == req_id) * 1e9)
    preemptions = sum(state == "preempted" for _, _, state in events)
    assert sum(i["ph"] == "i" and i["name"] == "preempted" for i in trace) == preemptions
