"""The demo's table, its summary, and what it reads to fill them: the request log and `/metrics`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_ext.demo.client import Answer

Record = Mapping[str, Any]
"""One line of the request log."""

COLUMNS = ("id", "kind", "prompt", "predicted/true", "source", "TTFT s", "s/token", "preempted", "finish")

METRICS = (
    "vllm_ext:system_info",
    "vllm_ext:preemptions_total",
    "vllm_ext:demotions_total",
    "vllm_ext:policy_fallbacks_total",
    "vllm_ext:policy_steps_total",
    "vllm_ext:policy_seconds_total",
    "vllm_ext:runtime_model_relative_error",
    "vllm:num_preemptions_total",
)
"""Shown beneath the table; plain vLLM has only the last."""

_ABSENT = "-"
_LEFT_ALIGNED = {"kind", "source", "finish"}


def read_records(path: Path) -> list[Record]:
    """Return the complete lines of a request log; none if the file does not exist yet.

    Raises:
        ValueError: A complete line is no JSON object.
    """
    if not path.exists():
        return []
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")  # the last line may be half written
    records: list[Record] = []
    for number, line in enumerate(complete.splitlines(), 1):
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object")
        records.append(record)
    return records


def match(answers: Sequence[Answer], records: Iterable[Record]) -> dict[int, Record]:
    """Return the record of each request number that has one.

    vLLM appends parts to the id that the client sees: `<id>-<8 hex>` for chat, `<id>-<index>-<8 hex>` for completions.
    """
    numbers = {answer.response_id: answer.request.number for answer in answers if answer.response_id}
    matched: dict[int, Record] = {}
    for record in records:
        parts = str(record.get("req_id", "")).split("-")
        for cut in (1, 2):
            number = numbers.get("-".join(parts[:-cut]))
            if number is not None:
                matched[number] = record
    return matched


def table(answers: Sequence[Answer], records: Mapping[int, Record]) -> str:
    """Return the table: a header, a rule and one line per answer; "-" where something is unknown."""
    rows = [_row(answer, records.get(answer.request.number, {})) for answer in answers]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    lines = [_line(COLUMNS, widths), "  ".join("-" * width for width in widths)]
    return "\n".join(lines + [_line(row, widths) for row in rows])


def summary(answers: Sequence[Answer], records: Mapping[int, Record], wall_s: float) -> str:
    """Return one line over all requests."""
    finished = [answer for answer in answers if answer.error is None]
    parts = [f"{len(finished)} of {len(answers)} requests finished in {wall_s:.1f} s"]
    if latencies := sorted(answer.normalised_latency_s for answer in finished if answer.output_tokens):
        p90 = latencies[min(len(latencies) - 1, int(0.9 * len(latencies)))]
        parts.append(f"normalised latency mean {statistics.fmean(latencies):.4f}, P90 {p90:.4f} s/token")
    if ttfts := [answer.ttft_s for answer in finished if answer.ttft_s is not None]:
        parts.append(f"TTFT mean {statistics.fmean(ttfts):.3f} s (streamed)")
    if records:
        errors = [
            abs(record["predicted_tokens"] - record["output_tokens"])
            for record in records.values()
            if record.get("predicted_tokens") is not None and record.get("output_tokens") is not None
        ]
        if errors:
            parts.append(f"length off by {statistics.fmean(errors):.0f} tokens on average")
    return "; ".join(parts)


def chosen_metrics(exposition: str) -> list[str]:
    """Return the samples of `METRICS` found in what `/metrics` answered, one per line, in that order.

    The labels that are the same for all of them, engine and model, are left out.
    """
    lines: dict[str, list[str]] = {name: [] for name in METRICS}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in lines:
                labels = {k: v for k, v in sorted(sample.labels.items()) if k not in ("engine", "model_name")}
                shown = ", ".join(f"{label}={value}" for label, value in labels.items())
                lines[sample.name].append(f"{sample.name}{{{shown}}} {sample.value:g}")
    return [line for name in METRICS for line in lines[name]]


def _row(answer: Answer, record: Record) -> tuple[str, ...]:
    request = answer.request
    kind = f"{request.kind.value} stream" if request.stream else request.kind.value
    if answer.error is not None:
        return (str(request.number), kind, *[_ABSENT] * (len(COLUMNS) - 3), "failed")
    predicted = record.get("predicted_tokens")
    return (
        str(request.number),
        kind,
        str(answer.prompt_tokens),
        f"{_ABSENT if predicted is None else round(predicted)}/{answer.output_tokens}",
        str(record.get("prediction_source", _ABSENT)),
        _ABSENT if answer.ttft_s is None else f"{answer.ttft_s:.3f}",
        f"{answer.normalised_latency_s:.4f}",
        str(record.get("num_preemptions", _ABSENT)),
        answer.finish_reason,
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [
        cell.ljust(width) if column in _LEFT_ALIGNED else cell.rjust(width)
        for cell, width, column in zip(cells, widths, COLUMNS, strict=True)
    ]
    return "  ".join(aligned).rstrip()
