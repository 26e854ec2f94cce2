"""Readers of recorded workloads: prompts and answers, or only their lengths and arrival times.

Every reader returns rows in file order and never guesses: a bad row is an error that names file, line (or entry) and
field. Lengths in tokens stay unknown where a file has only text; whoever runs the workload counts them with the
tokenizer it serves with.

| format | file | a row |
|---|---|---|
| sharegpt | JSON array or JSON lines of {id, conversations: [{from, value}]} | first turn that is answered |
| alpaca | JSON array or JSON lines of {instruction, input, output} | instruction, blank line, input |
| jsonl | JSON lines of {prompt or prompt_tokens, output or output_tokens, timestamp?} | as it stands |
| burstgpt | CSV: Timestamp, Request tokens, Response tokens | failed requests (0 tokens) are skipped and counted |
| azure | CSV: TIMESTAMP, ContextTokens, GeneratedTokens | as burstgpt |
| lengths | CSV: num_prefill_tokens, num_decode_tokens | as burstgpt, without arrival times |

Any of them may be gzipped.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ext.simulation import trace_csv

FORMATS = ("auto", "sharegpt", "alpaca", "jsonl", *trace_csv.FORMATS)
_USER_ROLES = frozenset({"human", "user"})
_ASSISTANT_ROLES = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})


class DatasetError(ValueError):
    """A workload file that cannot be read; the message names file, line or entry, and field."""


@dataclass(frozen=True, kw_only=True)
class WorkloadRow:
    """One request of a workload. Text, token counts or both are known."""

    source_id: str
    """Id within the file; ``line 7`` or ``entry 7`` (counted from 1) where the file has none."""

    prompt: str | None = None
    """Prompt text."""

    prompt_tokens: int | None = None
    """Prompt length where the file states it, in tokens of the recording's own tokenizer."""

    output_text: str | None = None
    """Recorded answer."""

    output_tokens: int | None = None
    """Output length where the file states it, in tokens of the recording's own tokenizer."""

    arrival_s: float | None = None
    """Recorded arrival, in seconds on the file's own clock."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A workload with its provenance."""

    name: str
    """File name without folder, or the name of a synthetic preset."""

    format: str
    """Reader that was used."""

    rows: tuple[WorkloadRow, ...]
    """Requests in file order."""

    sha256: str
    """Of the file as stored (compressed, if it is)."""

    skipped: int = 0
    """Valid entries that hold no request: conversations without an answered question, failed requests of a trace."""


def load(path: str | Path, format: str = "auto", where: Mapping[str, frozenset[str]] | None = None) -> Dataset:
    """Read a workload file.

    Args:
        path: The file; ``.gz`` is unpacked on the fly.
        format: One of `FORMATS`; ``auto`` looks at the suffix and at the first row.
        where: Keep only JSON objects whose field equals, or is a list containing, one of the given values.

    Raises:
        DatasetError: unknown format, unreadable or malformed file, or no row left.
    """
    file = Path(path)
    if format not in FORMATS:
        raise DatasetError(f"dataset format {format!r}: must be one of {', '.join(FORMATS)}")
    try:
        stored = file.read_bytes()
        text = (gzip.decompress(stored) if file.suffix == ".gz" else stored).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"{file.name}: cannot be read as UTF-8 text: {error}") from error
    suffix = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    if suffix == ".csv" or format in trace_csv.FORMATS:
        if where:
            raise DatasetError(f"{file.name}: rows of a CSV trace cannot be filtered by field")
        rows, skipped, format = _read_csv(file.name, text, format)
    else:
        entries = list(_entries(file.name, text))
        format = _detect(file.name, entries) if format == "auto" else format
        kept = [e for e in entries if _selected(e, where or {})]
        rows = [row for e in kept if (row := _READERS[format](e)) is not None]
        skipped = len(kept) - len(rows)
    if not rows:
        raise DatasetError(
            f"{file.name}: no usable row ({skipped} skipped); check the format ({format}) and the filter"
        )
    return Dataset(
        name=file.name, format=format, rows=tuple(rows), sha256=hashlib.sha256(stored).hexdigest(), skipped=skipped
    )


@dataclass(frozen=True)
class _Entry:
    """One JSON object of a file, and what to call it in an error."""

    file: str
    place: str
    value: dict[str, Any]

    def error(self, field: str, problem: str) -> DatasetError:
        return DatasetError(f"{self.file}: {self.place}: {field}: {problem}")

    def text(self, field: str, default: str | None = None) -> str:
        value = self.value.get(field, default)
        if not isinstance(value, str):
            raise self.error(field, "missing" if value is None else f"must be text, found {type(value).__name__}")
        return value

    def tokens(self, field: str) -> int:
        value = self.value[field]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(field, f"must be a whole number of at least 1, found {value!r}")
        return value

    @property
    def source_id(self) -> str:
        return str(self.value.get("id", self.place))


def _entries(file: str, text: str) -> Iterator[_Entry]:
    """Objects of a JSON array, or of JSON lines (blank lines are ignored)."""
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise DatasetError(f"{file}: line {error.lineno}: not JSON: {error.msg}") from error
        numbered = [(f"entry {i}", value) for i, value in enumerate(values, 1)]
    else:
        numbered = []
        for number, line in enumerate(text.split("\n"), 1):
            if line.strip():
                try:
                    numbered.append((f"line {number}", json.loads(line)))
                except json.JSONDecodeError as error:
                    raise DatasetError(f"{file}: line {number}: not JSON: {error.msg}") from error
    for place, value in numbered:
        if not isinstance(value, dict):
            raise DatasetError(f"{file}: {place}: must be a JSON object, found {type(value).__name__}")
        yield _Entry(file, place, value)


def _detect(file: str, entries: list[_Entry]) -> str:
    if not entries:
        raise DatasetError(f"{file}: the file holds no rows")
    first = entries[0].value
    if "conversations" in first:
        return "sharegpt"
    if "instruction" in first:
        return "alpaca"
    if "prompt" in first or "prompt_tokens" in first:
        return "jsonl"
    raise DatasetError(
        f"{file}: {entries[0].place}: format not recognised from the fields {sorted(first)}; "
        f"name one of {', '.join(FORMATS[1:])}"
    )


def _selected(entry: _Entry, where: Mapping[str, frozenset[str]]) -> bool:
    for field, allowed in where.items():
        if field not in entry.value:
            raise entry.error(field, "the filter names a field that this row does not have")
        value = entry.value[field]
        if allowed.isdisjoint(str(v) for v in (value if isinstance(value, list) else [value])):
            return False
    return True


def _sharegpt(entry: _Entry) -> WorkloadRow | None:
    turns = entry.value.get("conversations")
    if not isinstance(turns, list):
        raise entry.error("conversations", "must be a list of turns")
    for number, turn in enumerate(turns):
        if (
            not isinstance(turn, dict)
            or not isinstance(turn.get("from"), str)
            or not isinstance(turn.get("value"), str)
        ):
            raise entry.error(f"conversations[{number}]", "must be an object with the texts 'from' and 'value'")
    for question, answer in itertools.pairwise(turns):
        if question["from"] in _USER_ROLES and answer["from"] in _ASSISTANT_ROLES:
            return WorkloadRow(source_id=entry.source_id, prompt=question["value"], output_text=answer["value"])
    return None


def _alpaca(entry: _Entry) -> WorkloadRow:
    parts = [entry.text("instruction"), entry.text("input", default="")]
    prompt = "\n\n".join(part for part in parts if part)
    return WorkloadRow(source_id=entry.source_id, prompt=prompt, output_text=entry.text("output"))


def _jsonl(entry: _Entry) -> WorkloadRow:
    has = entry.value.keys()
    for texts, counts in (("prompt", "prompt_tokens"), ("output", "output_tokens")):
        if texts not in has and counts not in has:
            raise entry.error(texts, f"missing; give {texts} (text) or {counts} (a number)")
    arrival = entry.value.get("timestamp") if "prompt_tokens" in has else None
    if arrival is not None and (isinstance(arrival, bool) or not isinstance(arrival, (int, float))):
        raise entry.error("timestamp", f"must be a number of seconds, found {arrival!r}")
    return WorkloadRow(
        source_id=entry.source_id,
        prompt=entry.text("prompt") if "prompt" in has else None,
        prompt_tokens=entry.tokens("prompt_tokens") if "prompt_tokens" in has else None,
        output_text=entry.text("output") if "output" in has else None,
        output_tokens=entry.tokens("output_tokens") if "output_tokens" in has else None,
        arrival_s=None if arrival is None else float(arrival),
    )


_READERS = {"sharegpt": _sharegpt, "alpaca": _alpaca, "jsonl": _jsonl}


def _read_csv(file: str, text: str, format: str) -> tuple[list[WorkloadRow], int, str]:
    try:
        trace = trace_csv.read(text, None if format == "auto" else format)
    except trace_csv.TraceError as error:
        raise DatasetError(f"{file}: {error}") from error
    rows = [
        WorkloadRow(
            source_id=f"line {r.line}",
            prompt_tokens=r.prompt_tokens,
            output_tokens=r.output_tokens,
            arrival_s=r.arrival_s,
        )
        for r in trace.requests
    ]
    return rows, trace.skipped, trace.format
