"""Prometheus metrics of gaps in kept KV, ``vllm_ext:kv_gaps_*``; there are none where gaps are not crossed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from vllm_ext.observability.engine_metrics import new_counter

_TOKENS = {"device": "tokens_kept", "host": "tokens_loaded", "computed": "tokens_computed"}
"""By what was done about tokens behind the prefix hit: names in the scheduler's state."""


class _Metrics:
    def __init__(self) -> None:
        self.requests = new_counter(
            "kv_gaps_requests", "Requests whose kept KV had gaps that were computed with the new prompt.", "gaps"
        )
        self.number = new_counter("kv_gaps", "Gaps of these.")
        self.tokens = new_counter(
            "kv_gaps_tokens", "Their tokens between prefix hit and new prompt, by source.", "source"
        )
        self.computed = new_counter("kv_gaps_computed_tokens", "Tokens of gaps that were computed again.", "reason")
        self.refused = new_counter("kv_gaps_refused", "Requests that were not continued across gaps.", "reason")


@functools.cache
def _metrics() -> _Metrics:
    return _Metrics()


def update(labels: Mapping[str, str], gaps: Mapping[str, Any], increment: Callable[[str, float], float]) -> None:
    """Take over what a scheduler's state says under ``kv_gaps``.

    Args:
        labels: Of the engine.
        gaps: Running totals.
        increment: Returns by how much a running total grew, by its name.
    """
    metrics, missing = _metrics(), gaps["tokens_missing"]
    metrics.number.labels(**labels).inc(increment("gaps.gaps", gaps["gaps"]))
    for source, name in _TOKENS.items():
        metrics.tokens.labels(**labels, source=source).inc(increment(f"gaps.{name}", gaps[name]))
    for number, requests in gaps["requests_by_gaps"].items():
        metrics.requests.labels(**labels, gaps=number).inc(increment(f"gaps.with.{number}", requests))
    for reason, total in (("missing", missing), ("cheaper", gaps["tokens_computed"] - missing)):
        metrics.computed.labels(**labels, reason=reason).inc(increment(f"gaps.computed.{reason}", total))
    for reason, total in gaps["refused"].items():
        metrics.refused.labels(**labels, reason=reason).inc(increment(f"gaps.refused.{reason}", total))
