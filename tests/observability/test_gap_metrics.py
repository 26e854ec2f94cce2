"""The Prometheus feed of gaps in kept KV: running totals become increments."""

from __future__ import annotations

from prometheus_client import REGISTRY

from vllm_ext.observability.metrics import EngineFeed

from .test_kv_metrics import state

GAPS = {
    "requests": 2,
    "gaps": 3,
    "tokens_kept": 64,
    "tokens_loaded": 32,
    "tokens_computed": 96,
    "tokens_missing": 80,
    "requests_by_gaps": {"1": 1, "2": 1},
    "refused": {"cheaper": 4},
}


def read(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm_ext:kv_gaps{name}_total", {"model_name": "gaps", "engine": "0", **labels})


def test_totals_become_increments_and_there_are_none_where_gaps_are_not_crossed() -> None:
    feed = EngineFeed("gaps", 0)
    feed.update(state(None))
    assert read("") is None
    feed.update(state(None, kv_gaps=GAPS))
    feed.update(state(None, kv_gaps={**GAPS, "requests_by_gaps": {"1": 4, "2": 1}, "tokens_loaded": 33}))
    assert [read("_requests", gaps=gaps) for gaps in ("1", "2")] == [4, 1]
    assert read("") == 3
    assert [read("_tokens", source=source) for source in ("device", "host", "computed")] == [64, 33, 96]
    assert [read("_computed_tokens", reason=reason) for reason in ("missing", "cheaper")] == [80, 16]
    assert read("_refused", reason="cheaper") == 4
