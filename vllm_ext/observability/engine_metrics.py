"""How a metric of an engine is made: named ``vllm_ext:*``, with the labels of its model and its engine."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

_LABELS = ("model_name", "engine")


def new_gauge(name: str, text: str, *labels: str) -> Gauge:
    """Return a gauge that appears once, whichever of several processes is asked."""
    return Gauge(f"vllm_ext:{name}", text, (*_LABELS, *labels), multiprocess_mode="mostrecent")


def new_counter(name: str, text: str, *labels: str) -> Counter:
    """Return a counter."""
    return Counter(f"vllm_ext:{name}", text, (*_LABELS, *labels))


def new_histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
    """Return a histogram."""
    return Histogram(f"vllm_ext:{name}", text, (*_LABELS, *labels), buckets=buckets)
