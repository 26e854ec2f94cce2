"""Prometheus metrics ``vllm_ext:*``, fed from the scheduler's state: a row each in one table.

They are created in vLLM's API server, so they appear in the server's own ``/metrics``. With several API servers only
the first one feeds them, and gauges are marked for prometheus_client's multiprocess mode: each number appears once.

What vLLM counts itself is not repeated: hits by source, bytes copied, what lies on disk (see the page on metrics).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge, Histogram

from vllm_ext.contract.preemption import KvDisposition
from vllm_ext.scheduling.finished import OWN_ENDS

State = Mapping[str, Any]
_LABELS = ("model_name", "engine")
_TOKEN_BUCKETS = tuple(float(2**k) for k in range(15))
_RATIO_BUCKETS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
_WAIT_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_PER_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Row(NamedTuple):
    """A metric of an engine."""

    kind: type[Counter | Gauge]
    name: str
    """Behind ``vllm_ext:`` and the name of its part."""
    source: str | Callable[[State], Any]
    """Where its part of the state has it (dotted path): a number, or one per value of the label. Counters have running
    totals."""
    text: str
    label: str = ""
    """Its label; with several, blanks between them, and so in the values."""


def _tiers(size: str) -> Callable[[State], dict[str, int]]:
    return lambda tier: {name: tier[name][size] for name in ("host", "disk") if tier[name] is not None}


def _conversations(*names: str) -> Callable[[State], Any]:
    return lambda tier: {name: tier["conversations"].get(name, 0) for name in names}


_ENGINE = (
    Row(Gauge, "num_requests_waiting", "waiting_by_level", "Waiting requests by queue; -1 holds the aged ones.",
        "level"),
    Row(Gauge, "oldest_wait_seconds", "oldest_wait_s", "Current wait of the waiting request that arrived first."),
    Row(Gauge, "longest_wait_seconds", "longest_wait_by_level",
        "Longest time from arrival to admission in the last minutes, by queue.", "level"),
    Row(Gauge, "policy_by_arrival", "switch.by_arrival",
        "1 while an administrator has the policies switched off, and requests are served by arrival."),
    Row(Counter, "policy_changes", "switch.changes", "Changes of the policies by an administrator."),
    Row(Gauge, "load_waiting_share", "load.waiting_share",
        "Share of the last two minutes in which somebody waited who could not join."),
    Row(Gauge, "load_kv_share", "load.kv_share", "Mean share of KV blocks in use in the last two minutes."),
    Row(Gauge, "sharing_clients", "sharing.clients", "Clients that wait for their turn, where clients take turns."),
    Row(Gauge, "sharing_spread_tokens", "sharing.spread",
        "How far these clients' counters of tokens they were served, over their weights, lie apart."),
    Row(Gauge, "runtime_model_relative_error", "runtime.mean_abs_relative_error",
        "Moving average of |predicted - observed| / observed step time."),
    Row(Counter, "preemptions", "preemptions", "Preemptions by reason: policy, memory, reset, load.", "reason"),
    Row(Counter, "admission_refusals", "refusals",
        "Looks at waiting requests that could not join, by what was missing: seats, tokens, blocks, or a gate.",
        "reason"),
    Row(Counter, "policy_fallbacks", "fallbacks", "Times a policy raised and arrival order was used."),
    Row(Counter, "policy_stalls", "stalls", "Steps whose plan let nothing run although something could."),
    Row(Counter, "demotions", "demotions", "Times a running request outlived its estimate."),
    Row(Counter, "late_predictions", "late_predictions",
        "Predictions that came after their request was queued, and were taken over."),
    Row(Counter, "bad_hints", "bad_hints", "Requests whose hints were ignored as malformed."),
    Row(Counter, "policy_seconds", "policy_s", "Time policies took to plan steps."),
    Row(Counter, "policy_steps", "policy_steps", "Steps planned by policies."),
    Row(Counter, "steps", "steps", "Steps scheduled."),
)  # fmt: skip


def _of_shadow(name: str) -> Callable[[State], dict[str, Any]]:
    """Read numbers, or one per value of a second label, under the name of the system."""

    def read(shadow: State) -> dict[str, Any]:
        found, system = shadow[name], shadow["system"]
        return {f"{system} {key}": n for key, n in found.items()} if isinstance(found, Mapping) else {system: found}

    return read


_LOAD_REPORT = (
    Row(Gauge, "prefill_tokens", "prefill_tokens",
        "Prompt tokens still to compute, of running and waiting requests, without those in the prefix cache."),
    Row(Gauge, "context_tokens", "context_tokens",
        "KV tokens that running requests hold, and that waiting ones will hold when they start."),
    Row(Gauge, "queue_seconds", "queue_s", "Time that the prompt tokens still to compute take, by the runtime model."),
    Row(Gauge, "step_seconds", "step_s", "Time of a step that decodes for all requests, by the runtime model."),
    Row(Gauge, "step_age_seconds", "step_age_s", "Time since a step ended, while requests are there; else 0."),
)  # fmt: skip
_SHADOW = (
    Row(Counter, "requests", _of_shadow("outcomes"),
        "Requests by when they would have started in the order of a system that does not serve: sooner, later, same.",
        "shadow outcome"),
    Row(Counter, "wait_seconds", _of_shadow("waits_s"),
        "Waits of these until their first step: real ones, and those in that order.", "shadow order"),
    Row(Counter, "service_seconds", _of_shadow("service_s"), "Time from their first step to their end.", "shadow"),
    Row(Gauge, "longest_wait_seconds", _of_shadow("longest_s"),
        "Longest of these waits since the last line in the log.", "shadow order"),
    Row(Counter, "overtakes", _of_shadow("overtakes"), "Starts in that order before an older request.", "shadow"),
    Row(Counter, "dropped_requests", _of_shadow("dropped"),
        "Requests that were not compared as the comparison lagged too far behind.", "shadow"),
    Row(Counter, "failures", _of_shadow("failures"), "Failures of that system, which switch it off.", "shadow"),
)  # fmt: skip
_TIER = (
    Row(Gauge, "capacity_bytes", _tiers("capacity_bytes"), "Bytes that a tier has room for.", "tier"),
    Row(Gauge, "used_bytes", _tiers("used_bytes"), "Bytes of KV in a tier.", "tier"),
    *(
        Row(Gauge, f"{name}_chunks", f"host.{name}_chunks", text)
        for name, text in (
            ("capacity", "Chunks that host memory has room for."),
            ("used", "Chunks in host memory, those being written included."),
            ("writing", "Chunks that are being written to host memory."),
            ("reading", "Chunks that are being read from host memory."),
        )
    ),
    Row(Gauge, "idle_device_blocks", "idle_device_blocks",
        "Blocks on the device that are in nobody's use and nowhere else (store ahead)."),
    Row(Gauge, "copy_bytes_per_second", "bytes_per_s", "Measured speed of copies, recent ones weighted.", "direction"),
    Row(Gauge, "conversations", _conversations("running", "kept", "gone"),
        "Conversations that are known, by state.", "state"),
    Row(Counter, "stored_chunks", "stored_chunks", "Chunks written to host memory."),
    Row(Counter, "loaded_chunks", "loaded_chunks", "Chunks read from host memory for requests."),
    Row(Counter, "refused_chunks", "refused_chunks", "Chunks that were not stored as there was no room."),
    Row(Counter, "unsaved_chunks", "unsaved_chunks",
        "Chunks given up on the device without a copy, which did not pay (store ahead)."),
    Row(Gauge, "low_reuse_salts", lambda tier: tier.get("low_reuse_salts", 0),
        "Pairs of LoRA adapter and cache_salt whose next turns contain less than half of what was generated."),
    Row(Counter, "generated_chunks", lambda tier: tier.get("generated_chunks", {}),
        "Generated chunks that next turns contained or omitted, and that were left out.", "fate"),
    Row(Counter, "gone_chunks", "gone_chunks", "Chunks that left host memory, by reason.", "reason"),
    Row(Counter, "copy_seconds", "copy_s", "Time a worker copied.", "direction"),
    Row(Counter, "exposed_seconds", "exposed_s", "Time the engine stood still for copies.", "direction"),
    Row(Counter, "quantise_seconds", "quantise_s", "Time a worker quantised or dequantised.", "direction"),
    Row(Counter, "expired_conversations", lambda tier: tier["conversations"].get("expired", 0),
        "Conversations dropped as nobody came back in time."),
    Row(Counter, "dropped_conversations", lambda tier: tier["conversations"].get("dropped", 0),
        "Conversations dropped by hand."),
)  # fmt: skip
_WITH_TIER = (
    Row(Counter, "preemptions", lambda state: {each.value: state["dispositions"].get(each.value, 0)
        for each in KvDisposition},
        "Preemptions, by what the policy decided about the KV.", "fate"),
    Row(Counter, "waits", "waits_compared", "Resumed requests whose wait was compared with its estimate."),
    Row(Counter, "wait_expected_seconds", "wait_expected_s", "Estimated waits of these."),
    Row(Counter, "wait_actual_seconds", "wait_actual_s", "Actual waits of these."),
    Row(Counter, "wait_error_seconds", "wait_error_s", "Absolute differences of the two."),
)  # fmt: skip
_GAPS = (
    Row(Counter, "kv_gaps_requests", "requests_by_gaps",
        "Requests whose kept KV had gaps that were computed with the new prompt.", "gaps"),
    Row(Counter, "kv_gaps", "gaps", "Gaps of these."),
    Row(Counter, "kv_gaps_tokens",
        lambda gaps: {
            "device": gaps["tokens_kept"], "host": gaps["tokens_loaded"], "computed": gaps["tokens_computed"],
        },
        "Their tokens between prefix hit and new prompt, by source.", "source"),
    Row(Counter, "kv_gaps_computed_tokens",
        lambda gaps: {"missing": gaps["tokens_missing"], "rows": gaps["tokens_computed"] - gaps["tokens_missing"]},
        "Tokens of gaps that were computed again.", "reason"),
    Row(Counter, "kv_gaps_refused", "refused", "Requests that were not continued across gaps.", "reason"),
)  # fmt: skip
_RECORDS = (
    Row(Gauge, "kv_device_records", "records", "Records of KV in 8 bits on the device.", "state"),
    Row(Counter, "kv_device_record_moves", "moves", "Blocks moved into records, and back.", "kind"),
    Row(Counter, "kv_device_records_forgotten", "forgotten", "Blocks whose KV left the device's memory.", "reason"),
    Row(Counter, "kv_device_records_read_tokens", "read_tokens",
        "Tokens that requests found in records when they got their blocks, and read there."),
    Row(Counter, "kv_device_records_resumed_tokens", "resumed_tokens",
        "Tokens of partly filled blocks that preempted requests did not compute again."),
)  # fmt: skip
_ATTENTION = (
    Row(Counter, "attention_steps", "steps", "Steps by the kernel that computed their attention: own or stock.",
        "kernel"),
    Row(Counter, "attention_tokens", "tokens",
        "Tokens of KV that requests attended to, once for each step, by kernel and by what they are kept in.",
        "kernel format"),
)  # fmt: skip


_PARTS = (
    ("", False, "", _ENGINE),
    ("load_report", True, "load_", _LOAD_REPORT),
    ("shadow", True, "shadow_", _SHADOW),
    ("kv_tier", True, "kv_tier_", _TIER),
    ("kv_tier", False, "kv_tier_", _WITH_TIER),
    ("kv_gaps", True, "", _GAPS),
    ("kv_device", True, "", _RECORDS),
    ("attention", True, "", _ATTENTION),
)
"""Part of the state without which there are none, whether they are read in it, prefix of their names, rows."""


@functools.cache
def _metric(kind: type[Counter | Gauge], name: str, text: str, *labels: str) -> Any:
    """Make a metric, once per process: the registry takes a name only once. A gauge appears once of all processes."""
    options: dict[str, Any] = {"multiprocess_mode": "mostrecent"} if kind is Gauge else {}
    return kind(f"vllm_ext:{name}", text, (*_LABELS, *labels), **options)


def _info() -> Any:
    return _metric(Gauge, "system_info", "Active system and its policies; always 1.", "system", "policies")


def _lost() -> Any:
    return _metric(Counter, "lost_records", "Finished requests missing from histograms and request log.")


def _unwritten() -> Any:
    return _metric(Counter, "request_log_lost_lines", "Lines of the request log that could not be written.")


class _Histograms:
    """What is told of every request."""

    def __init__(self) -> None:
        def new(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"vllm_ext:{name}", text, (*_LABELS, *labels), buckets=buckets)

        self.predicted = new("predicted_output_tokens", "Predicted output length.", _TOKEN_BUCKETS, "source")
        self.generated = new("output_tokens", "Tokens generated by requests that finished.", _TOKEN_BUCKETS)
        self.ratio = new("predicted_to_true_ratio", "Predicted over true output length.", _RATIO_BUCKETS, "source")
        self.queue = new("queue_seconds", "Arrival to first scheduled.", _WAIT_BUCKETS)
        self.normalized = new("normalized_latency_seconds", "End-to-end latency per output token.", _PER_TOKEN_BUCKETS)


_histograms = functools.cache(_Histograms)


def declare() -> None:
    """Make all metrics at once, those of parts that an engine may lack too; else each is made when it is first fed."""
    _info()
    for _, _, prefix, rows in _PARTS:
        for row in rows:
            _metric(row.kind, prefix + row.name, row.text, *row.label.split())
    _histograms()
    _lost()
    _unwritten()


class EngineFeed:
    """Feeds the metrics from the states of one engine, turning its running totals into increments."""

    def __init__(self, model_name: str, engine: int) -> None:
        self._labels = {"model_name": model_name, "engine": str(engine)}
        self._seen: dict[tuple[str, str], float] = {}
        """By metric and value of its label."""

    def update(self, state: State) -> None:
        """Take over one state, as returned by ``SteeredScheduler.vllm_ext_state``."""
        info = _info().labels(**self._labels, system=state["system"], policies=state["policies"])
        info.set(1)
        _lost().labels(**self._labels).inc(state["lost_records"])
        for part, inner, prefix, rows in _PARTS:
            if not part or part in state:
                self._export(rows, state[part] if inner else state, prefix)
        for record in state["records"]:
            self._observe(record)

    def unwritten(self, lines: int) -> None:
        """Count lines of the request log that could not be written."""
        _unwritten().labels(**self._labels).inc(lines)

    def _export(self, rows: tuple[Row, ...], part: State, prefix: str) -> None:
        for row in rows:
            name, read = prefix + row.name, row.source
            found: Any = (
                functools.reduce(operator.getitem, read.split("."), part) if isinstance(read, str) else read(part)
            )
            labels = tuple(row.label.split())
            metric = _metric(row.kind, name, row.text, *labels)
            values = found if row.label else {"": found}
            if row.kind is Gauge:  # what vanished reads 0
                values = {**{value: 0 for seen, value in self._seen if seen == name}, **values}
            for value, number in values.items():
                parts = value.split() if len(labels) > 1 else [value] * len(labels)
                child = metric.labels(**self._labels, **dict(zip(labels, parts, strict=True)))
                seen = self._seen.get((name, value), 0.0)
                self._seen[name, value] = number
                if row.kind is Gauge:
                    child.set(number)
                else:  # a total that fell is of an engine that started to count again
                    child.inc(number - seen if number >= seen else number)

    def _observe(self, record: Mapping[str, Any]) -> None:
        told, labels = _histograms(), self._labels
        if record["queue_s"] is not None:
            told.queue.labels(**labels).observe(record["queue_s"])
        # An aborted request says nothing of the length it would have reached.
        if record["finish_reason"] not in OWN_ENDS or not record["output_tokens"]:
            return
        source = record["prediction_source"]
        told.predicted.labels(**labels, source=source).observe(record["predicted_tokens"])
        told.generated.labels(**labels).observe(record["output_tokens"])
        told.ratio.labels(**labels, source=source).observe(record["predicted_tokens"] / record["output_tokens"])
        told.normalized.labels(**labels).observe(record["e2e_s"] / record["output_tokens"])
