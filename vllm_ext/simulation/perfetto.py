"""A run as a trace for ui.perfetto.dev and chrome://tracing.

Two processes: the engine with its steps and counters, and the requests. A request's slice holds one slice per state;
requests that don't overlap share a lane. Source: the Trace Event Format, JSON object form. Every slice is a complete
event (``X``), so that none can be left open; times are microseconds with whole nanoseconds.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ext.observability.files import packed, replaced
from vllm_ext.simulation.run_data import Events, RequestEvent, RunData, TimeSeries

ENGINE, REQUESTS = 1, 2
"""Process ids."""
STATES = ("waiting", "prefill", "decode", "preempted")
_ARGS = ("tier", "prompt_tokens", "cached_prompt_tokens", "output_tokens", "predicted_tokens", "preemptions")

TraceEvent = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """What a trace file holds."""

    steps: int
    """Slices of steps."""
    requests: int
    """Requests drawn."""
    requests_without_lane: int
    """Requests left out because all lanes were taken when they arrived."""
    dropped_events: int
    """Events that the run itself did not keep."""


def write_trace(run: RunData, path: Path, *, max_lanes: int = 512) -> TraceSummary:
    """Write a trace; equal runs give equal bytes.

    Args:
        run: A run that kept its events.
        path: Ends in ``.json`` or ``.json.gz``; the viewers read both.
        max_lanes: Most requests shown at one time.

    Raises:
        ValueError: the run kept no events, or the suffix or ``max_lanes`` is wrong; nothing is written.
        OSError: the file cannot be written; one that was there before is as it was.
    """
    if run.events is None:
        raise ValueError(f"events of {run.label}: the run kept none; set record.events to the number to keep")
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"path={path.name!r}: must end in .json or .json.gz")
    if max_lanes < 1:
        raise ValueError(f"max_lanes={max_lanes!r}: must be at least 1")
    spans = _spans(run.events, run.duration_s)
    lanes = _lanes(((span.start_ns, span.end_ns) for span in spans), max_lanes)
    summary = TraceSummary(
        steps=len(run.events.steps),
        requests=sum(lane is not None for lane in lanes),
        requests_without_lane=sum(lane is None for lane in lanes),
        dropped_events=run.events.dropped,
    )
    with replaced(path) as file, packed(file, compress=path.name.endswith(".gz")) as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = b""
        for event in _trace_events(run, run.events, spans, lanes):
            out.write(separator + json.dumps(event, separators=(",", ":"), allow_nan=False).encode())
            separator = b",\n"
        notes = {"label": run.label, **{name: str(value) for name, value in vars(summary).items()}}
        out.write(b'\n],"otherData":' + json.dumps(notes, separators=(",", ":")).encode() + b"}\n")
    return summary


@dataclass(slots=True)
class _Span:
    """One request from its first event to its last."""

    req_id: str
    start_ns: int
    end_ns: int = 0
    outcome: str | None = None
    states: list[tuple[int, str]] = field(default_factory=list)
    """Start of each state, by time."""


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _spans(events: Events, end_s: float) -> list[_Span]:
    """Requests by their first event. One without an end lasts to the end of what was kept."""
    ordered: list[RequestEvent] = sorted(events.requests, key=lambda event: event.time_s)
    if ordered and events.dropped:
        end_s = ordered[-1].time_s
    spans: list[_Span] = []
    live: dict[str, _Span] = {}
    for event in ordered:
        now = _ns(event.time_s)
        span = live.get(event.req_id)
        if span is None:
            span = live[event.req_id] = _Span(event.req_id, now)
            spans.append(span)
        if event.state in STATES:
            span.states.append((now, event.state))
        else:
            span.end_ns, span.outcome = now, event.state
            del live[event.req_id]
    for span in live.values():
        span.end_ns = max(_ns(end_s), span.states[-1][0])
    return spans


def _lanes(intervals: Iterable[tuple[int, int]], max_lanes: int) -> list[int | None]:
    """Give each interval, by their starts, the lowest lane that is free; None if there is none.

    A lane is taken for at least a nanosecond, so that no two intervals in it start at once.
    """
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    opened = 0
    lanes: list[int | None] = []
    lane: int | None
    for start, end in intervals:
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free and opened < max_lanes:
            heapq.heappush(free, opened)
            opened += 1
        lane = heapq.heappop(free) if free else None
        if lane is not None:
            heapq.heappush(taken, (max(end, start + 1), lane))
        lanes.append(lane)
    return lanes


def _trace_events(run: RunData, events: Events, spans: list[_Span], lanes: list[int | None]) -> Iterator[TraceEvent]:
    used = sorted({lane for lane in lanes if lane is not None})
    yield from _name("process", ENGINE, 0, f"engine: {run.label}", ENGINE)
    yield from _name("process", REQUESTS, 0, "requests", REQUESTS)
    for lane in used:
        yield from _name("thread", REQUESTS, lane + 1, f"lane {lane + 1}", lane)
    yield from _steps(events)
    yield from _counters(run.series)
    arguments = _arguments(run, {span.req_id for span in spans})
    for span, place in zip(spans, lanes, strict=True):
        if place is not None:
            yield from _request(span, place + 1, arguments.get(span.req_id, {}))


def _name(kind: str, pid: int, tid: int, name: str, index: int) -> Iterator[TraceEvent]:
    yield {"ph": "M", "name": f"{kind}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{kind}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": index}}


def _steps(events: Events) -> Iterator[TraceEvent]:
    """Steps run one after the other; if a run has some that overlap, they get tracks of their own."""
    steps = sorted(events.steps, key=lambda step: step.start_s)
    tracks = _lanes(((_ns(step.start_s), _ns(step.end_s)) for step in steps), max(len(steps), 1))
    for number in sorted({track for track in tracks if track is not None}):
        yield from _name("thread", ENGINE, number + 1, "steps" if number == 0 else f"steps {number + 1}", number)
    for step, track in zip(steps, tracks, strict=True):
        parts = [name for name in ("prefill", "decode") if getattr(step, f"{name}_tokens")]
        yield {
            **_slice(ENGINE, (track or 0) + 1, "+".join(parts) or "empty", _ns(step.start_s), _ns(step.end_s)),
            "args": {
                "requests": step.num_requests,
                "prefill_tokens": step.prefill_tokens,
                "decode_tokens": step.decode_tokens,
                "preempted": list(step.preempted),
            },
        }


def _counters(series: TimeSeries) -> Iterator[TraceEvent]:
    time_s = series.column("time_s").tolist()
    tracks = [
        ("running", "requests", series.column("running").tolist()),
        ("waiting", "requests", series.column("waiting").tolist()),
        ("KV cache used", "%", (series.column("kv_used_fraction") * 100).round(3).tolist()),
    ]
    if series.column("transfer_bytes").any():
        tracks.append(("transfers", "MB/s", _megabytes_per_s(time_s, series.column("transfer_bytes").tolist())))
    if series.column("tier_used_fraction").any():
        tracks.append(("next tier used", "%", (series.column("tier_used_fraction") * 100).round(3).tolist()))
    for name, unit, values in tracks:
        for moment, value in zip(time_s, values, strict=True):
            yield {"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": _ns(moment) / 1000, "args": {unit: value}}


def _megabytes_per_s(time_s: list[float], total_bytes: list[float]) -> list[float]:
    """Mean rate from each sample to the next one; 0 from the last."""
    rates = [
        round((total_bytes[i + 1] - total_bytes[i]) / (time_s[i + 1] - time_s[i]) / 1e6, 6)
        if time_s[i + 1] > time_s[i]
        else 0.0
        for i in range(len(time_s) - 1)
    ]
    return [*rates, 0.0]


def _arguments(run: RunData, wanted: set[str]) -> dict[str, dict[str, Any]]:
    """What the table says of the requests that ended."""
    return {
        row["req_id"]: {name: row[name] for name in _ARGS} for row in run.requests.rows() if row["req_id"] in wanted
    }


def _request(span: _Span, tid: int, arguments: dict[str, Any]) -> Iterator[TraceEvent]:
    outcome = span.outcome or "not ended"
    whole = _slice(REQUESTS, tid, span.req_id, span.start_ns, span.end_ns)
    yield {**whole, "args": {"outcome": outcome, **arguments}}
    ends = [*(start for start, _ in span.states[1:]), span.end_ns]
    for (start, state), end in zip(span.states, ends, strict=False):  # a refused request has no state
        if state == "preempted":
            yield _instant(tid, "preempted", start)
        if end > start:
            yield _slice(REQUESTS, tid, state, start, end)
    if span.outcome is not None:
        yield _instant(tid, span.outcome, span.end_ns)


def _slice(pid: int, tid: int, name: str, start_ns: int, end_ns: int) -> TraceEvent:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}


def _instant(tid: int, name: str, time_ns: int) -> TraceEvent:
    return {"ph": "i", "s": "t", "pid": REQUESTS, "tid": tid, "name": name, "ts": time_ns / 1000}
