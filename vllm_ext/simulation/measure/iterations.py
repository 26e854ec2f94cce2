"""Objectives that hold for each token: what came in time, of all that came, in a run that kept the time of every token.

A first token is in time within its request's TTFT objective, every further one within the TBT objective after the one
before. A run that was cut off counts the tokens of those that it left too; as requests they have missed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from vllm_ext.simulation.measure.run_data import RunData


def iterations(run: RunData, span_s: float | None = None) -> dict[str, float]:
    """Reduce a run to flat metrics.

    Args:
        run: Its requests that ended, and those that arrived and did not.
        span_s: Time that rates are over, in seconds; None: the whole run.

    Returns:
        Nothing of a run without requests, else: ``delivered_tokens_per_s``; ``tokens_in_time_per_s`` and, of the
        delivered ones, ``tokens_in_time_fraction``; ``ended_requests_per_s``; of all requests that arrived
        ``request_attainment_fraction`` (answered whole, every token in time), ``first_in_time_fraction`` (their first
        token) and ``deadline_attainment_fraction`` (complete by TTFT objective + tokens x TBT objective);
        ``jct_mean_s`` of those that were answered whole (without any, the span) and ``jct_to_end_mean_s`` of everybody,
        to the end of the run; ``strictest_running_fraction``, the share of the run in which a request of the tightest
        TBT objective was between its first step and its end.
    """
    tables = run.requests, run.unserved
    span_s = span_s or run.duration_s

    def of(name: str) -> NDArray[np.float64]:
        return np.concatenate([table.column(name) for table in tables])

    arrival, ttft, tbt, first, left = map(of, ("arrival_s", "slo_ttft_s", "slo_tbt_s", "first_token_s", "finish_s"))
    if not len(arrival) or not span_s:
        return {}
    finished = np.concatenate([run.finished(), np.zeros(len(run.unserved), dtype=np.bool_)])
    taken = np.where(np.isnan(left), run.duration_s, left) - arrival
    begun = ~np.isnan(first) & ~(first - arrival > ttft)  # without an objective any time will do
    late = taken > ttft + (of("output_tokens") - 1) * tbt
    delivered = in_time = 0
    for row, kept in enumerate(times for table in tables for times in table.token_times):
        if kept:
            delivered += len(kept)
            in_time += int(begun[row]) + int((~(np.diff(kept) > tbt[row])).sum())
    strict = (tbt <= np.nanmin(tbt, initial=np.inf)) & ~np.isnan(scheduled := of("first_scheduled_s"))
    found = {
        "delivered_tokens_per_s": delivered / span_s,
        "tokens_in_time_per_s": in_time / span_s,
        "tokens_in_time_fraction": in_time / max(delivered, 1),
        "ended_requests_per_s": finished.sum() / span_s,
        "request_attainment_fraction": (finished & begun & ~(of("max_gap_s") > tbt)).mean(),
        "first_in_time_fraction": begun.mean(),
        "deadline_attainment_fraction": (finished & ~late).mean(),
        "jct_mean_s": taken[finished].mean() if finished.any() else span_s,
        "jct_to_end_mean_s": taken.mean(),
        "strictest_running_fraction": _covered_s(scheduled[strict], (arrival + taken)[strict]) / run.duration_s,
    }
    return {name: float(value) for name, value in found.items()}


def _covered_s(begun_s: NDArray[np.float64], ended_s: NDArray[np.float64]) -> float:
    """Return the length of a union of intervals."""
    covered_s = until_s = 0.0
    for at in np.argsort(begun_s):
        covered_s += max(0.0, ended_s[at] - max(begun_s[at], until_s))
        until_s = max(until_s, ended_s[at])
    return covered_s
