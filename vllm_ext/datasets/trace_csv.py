"""Request traces published as CSV: lengths in tokens and, mostly, arrival times."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime


class TraceError(ValueError):
    """A malformed trace; the message names line and column."""


def _seconds(text: str) -> float:
    seconds = float(text)
    if not math.isfinite(seconds):
        raise ValueError(text)
    return seconds


def _date_and_time(text: str) -> float:
    """Seconds since 1970 of ``2023-11-16 18:15:46.6805900``; UTC, with more decimals than `datetime` reads."""
    whole, _, fraction = text.removesuffix("+00:00").partition(".")
    since_epoch = datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp()
    return since_epoch + (float(f"0.{fraction}") if fraction else 0.0)


@dataclass(frozen=True)
class _Columns:
    prompt: str | None
    output: str
    time: str | None
    read_time: Callable[[str], float] = _seconds


_COLUMNS = {
    "burstgpt": _Columns("Request tokens", "Response tokens", "Timestamp"),
    "azure": _Columns("ContextTokens", "GeneratedTokens", "TIMESTAMP", _date_and_time),
    "lengths": _Columns("num_prefill_tokens", "num_decode_tokens", None),
    "lmsys": _Columns(None, "output_token_length", None),
}
FORMATS = tuple(_COLUMNS)


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace."""

    line: int
    prompt_tokens: int | None
    """None where the format has no column for it."""
    output_tokens: int
    arrival_s: float | None


@dataclass(frozen=True)
class Trace:
    """The requests of a trace, and how many lines without a prompt or an output were skipped."""

    format: str
    requests: list[TraceRequest]
    skipped: int


def read(text: str, format: str | None, where: Mapping[str, frozenset[str]] | None = None) -> Trace:
    """Read a CSV trace; without a format its header decides.

    Args:
        text: The file.
        format: One of `FORMATS`.
        where: Keep only lines whose column has one of the given values.

    Raises:
        TraceError: unknown header, missing column, or a value that is not a number.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    header = list(reader.fieldnames or ())
    format = format or _detect(header)
    columns = _COLUMNS[format]
    for name in filter(None, (columns.prompt, columns.output, columns.time)):
        if name not in header:
            raise TraceError(f"line 1: column {name!r} of the {format} format is missing; found {header}")
    for name in where or ():
        if name not in header:
            raise TraceError(f"line 1: the filter names the column {name!r}, which is missing; found {header}")
    requests, skipped = [], 0
    for row in reader:
        if any(row[name] not in allowed for name, allowed in (where or {}).items()):
            continue
        prompt = None if columns.prompt is None else _count(row, columns.prompt, reader.line_num)
        output = _count(row, columns.output, reader.line_num)
        arrival = None if columns.time is None else _time(row, columns.time, columns.read_time, reader.line_num)
        if output and (prompt is None or prompt > 0):
            requests.append(TraceRequest(reader.line_num, prompt, output, arrival))
        else:
            skipped += 1  # the service failed or refused: no tokens to serve
    return Trace(format, requests, skipped)


def _detect(header: list[str]) -> str:
    for format, columns in _COLUMNS.items():
        if columns.output in header and (columns.prompt is None or columns.prompt in header):
            return format
    known = "; ".join(f"{name}: {', '.join(filter(None, (c.prompt, c.output)))}" for name, c in _COLUMNS.items())
    raise TraceError(f"line 1: columns {header} belong to no known trace format ({known})")


def _count(row: dict[str, str], column: str, line: int) -> int:
    value = row[column]
    try:
        count = int(value)
    except (TypeError, ValueError):
        raise TraceError(f"line {line}: {column}: must be a whole number, found {value!r}") from None
    if count < 0:
        raise TraceError(f"line {line}: {column}: must be 0 or more, found {value!r}")
    return count


def _time(row: dict[str, str], column: str, read_time: Callable[[str], float], line: int) -> float:
    value = row[column]
    try:
        return read_time(value)
    except (AttributeError, TypeError, ValueError):
        raise TraceError(f"line {line}: {column}: cannot be read as a time, found {value!r}") from None
