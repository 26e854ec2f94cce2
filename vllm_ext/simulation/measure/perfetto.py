"""A run as a trace for ui.perfetto.dev and chrome://tracing.

Two processes: the engine with its steps and counters, and the requests. A request's slice holds one slice per state;
requests that don't overlap share a lane. Source: the Trace Event Format, JSON object form. Every slice is a complete
event (``X``), so that none can be left open; times are microseconds with whole nanoseconds.
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_ext.files import packed, replaced
from vllm_ext.simulation.measure.run_data import Events, RunData, TimeSeries

ENGINE, REQUESTS = 1, 2
"""Process ids."""
MAX_LANES = 512
"""Most requests shown at one time."""
STATES = ("waiting", "prefill", "decode", "preempted")
_ARGS = ("tier", "prompt_tokens", "cached_prompt_tokens", "output_tokens", "predicted_tokens", "preemptions")

TraceEvent = dict[str, Any]


def write_trace(run: RunData, path: Path) -> dict[str, int]:
    """Write a trace; equal runs give equal bytes.

    Args:
        run: A run that kept its events.
        path: Ends in ``.json`` or ``.json.gz``; the viewers read both.

    Returns:
        What it holds: ``steps`` and ``requests`` drawn, ``requests_without_lane``, left out as all lanes were taken
        when they arrived, and ``dropped_events``, which the run itself did not keep.

    Raises:
        ValueError: the run kept no events, or the suffix is wrong; nothing is written.
        OSError: the file cannot be written; one that was there before is as it was.
    """
    if run.events is None:
        raise ValueError(f"events of {run.label}: the run kept none; set record.events to the number to keep")
    if not path.name.endswith((".json", ".json.gz")):
        raise ValueError(f"path={path.name!r}: must end in .json or .json.gz")
    spans = _spans(run.events, run.duration_s)
    drawn = [(span, lane) for span, lane in zip(spans, _lanes(spans, MAX_LANES), strict=True) if lane]
    held = {
        "steps": len(run.events.steps),
        "requests": len(drawn),
        "requests_without_lane": len(spans) - len(drawn),
        "dropped_events": run.events.dropped,
    }
    encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
    with replaced(path) as file, packed(file, compress=path.name.endswith(".gz")) as out:
        out.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for index, event in enumerate(_trace_events(run, run.events, drawn)):
            out.write((",\n" if index else "").encode() + encode(event).encode())
        notes = {"label": run.label, **{name: str(value) for name, value in held.items()}}
        out.write(f'\n],"otherData":{encode(notes)}}}\n'.encode())
    return held


@dataclass(slots=True)
class _Span:
    """Something that takes a lane: a step, or a request from its first event to its last."""

    name: str
    start_ns: int
    end_ns: int = 0
    outcome: str | None = None
    states: list[tuple[int, str]] = field(default_factory=list)
    """Start of each state of a request, by time."""
    args: dict[str, Any] = field(default_factory=dict)


def _ns(time_s: float) -> int:
    return round(time_s * 1e9)


def _spans(events: Events, end_s: float) -> list[_Span]:
    """Requests by their first event. One without an end lasts to the end of what was kept."""
    ordered = sorted(events.requests, key=lambda event: event.time_s)
    if ordered and events.dropped:
        end_s = ordered[-1].time_s
    spans: list[_Span] = []
    live: dict[str, _Span] = {}
    for event in ordered:
        now = _ns(event.time_s)
        if event.req_id not in live:
            live[event.req_id] = _Span(event.req_id, now)
            spans.append(live[event.req_id])
        span = live[event.req_id]
        if event.state in STATES:
            span.states.append((now, event.state))
        else:
            span.end_ns, span.outcome = now, event.state
            del live[event.req_id]
    for span in live.values():
        span.end_ns = max(_ns(end_s), span.states[-1][0])
    return spans


def _lanes(spans: Iterable[_Span], max_lanes: int) -> Iterator[int]:
    """Yield for each span, by their starts, the lowest lane that is free, from 1 on; 0 if there is none.

    A lane is taken for at least a nanosecond, so that no two spans in it start at once.
    """
    free: list[int] = []
    taken: list[tuple[int, int]] = []
    for span in spans:
        while taken and taken[0][0] <= span.start_ns:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if not free and len(taken) < max_lanes:
            free.append(len(taken) + 1)
        lane = heapq.heappop(free) if free else 0
        if lane:
            heapq.heappush(taken, (max(span.end_ns, span.start_ns + 1), lane))
        yield lane


def _trace_events(run: RunData, events: Events, drawn: list[tuple[_Span, int]]) -> Iterator[TraceEvent]:
    yield from _name("process", ENGINE, 0, f"engine: {run.label}", ENGINE)
    yield from _name("process", REQUESTS, 0, "requests", REQUESTS)
    for lane in sorted({lane for _, lane in drawn}):
        yield from _name("thread", REQUESTS, lane, f"lane {lane}", lane - 1)
    yield from _steps(events)
    yield from _counters(run.series)
    wanted = {span.name for span, _ in drawn}
    known = {row["req_id"]: {n: row[n] for n in _ARGS} for row in run.requests.rows() if row["req_id"] in wanted}
    for span, lane in drawn:
        span.args = {"outcome": span.outcome or "not ended", **known.get(span.name, {})}
        yield from _request(span, lane)


def _name(kind: str, pid: int, tid: int, name: str, index: int) -> Iterator[TraceEvent]:
    for key, value in (("name", name), ("sort_index", index)):
        yield {"ph": "M", "name": f"{kind}_{key}", "pid": pid, "tid": tid, "args": {key: value}}


def _steps(events: Events) -> Iterator[TraceEvent]:
    """Steps run one after the other; if a run has some that overlap, they get tracks of their own."""
    spans = []
    for step in sorted(events.steps, key=lambda step: step.start_s):
        parts = [name for name in ("prefill", "decode") if getattr(step, f"{name}_tokens")]
        span = _Span("+".join(parts) or "empty", _ns(step.start_s), _ns(step.end_s))
        span.args = {
            "requests": step.num_requests,
            "prefill_tokens": step.prefill_tokens,
            "decode_tokens": step.decode_tokens,
            "preempted": list(step.preempted),
        }
        spans.append(span)
    tracks = list(_lanes(spans, max(len(spans), 1)))
    for track in sorted(set(tracks)):
        yield from _name("thread", ENGINE, track, "steps" if track == 1 else f"steps {track}", track - 1)
    for span, track in zip(spans, tracks, strict=True):
        yield _slice(ENGINE, track, span.name, span.start_ns, span.end_ns, args=span.args)


def _counters(series: TimeSeries) -> Iterator[TraceEvent]:
    time_s, transferred = series.column("time_s").tolist(), series.column("transfer_bytes").tolist()
    tracks: list[tuple[str, str, list[float]]] = [
        ("running", "requests", series.column("running").tolist()),
        ("waiting", "requests", series.column("waiting").tolist()),
        ("KV cache used", "%", (series.column("kv_used_fraction") * 100).round(3).tolist()),
    ]
    if any(transferred):  # the mean rate from each sample to the next one; 0 from the last
        samples = itertools.pairwise(zip(time_s, transferred, strict=True))
        rates = [round((after - before) / (end - start) / 1e6, 6) for (start, before), (end, after) in samples]
        tracks.append(("transfers", "MB/s", [*rates, 0.0]))
    if series.column("tier_used_fraction").any():
        tracks.append(("next tier used", "%", (series.column("tier_used_fraction") * 100).round(3).tolist()))
    for name, unit, values in tracks:
        for moment, value in zip(time_s, values, strict=True):
            yield {"ph": "C", "pid": ENGINE, "tid": 0, "name": name, "ts": _ns(moment) / 1000, "args": {unit: value}}


def _request(span: _Span, tid: int) -> Iterator[TraceEvent]:
    yield _slice(REQUESTS, tid, span.name, span.start_ns, span.end_ns, args=span.args)
    ends = [*(start for start, _ in span.states[1:]), span.end_ns]
    for (start, state), end in zip(span.states, ends, strict=False):  # a refused request has no state
        if state == "preempted":
            yield _instant(tid, "preempted", start)
        if end > start:
            yield _slice(REQUESTS, tid, state, start, end)
    if span.outcome is not None:
        yield _instant(tid, span.outcome, span.end_ns)


def _slice(pid: int, tid: int, name: str, start_ns: int, end_ns: int, **rest: Any) -> TraceEvent:
    times = {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, **times, **rest}


def _instant(tid: int, name: str, time_ns: int) -> TraceEvent:
    return {"ph": "i", "s": "t", "pid": REQUESTS, "tid": tid, "name": name, "ts": time_ns / 1000}
