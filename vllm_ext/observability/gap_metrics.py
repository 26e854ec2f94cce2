"""Prometheus metrics of gaps in kept KV, ``vllm_ext:kv_gaps_*``; there are none where gaps are not crossed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Counter

from vllm_ext.observability.engine_metrics import new_counter

_TOKENS = {"device": "tokens_kept", "host": "tokens_loaded", "computed": "tokens_computed"}
"""By what was done about tokens behind the prefix hit: names in the scheduler's state."""


@functools.cache
def _metrics() -> tuple[Counter, Counter, Counter]:
    return (
        new_counter("kv_gaps_requests", "Requests whose kept KV had gaps that were computed with the new prompt."),
        new_counter("kv_gaps", "Gaps of these."),
        new_counter("kv_gaps_tokens", "Their tokens between prefix hit and new prompt, by source.", "source"),
    )


def update(labels: Mapping[str, str], gaps: Mapping[str, Any], increment: Callable[[str, float], float]) -> None:
    """Take over what a scheduler's state says under ``kv_gaps``.

    Args:
        labels: Of the engine.
        gaps: Running totals.
        increment: Returns by how much a running total grew, by its name.
    """
    requests, number, tokens = _metrics()
    requests.labels(**labels).inc(increment("gaps.requests", gaps["requests"]))
    number.labels(**labels).inc(increment("gaps.gaps", gaps["gaps"]))
    for source, name in _TOKENS.items():
        tokens.labels(**labels, source=source).inc(increment(f"gaps.{name}", gaps[name]))
