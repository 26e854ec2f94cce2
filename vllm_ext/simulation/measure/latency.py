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

    Percentiles interpolate linearly. Throughput counts from the first intended arrival to the last token. The ``tbt_*``
    and ``tpot_*`` keys are absent when no request has a second token.

    Raises:
        ValueError: there are no requests.
    """
    if not timelines:
        raise ValueError("timelines: at least one finished request is needed")
    metrics = summarise_columns(
        np.array([t.arrival_s for t in timelines], dtype=np.float64),
        np.array([t.token_times_s[0] for t in timelines], dtype=np.float64),
        np.array([t.token_times_s[-1] for t in timelines], dtype=np.float64),
        np.array([len(t.token_times_s) for t in timelines], dtype=np.int64),
    )
    gaps_ms = np.concatenate([np.diff(np.asarray(t.token_times_s, dtype=np.float64)) for t in timelines]) * _MS
    if len(gaps_ms):
        metrics.update(spread("tbt", gaps_ms, "ms", ("p50", "p90", "p99", "max")))
    return metrics


def summarise_columns(
    arrival_s: NDArray[np.float64],
    first_token_s: NDArray[np.float64],
    finish_s: NDArray[np.float64],
    output_tokens: NDArray[np.int64],
) -> dict[str, float]:
    """Reduce finished requests, one per element, to what `summarise` says of them, all but time between tokens.

    Args:
        arrival_s: Intended arrivals in seconds, at least one; the others have the same length.
        first_token_s: When each first token arrived, in seconds.
        finish_s: When each last token arrived, in seconds.
        output_tokens: Tokens of each request, at least 1. The ``tpot_*`` keys (time per output token after the first)
            are those of requests with at least 2, and absent when there are none.
    """
    e2e_s = finish_s - arrival_s
    several = output_tokens > 1
    tokens, span_s = int(output_tokens.sum()), float(finish_s.max() - arrival_s.min())
    metrics = {
        **spread("normalised_latency", e2e_s / output_tokens * _MS, "ms_per_token"),
        **spread("ttft", (first_token_s - arrival_s) * _MS, "ms"),
        **spread("e2e", e2e_s * _MS, "ms"),
        "throughput_tokens_per_s": tokens / span_s if span_s > 0 else 0.0,
        "throughput_requests_per_s": len(arrival_s) / span_s if span_s > 0 else 0.0,
        "duration_s": span_s,
        "requests": float(len(arrival_s)),
        "output_tokens": float(tokens),
    }
    if several.any():
        tpot_ms = (finish_s - first_token_s)[several] / (output_tokens[several] - 1) * _MS
        metrics.update(spread("tpot", tpot_ms, "ms", ("mean", "p99")))
    return metrics


def spread(
    name: str, values: NDArray[np.float64], unit: str, which: Sequence[str] = ("mean", "p50", "p90", "p99")
) -> dict[str, float]:
    """Return mean, maximum and percentiles of values under keys such as ``ttft_p99_ms``.

    Args:
        name: First part of each key.
        values: At least one, in ``unit``.
        unit: Last part of each key.
        which: ``mean``, ``max`` or ``p`` and a percentile, which interpolates linearly.
    """
    percentiles = [part for part in which if part.startswith("p")]
    found = dict(zip(percentiles, np.percentile(values, [float(part[1:]) for part in percentiles]), strict=True))
    found.update(mean=values.mean(), max=values.max())
    return {f"{name}_{part}_{unit}": float(found[part]) for part in which}


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
