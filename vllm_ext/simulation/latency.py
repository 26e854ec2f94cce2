"""Latency and throughput from the times at which tokens arrived, for real and simulated runs alike.

End-to-end latency, time to first token (TTFT) and normalised latency count from the moment a request was *meant* to
arrive, so that a client that falls behind cannot hide the queue it caused. Time between tokens (TBT) is every gap
between neighbouring tokens of one request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MS = 1000.0
_SLICES = 10
_TOKENS_PER_SLICE = 200
"""Far more than one step emits, so that a slice's duration is not a matter of where in a step it ends."""


@dataclass(frozen=True, kw_only=True)
class RequestTimeline:
    """When one finished request arrived and when its tokens were received; all on one clock, in seconds."""

    req_id: str
    """Name used in error messages and records."""

    arrival_s: float
    """Intended arrival time."""

    token_times_s: Sequence[float]
    """One time per output token, not decreasing; at least one."""

    def __post_init__(self) -> None:
        times = np.asarray(self.token_times_s, dtype=np.float64)
        if len(times) == 0:
            raise ValueError(f"token_times_s of {self.req_id}: a finished request has at least one token")
        if bool(np.any(np.diff(times) < 0)):
            raise ValueError(f"token_times_s of {self.req_id}: token times must not decrease")
        if times[0] < self.arrival_s:
            raise ValueError(
                f"token_times_s of {self.req_id}: first token at {times[0]} s, before the arrival at {self.arrival_s} s"
            )

    @property
    def ttft_s(self) -> float:
        """Arrival to first token, in seconds."""
        return float(self.token_times_s[0]) - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """Arrival to last token, in seconds."""
        return float(self.token_times_s[-1]) - self.arrival_s

    @property
    def normalised_s(self) -> float:
        """End-to-end latency per output token, in seconds per token."""
        return self.e2e_s / len(self.token_times_s)


def summarise(timelines: Sequence[RequestTimeline]) -> dict[str, float]:
    """Reduce finished requests to the flat metrics of a benchmark result; units are part of the names.

    Percentiles interpolate linearly. Throughput counts from the first intended arrival to the last token. The two
    ``tbt_*`` keys are absent when no request has a second token.

    Raises:
        ValueError: there are no requests.
    """
    if not timelines:
        raise ValueError("timelines: at least one finished request is needed")
    normalised_ms = np.array([t.normalised_s for t in timelines]) * _MS
    ttft_ms = np.array([t.ttft_s for t in timelines]) * _MS
    e2e_ms = np.array([t.e2e_s for t in timelines]) * _MS
    gaps_ms = np.concatenate([np.diff(np.asarray(t.token_times_s, dtype=np.float64)) for t in timelines]) * _MS
    tokens = sum(len(t.token_times_s) for t in timelines)
    span_s = max(t.token_times_s[-1] for t in timelines) - min(t.arrival_s for t in timelines)
    metrics = {
        "normalised_latency_mean_ms_per_token": float(normalised_ms.mean()),
        "normalised_latency_p90_ms_per_token": _percentile(normalised_ms, 90),
        "normalised_latency_p99_ms_per_token": _percentile(normalised_ms, 99),
        "ttft_mean_ms": float(ttft_ms.mean()),
        "ttft_p50_ms": _percentile(ttft_ms, 50),
        "ttft_p90_ms": _percentile(ttft_ms, 90),
        "ttft_p99_ms": _percentile(ttft_ms, 99),
        "e2e_mean_ms": float(e2e_ms.mean()),
        "e2e_p99_ms": _percentile(e2e_ms, 99),
        "throughput_tokens_per_s": tokens / span_s if span_s > 0 else 0.0,
        "throughput_requests_per_s": len(timelines) / span_s if span_s > 0 else 0.0,
        "duration_s": span_s,
        "requests": float(len(timelines)),
        "output_tokens": float(tokens),
    }
    if len(gaps_ms):
        metrics["tbt_p50_ms"] = _percentile(gaps_ms, 50)
        metrics["tbt_p99_ms"] = _percentile(gaps_ms, 99)
    return metrics


def saturated_tokens_per_s(timelines: Sequence[RequestTimeline]) -> float:
    """Output tokens per second while every seat was taken: between the first and the last of the first tokens.

    For a run in which all requests arrive at once. After the last request has started, seats fall empty one by one;
    that tail says how long the longest request was, not what the server can carry. The result is the median over ten
    slices of equally many tokens (over fewer when there are few), so that a moment's disturbance does not count.

    Raises:
        ValueError: fewer than two requests, or they all started at the same moment (no queue formed).
    """
    if len(timelines) < 2:
        raise ValueError("timelines: a saturated run needs at least two requests")
    firsts = [t.token_times_s[0] for t in timelines]
    start, end = min(firsts), max(firsts)
    if end <= start:
        raise ValueError("timelines: all requests started at once; send more requests than the server has seats")
    times = np.sort(np.concatenate([np.asarray(t.token_times_s, dtype=np.float64) for t in timelines]))
    times = times[(times > start) & (times <= end)]
    slices = max(1, min(_SLICES, len(times) // _TOKENS_PER_SLICE))
    edges = np.linspace(0, len(times), slices + 1).astype(int)
    bounds = np.concatenate([[start], times[edges[1:] - 1]])
    return float(np.median(np.diff(edges) / np.diff(bounds)))


def _percentile(values: NDArray[np.float64], q: float) -> float:
    return float(np.percentile(values, q))
