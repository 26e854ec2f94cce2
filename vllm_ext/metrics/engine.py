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
    Row(Gauge, "num_requests_waiting", "waiting_by_level", "Waiting requests by queue; -1: aged, in turn.", "level"),
    Row(Gauge, "oldest_wait_seconds", "oldest_wait_s", "Wait so far of the oldest waiting request."),
    Row(Gauge, "longest_wait_seconds", "longest_wait_by_level",
        "Longest time from arrival to admission, of the last 150 to 300 s, by queue: who pays for the order.", "level"),
    Row(Gauge, "policy_by_arrival", "switch.by_arrival",
        "1 while an administrator has switched the policies off: requests are served in order of arrival."),
    Row(Counter, "policy_changes", "switch.changes", "Changes of the policies by an administrator."),
    Row(Gauge, "load_waiting_share", "load.waiting_share",
        "Share of the last two minutes in which a request could not join: near 1 the server is saturated."),
    Row(Gauge, "load_kv_share", "load.kv_share", "Mean share of KV blocks in use in the last two minutes."),
    Row(Gauge, "sharing_clients", "sharing.clients", "Clients that wait for their turn (fair)."),
    Row(Gauge, "sharing_spread_tokens", "sharing.spread", "Spread of these clients' weighted counters of tokens."),
    Row(Gauge, "runtime_model_relative_error", "runtime.mean_abs_relative_error",
        "Moving average of |predicted - observed| / observed step time."),
    Row(Counter, "preemptions", "preemptions",
        "Preemptions: policy (for a better rank), memory (KV ran out), reset (of the prefix cache), load (it failed).",
        "reason"),
    Row(Counter, "admission_refusals", "refusals",
        "Times a request could not join, by what was missing: seats, tokens, blocks, encoder (for its image), a gate.",
        "reason"),
    Row(Counter, "policy_fallbacks", "fallbacks", "Failures of a policy; such a step is first come, first served."),
    Row(Counter, "policy_stalls", "stalls", "Steps whose plan let nothing run although something could."),
    Row(Counter, "demotions", "demotions", "Times a running request exceeded its predicted length."),
    Row(Counter, "late_predictions", "late_predictions", "Predictions used that came after their request was queued."),
    Row(Counter, "bad_hints", "bad_hints", "Requests with malformed hints that got past the front end; ignored."),
    Row(Counter, "policy_seconds", "policy_s", "Time that policies took."),
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
        "Requests, by when they would have started in the other system's order: sooner, later, same (within 0.1 s).",
        "shadow outcome"),
    Row(Counter, "wait_seconds", _of_shadow("waits_s"),
        "Waits from arrival to first step: real ones, and those in the order of the shadow.", "shadow order"),
    Row(Counter, "service_seconds", _of_shadow("service_s"), "Time from first step to end, in both orders.", "shadow"),
    Row(Gauge, "longest_wait_seconds", _of_shadow("longest_s"), "Longest since the last log line.", "shadow order"),
    Row(Counter, "overtakes", _of_shadow("overtakes"), "Starts in that order before an older request.", "shadow"),
    Row(Counter, "dropped_requests", _of_shadow("dropped"), "Requests not compared, for lack of time.", "shadow"),
    Row(Counter, "failures", _of_shadow("failures"), "1: its order failed, and the shadow is off.", "shadow"),
)  # fmt: skip
_TIER = (
    Row(Gauge, "capacity_bytes", _tiers("capacity_bytes"), "Bytes that a tier has room for.", "tier"),
    Row(Gauge, "used_bytes", _tiers("used_bytes"), "Bytes of KV in a tier.", "tier"),
    Row(Gauge, "capacity_chunks", "host.capacity_chunks", "Chunks that host memory has room for."),
    Row(Gauge, "used_chunks", "host.used_chunks", "Chunks in host memory, those being written included."),
    Row(Gauge, "writing_chunks", "host.writing_chunks", "Chunks that are being written to host memory."),
    Row(Gauge, "reading_chunks", "host.reading_chunks", "Chunks that are being read from host memory."),
    Row(Gauge, "idle_device_blocks", "idle_device_blocks", "Unused device blocks whose KV is nowhere else."),
    Row(Gauge, "copy_bytes_per_second", "bytes_per_s", "Measured speed: store (device to host), load.", "direction"),
    Row(Gauge, "conversations", _conversations("running", "kept", "gone"),
        "Conversations: running (with a request here), kept (chunks in host memory), gone (neither).", "state"),
    Row(Counter, "stored_chunks", "stored_chunks", "Chunks written to host memory, from disk included."),
    Row(Counter, "loaded_chunks", "loaded_chunks", "Chunks read from host memory for requests."),
    Row(Counter, "refused_chunks", "refused_chunks", "Chunks not stored: all in use, or beyond their quota."),
    Row(Counter, "unsaved_chunks", "unsaved_chunks",
        "Chunks dropped on the device without a copy, which would not have paid (store: ahead)."),
    Row(Gauge, "low_reuse_salts", lambda tier: tier.get("low_reuse_salts", 0),
        "Pairs of LoRA adapter and cache_salt whose next turns repeat less than half of what was generated."),
    Row(Counter, "generated_chunks", lambda tier: tier.get("generated_chunks", {}),
        "Generated chunks that next turns contained or omitted (as templates drop thinking), or left_out.", "fate"),
    Row(Counter, "gone_chunks", "gone_chunks",
        "Chunks that left host memory: room (evicted), quota, expired, dropped by hand, unwritten, unreadable, reset.",
        "reason"),
    Row(Counter, "copy_seconds", "copy_s", "Time of copies, in the background or not; of one worker.", "direction"),
    Row(Counter, "exposed_seconds", "exposed_s", "Part of it for which the engine waited.", "direction"),
    Row(Counter, "quantise_seconds", "quantise_s",
        "Time of quantising, with 8 bits: on a CPU that of the copies, on CUDA 0, as it is part of them.", "direction"),
    Row(Counter, "expired_conversations", lambda tier: tier["conversations"].get("expired", 0),
        "Conversations whose time to live was over."),
    Row(Counter, "dropped_conversations", lambda tier: tier["conversations"].get("dropped", 0),
        "Conversations dropped by hand."),
)  # fmt: skip
_WITH_TIER = (
    Row(Counter, "preemptions", lambda state: {each.value: state["dispositions"].get(each.value, 0)
        for each in KvDisposition},
        "Preemptions, by what became of the KV: keep, swap, recompute.", "fate"),
    Row(Counter, "waits", "waits_compared", "Preempted requests that resumed, whose wait had been estimated."),
    Row(Counter, "wait_expected_seconds", "wait_expected_s", "Estimated waits of these."),
    Row(Counter, "wait_actual_seconds", "wait_actual_s", "Actual waits of these."),
    Row(Counter, "wait_error_seconds", "wait_error_s", "Absolute differences of the two."),
)  # fmt: skip
_GAPS = (
    Row(Counter, "kv_gaps_requests", "requests_by_gaps", "Requests whose kept KV had gaps, by how many.", "gaps"),
    Row(Counter, "kv_gaps", "gaps", "Gaps of these."),
    Row(Counter, "kv_gaps_tokens",
        lambda gaps: {
            "device": gaps["tokens_kept"], "host": gaps["tokens_loaded"], "computed": gaps["tokens_computed"],
        },
        "Their tokens behind the prefix hit: on the device, loaded from the host, or computed.", "source"),
    Row(Counter, "kv_gaps_computed_tokens",
        lambda gaps: {"missing": gaps["tokens_missing"], "rows": gaps["tokens_computed"] - gaps["tokens_missing"]},
        "The computed ones: missing everywhere, or for lack of rows in the attention kernels' tables.", "reason"),
    Row(Counter, "kv_gaps_refused", "refused",
        "Requests not continued across gaps: no rows left (raise --max-num-seqs), or unsupported.", "reason"),
)  # fmt: skip
_RECORDS = (
    Row(Gauge, "kv_device_records", "records",
        "Records of KV in 8 bits on the device: held by requests, kept for returns, empty.", "state"),
    Row(Counter, "kv_device_record_moves", "moves",
        "Blocks demoted into records, records promoted into blocks; partial, resumed: of preempted requests.", "kind"),
    Row(Counter, "kv_device_records_forgotten", "forgotten",
        "Records dropped for others, and blocks of less value than any record (lost).", "reason"),
    Row(Counter, "kv_device_records_read_tokens", "read_tokens", "Tokens that requests read in records."),
    Row(Counter, "kv_device_records_resumed_tokens", "resumed_tokens",
        "Tokens of partial blocks that preempted requests did not recompute."),
)  # fmt: skip
_ATTENTION = (
    Row(Counter, "attention_steps", "steps", "Steps, by the attention kernel: own or stock (vLLM's).", "kernel"),
    Row(Counter, "attention_tokens", "tokens",
        "KV tokens attended to, per step, by kernel and format (the KV's type, or int8).", "kernel format"),
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
    return _metric(
        Counter, "lost_records", "Finished requests missing from histograms and request log: raise record_capacity."
    )


def _unwritten() -> Any:
    return _metric(Counter, "request_log_lost_lines", "Lines of the request log that could not be written.")


class _Histograms:
    """What is told of every request."""

    def __init__(self) -> None:
        def new(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"vllm_ext:{name}", text, (*_LABELS, *labels), buckets=buckets)

        self.predicted = new(
            "predicted_output_tokens", "First prediction of the output length.", _TOKEN_BUCKETS, "source"
        )
        self.generated = new("output_tokens", "Output length.", _TOKEN_BUCKETS)
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
