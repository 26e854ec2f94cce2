"""How well two runs of the same requests agree: errors per request and of aggregates, and who shared which step."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vllm_ext.simulation.measure.latency import RequestTimeline

_MS = 1000.0
_SHORTEST_S = 1e-6
"""Durations below it can't be told from none; a relative error is taken of at least this."""
_QUANTILES = {"p50": 50, "p90": 90, "p99": 99}

_Vector = NDArray[np.float64]


class Batch(NamedTuple):
    """A step of a run: who was in it, and when, in seconds of a time that both runs share."""

    start_s: float
    end_s: float
    req_ids: frozenset[str]


class Observed(NamedTuple):
    """A real or a simulated run, as far as they are compared. Times count from the start of the measured part."""

    timelines: Sequence[RequestTimeline]
    """The requests that are judged, in the order of the recording."""
    batches: Sequence[Batch]
    """All steps."""


def compare(predicted: Observed, measured: Observed, from_s: float = 0.0) -> dict[str, float]:
    """Return errors per request and the agreement of decisions, those of steps that begin at ``from_s`` or later."""
    return {
        **request_errors(predicted.timelines, measured.timelines),
        **batch_agreement(predicted.batches, [b for b in measured.batches if b.start_s >= from_s]),
        "first_token_order_agreement": order_agreement(predicted.timelines, measured.timelines),
    }


def request_errors(predicted: Sequence[RequestTimeline], measured: Sequence[RequestTimeline]) -> dict[str, float]:
    """Return median and P90 over requests of |predicted - measured| / measured, as fractions.

    ``e2e``, ``ttft``, and ``tbt_mean`` and ``tbt_p99`` of each request's own gaps, over requests with two tokens or
    more. The normalised latency of a request has the error of its ``e2e``: both runs emit the same tokens.

    Raises:
        ValueError: the runs are not of the same requests with the same numbers of tokens.
    """
    _check_same(predicted, measured)
    errors: dict[str, float] = {}
    theirs = _per_request(measured)
    for name, ours in _per_request(predicted).items():
        error = np.abs(ours - theirs[name]) / np.maximum(theirs[name], _SHORTEST_S)
        error = error[np.isfinite(error)]
        if len(error):
            errors[f"{name}_error_median"] = float(np.median(error))
            errors[f"{name}_error_p90"] = float(np.percentile(error, 90))
    return errors


def aggregates(timelines: Sequence[RequestTimeline]) -> dict[str, float]:
    """Return mean, P50, P90 and P99 of end-to-end and normalised latency, TTFT and every gap between tokens, in ms."""
    values: dict[tuple[str, str], _Vector] = {
        ("e2e", "ms"): np.array([t.e2e_s for t in timelines]),
        ("ttft", "ms"): np.array([t.ttft_s for t in timelines]),
        ("tbt", "ms"): np.concatenate([np.diff(np.asarray(t.token_times_s, dtype=np.float64)) for t in timelines]),
        ("normalised_latency", "ms_per_token"): np.array([t.normalised_s for t in timelines]),
    }
    found = {}
    for (name, unit), series in values.items():
        if len(series):
            found[f"{name}_mean_{unit}"] = float(series.mean()) * _MS
            for quantile, q in _QUANTILES.items():
                found[f"{name}_{quantile}_{unit}"] = float(np.percentile(series, q)) * _MS
    return found


def aggregate_errors(predicted: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float]:
    """Return predicted / measured - 1 of each aggregate: below 0 where the prediction is too low."""
    return {
        f"{name.partition('_ms')[0]}_error": value / max(measured[name], _SHORTEST_S) - 1
        for name, value in predicted.items()
        if name in measured
    }


def batch_agreement(batches: Sequence[Batch], reference: Sequence[Batch]) -> dict[str, float]:
    """Compare who computes at a time: for the middle of each step of the reference, the step of the other run then.

    Returns:
        ``batch_jaccard_mean``: mean over the reference's steps of |both| / |either| of the requests in them, and
        ``equal_batches_fraction``: share of steps with exactly the same requests. A step in which the other run
        idled counts as disjoint.

    Raises:
        ValueError: the reference has no steps.
    """
    if not reference:
        raise ValueError("reference: a run without steps can't be compared with")
    starts = [batch.start_s for batch in batches]
    overlaps = []
    for batch in reference:
        moment = (batch.start_s + batch.end_s) / 2
        index = bisect_right(starts, moment) - 1
        other = batches[index].req_ids if index >= 0 and moment <= batches[index].end_s else frozenset()
        overlaps.append(len(batch.req_ids & other) / len(batch.req_ids | other))
    return {
        "batch_jaccard_mean": float(np.mean(overlaps)),
        "equal_batches_fraction": float(np.mean([overlap == 1.0 for overlap in overlaps])),
    }


def order_agreement(predicted: Sequence[RequestTimeline], measured: Sequence[RequestTimeline]) -> float:
    """Return the share of pairs of requests whose first tokens come in the same order; pairs that tie are left out.

    Raises:
        ValueError: the runs are not of the same requests.
    """
    _check_same(predicted, measured)
    ours = np.array([t.token_times_s[0] for t in predicted])
    theirs = np.array([t.token_times_s[0] for t in measured])
    agreeing = compared = 0
    for index in range(1, len(ours)):
        signs = np.sign(ours[index] - ours[:index]) * np.sign(theirs[index] - theirs[:index])
        agreeing += int(np.count_nonzero(signs > 0))
        compared += int(np.count_nonzero(signs))
    return agreeing / compared if compared else 1.0


def _per_request(timelines: Sequence[RequestTimeline]) -> dict[str, _Vector]:
    gaps = [np.diff(np.asarray(t.token_times_s, dtype=np.float64)) for t in timelines]
    return {
        "e2e": np.array([t.e2e_s for t in timelines]),
        "ttft": np.array([t.ttft_s for t in timelines]),
        "tbt_mean": np.array([g.mean() if len(g) else np.nan for g in gaps]),
        "tbt_p99": np.array([np.percentile(g, 99) if len(g) else np.nan for g in gaps]),
    }


def _check_same(predicted: Sequence[RequestTimeline], measured: Sequence[RequestTimeline]) -> None:
    if len(predicted) != len(measured) or not measured:
        raise ValueError(
            f"{len(predicted)} requests against {len(measured)}: the same requests are needed, at least one"
        )
    for ours, theirs in zip(predicted, measured, strict=True):
        if (ours.req_id, len(ours.token_times_s)) != (theirs.req_id, len(theirs.token_times_s)):
            raise ValueError(
                f"{ours.req_id} with {len(ours.token_times_s)} tokens against {theirs.req_id} with "
                f"{len(theirs.token_times_s)}: both runs must serve the same requests to the same length"
            )
