"""Prometheus metrics of the KV tier, ``vllm_ext:kv_tier_*``; there are none where there is no tier.

What vLLM counts itself is not repeated: hits by source, bytes copied, what lies on disk (see the page on metrics).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Counter, Gauge

from vllm_ext.observability.engine_metrics import new_counter, new_gauge
from vllm_ext.policies.contract.fate import Fate

_STATES = ("running", "kept", "gone")


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    return new_gauge(f"kv_tier_{name}", text, *labels)


def _counter(name: str, text: str, *labels: str) -> Counter:
    return new_counter(f"kv_tier_{name}", text, *labels)


class _Metrics:
    """The metric objects of this process; keys are those of the scheduler's state."""

    def __init__(self) -> None:
        self.capacity_bytes = _gauge("capacity_bytes", "Bytes that a tier has room for.", "tier")
        self.used_bytes = _gauge("used_bytes", "Bytes of KV in a tier.", "tier")
        self.host_chunks = {
            "capacity_chunks": _gauge("capacity_chunks", "Chunks that host memory has room for."),
            "used_chunks": _gauge("used_chunks", "Chunks in host memory, those being written included."),
            "writing_chunks": _gauge("writing_chunks", "Chunks that are being written to host memory."),
            "reading_chunks": _gauge("reading_chunks", "Chunks that are being read from host memory."),
            "pinned_chunks": _gauge("pinned_chunks", "Chunks that pinned conversations keep."),
        }
        self.idle_blocks = _gauge(
            "idle_device_blocks", "Blocks on the device that are in nobody's use and nowhere else (store ahead)."
        )
        self.speed = _gauge("copy_bytes_per_second", "Measured speed of copies, recent ones weighted.", "direction")
        self.conversations = _gauge("conversations", "Conversations that are known, by state.", "state")
        self.pinned = _gauge("pinned_conversations", "Conversations that are pinned.")
        self.totals = {
            "stored_chunks": _counter("stored_chunks", "Chunks written to host memory."),
            "loaded_chunks": _counter("loaded_chunks", "Chunks read from host memory for requests."),
            "refused_chunks": _counter("refused_chunks", "Chunks that were not stored as there was no room."),
            "unsaved_chunks": _counter(
                "unsaved_chunks", "Chunks given up on the device without a copy, which did not pay (store ahead)."
            ),
        }
        self.gone = _counter("gone_chunks", "Chunks that left host memory, by reason.", "reason")
        self.by_direction = {
            "copy_s": _counter("copy_seconds", "Time a worker copied.", "direction"),
            "exposed_s": _counter("exposed_seconds", "Time the engine stood still for copies.", "direction"),
            "quantise_s": _counter("quantise_seconds", "Time a worker quantised or dequantised.", "direction"),
        }
        self.ended = {
            "expired": _counter("expired_conversations", "Conversations dropped as nobody came back in time."),
            "dropped": _counter("dropped_conversations", "Conversations dropped by hand."),
        }
        self.fates = _counter("preemptions", "Preemptions, by what the policy decided about the KV.", "fate")
        self.waits = {
            "waits_compared": _counter("waits", "Resumed requests whose wait was compared with its estimate."),
            "wait_expected_s": _counter("wait_expected_seconds", "Estimated waits of these."),
            "wait_actual_s": _counter("wait_actual_seconds", "Actual waits of these."),
            "wait_error_s": _counter("wait_error_seconds", "Absolute differences of the two."),
        }


@functools.cache
def _metrics() -> _Metrics:
    return _Metrics()


class TierFeed:
    """Feeds the metrics of one engine's tier.

    Args:
        labels: Of the engine.
        increment: Returns by how much a running total grew, by its name.
    """

    def __init__(self, labels: Mapping[str, str], increment: Callable[[str, float], float]) -> None:
        self._labels = dict(labels)
        self._increment = increment
        self._metrics = _metrics()

    def update(self, state: Mapping[str, Any]) -> None:
        """Take over a scheduler's state; what is of the tier is under ``kv_tier``."""
        tier, m = state["kv_tier"], self._metrics
        self._sizes(tier)
        for name, counter in m.totals.items():
            self._count(counter, f"tier.{name}", tier[name])
        for reason, total in tier["gone_chunks"].items():
            self._count(m.gone, f"tier.gone.{reason}", total, reason=reason)
        for name, counter in m.by_direction.items():
            for direction, total in tier[name].items():
                self._count(counter, f"tier.{name}.{direction}", total, direction=direction)
        for name, counter in m.ended.items():
            self._count(counter, f"tier.{name}", tier["conversations"].get(name, 0))
        for fate in Fate:
            self._count(m.fates, f"tier.fate.{fate.value}", state["fates"].get(fate.value, 0), fate=fate.value)
        for name, counter in m.waits.items():
            self._count(counter, f"tier.{name}", state[name])

    def _sizes(self, tier: Mapping[str, Any]) -> None:
        m, labels, host = self._metrics, self._labels, tier["host"]
        for name, found in (("host", host), ("disk", tier["disk"])):
            if found is not None:
                m.capacity_bytes.labels(**labels, tier=name).set(found["capacity_bytes"])
                m.used_bytes.labels(**labels, tier=name).set(found["used_bytes"])
        for name, gauge in m.host_chunks.items():
            gauge.labels(**labels).set(host[name])
        m.idle_blocks.labels(**labels).set(tier["idle_device_blocks"])
        for direction, speed in tier["bytes_per_s"].items():
            m.speed.labels(**labels, direction=direction).set(speed)
        for name in _STATES:
            m.conversations.labels(**labels, state=name).set(tier["conversations"].get(name, 0))
        m.pinned.labels(**labels).set(tier["conversations"].get("pinned", 0))

    def _count(self, counter: Counter, name: str, total: float, **labels: str) -> None:
        counter.labels(**self._labels, **labels).inc(self._increment(name, total))
