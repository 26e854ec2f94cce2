"""Readers of recorded workloads: prompts and answers, or only their lengths and arrival times, in public formats.

Every reader returns rows in file order and never guesses: a bad row is an error that names file, line (or entry) and
field; rows are left out only where that is asked for, and are counted. Lengths in tokens stay unknown where a file has
only text; whoever runs the workload counts them with the tokenizer it serves with.

`_FORMATS` lists the formats; docs/simulator-inputs.md says what their files hold. Any of them may be gzipped.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import gzip
import hashlib
import io
import itertools
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from vllm_ext.config import HASH_BLOCK_TOKENS

_Read = TypeVar("_Read")
_Made = TypeVar("_Made")
_MOST_CHARS = 80
"""Of a wrong value in an error."""
_LARGEST_SHOWN = 10**_MOST_CHARS
_USER_ROLES = frozenset({"human", "user"})
_ASSISTANT_ROLES = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})


class DatasetError(ValueError):
    """A workload file that cannot be read; the message names file, line or entry, and field."""


@dataclass(frozen=True, kw_only=True, slots=True)
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
    output_quantiles: tuple[int, ...] | None = None
    """What a predictor said of the output length beforehand, in tokens, at `length_distribution.LEVELS`."""
    arrival_s: float | None = None
    """Recorded arrival, in seconds on the file's own clock."""
    hash_ids: tuple[int, ...] | None = None
    """One id per block of `HASH_BLOCK_TOKENS` prompt tokens, the last block perhaps partial: prompts whose leading ids
    are equal have equal leading tokens."""
    token_ids: tuple[int, ...] | None = None
    """The prompt itself, in ids of the recording's own tokenizer."""
    share: float = 1.0
    """Share of the requests that were recorded when this one was: a log may hold a sample."""
    tenant: str = ""
    """Who sent it, or what stands for that; empty: not recorded."""
    conversation: str | None = None
    """Conversation of a request whose arrival is recorded: its prompt holds the earlier turns and their answers."""
    later: tuple[WorkloadRow, ...] = ()
    """The conversation's turns after this one."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """A workload with its provenance."""

    name: str
    """File name without folder, or the name of a synthetic preset."""
    format: str
    """Reader that was used."""
    rows: tuple[WorkloadRow, ...]
    """Requests in file order; of a conversation the first, which has the others."""
    sha256: str
    """Of the file as stored (compressed, if it is)."""
    share: float = 1.0
    """Share of the requests that came which the rows are."""
    skipped: int = 0
    """Valid entries that hold no request: conversations without an answered question, failed requests of a trace."""
    bad_rows: int = 0
    """Rows that were left out because they cannot be read."""


def load(
    path: str | Path,
    format: str = "auto",
    where: Mapping[str, frozenset[str]] | None = None,
    *,
    outputs_only: bool = False,
    skip_bad_rows: bool = False,
) -> Dataset:
    """Read a workload file.

    Args:
        path: The file; ``.gz`` is unpacked on the fly.
        format: One of `FORMATS`; ``auto`` looks at the suffix and at the first row.
        where: Keep only rows whose field (of a CSV file, column) equals, or is a list containing, one of the values.
        outputs_only: Whether a file that says nothing of prompts (``lmsys``) is of use.
        skip_bad_rows: Leave out, and count, JSON lines that cannot be read and rows with a bad field.

    Raises:
        DatasetError: unknown format, unreadable or malformed file, or no row left.
    """
    file = Path(path)
    if format not in FORMATS:
        raise DatasetError(f"dataset format {format!r}: must be one of {', '.join(FORMATS)}")
    stored, text = _contents(file)
    is_csv = file.name.removesuffix(".gz").endswith(".csv") if format == "auto" else _FORMATS[format].is_csv
    bad = _BadRows(skip=skip_bad_rows)
    found = list(_csv_entries(file.name, text) if is_csv else _json_entries(file.name, text, bad))
    if not found:
        raise DatasetError(f"{file.name}: the file holds no rows")
    format = _detect(found[0]) if format == "auto" else format
    kept = [entry for entry in _FORMATS[format].entries(found) if entry.meets(where or {})]
    read = [row for entry in kept for row in bad.guarded(_FORMATS[format].read, entry)]
    rows = _FORMATS[format].ordered(row for row in read if row is not None)
    skipped = len(read) - len(rows)
    if not rows:
        raise DatasetError(
            f"{file.name}: no usable row ({skipped} skipped); check the format ({format}) and the filter"
        )
    if not outputs_only and rows[0].prompt is None and rows[0].prompt_tokens is None:
        raise DatasetError(
            f"{file.name}: the {format} format has no prompts; prompts_from must say whose lengths to use"
        )
    sha256 = hashlib.sha256(stored).hexdigest()
    share = len(rows) / sum(1 / row.share for row in rows)  # each row stands for 1 / share requests
    return Dataset(
        name=file.name, format=format, rows=rows, sha256=sha256, share=share, skipped=skipped, bad_rows=bad.count
    )


@dataclass(frozen=True, kw_only=True)
class TextFile:
    """Texts with their provenance."""

    name: str
    """File name without folder."""
    texts: tuple[str, ...]
    sha256: str
    """Of the file as stored (compressed, if it is)."""


def load_texts(path: str | Path) -> TextFile:
    """Read texts: a ``.txt`` is one, a JSON object has one in ``text`` or ``prompt``, with its ``output`` behind it.

    Any other format of `load` with prompts will do; a conversation is one text. Any of them may be gzipped.

    Raises:
        DatasetError: unreadable or malformed file, or one without texts.
    """
    file = Path(path)
    stored, text = _contents(file)
    if file.name.removesuffix(".gz").endswith(".txt"):
        found = [text]
    elif not file.name.removesuffix(".gz").endswith(".csv") and (plain := _plain(file.name, text)):
        found = plain
    else:
        rows = load(path, outputs_only=True).rows
        turns = [[part for turn in (row, *row.later) for part in (turn.prompt, turn.output_text)] for row in rows]
        found = ["\n".join(filter(None, parts)) for parts in turns]
    if not any(one.strip() for one in found):
        raise DatasetError(f"{file.name}: holds no texts; needed is a .txt, or JSON lines with 'text' or 'prompt'")
    return TextFile(name=file.name, texts=tuple(found), sha256=hashlib.sha256(stored).hexdigest())


def _plain(file: str, text: str) -> list[str]:
    """Texts of JSON objects that are no requests: without an output; none if the first is a request."""
    entries = list(_json_entries(file, text, _BadRows(skip=False)))
    first: Mapping[str, Any] = entries[0].value if entries else {}
    field = next((name for name in ("text", "prompt") if name in first), None)
    return [entry.text(field) for entry in entries] if field is not None and "output" not in first else []


def _contents(file: Path) -> tuple[bytes, str]:
    """A file as stored, and as text."""
    try:
        stored = file.read_bytes()
        text = (gzip.decompress(stored) if file.suffix == ".gz" else stored).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DatasetError(f"{file.name}: cannot be read as UTF-8 text: {error}") from error
    return stored, text


@dataclass
class _BadRows:
    """What becomes of rows that cannot be read: an error, or a number."""

    skip: bool
    count: int = 0

    def guarded(self, read: Callable[[_Read], _Made], value: _Read) -> Iterator[_Made]:
        """Yield what is read; nothing of a bad row that is left out."""
        try:
            yield read(value)
        except DatasetError:
            if not self.skip:
                raise
            self.count += 1


@dataclass(frozen=True)
class _Entry:
    """One JSON object, or one line of a CSV file, and what to call it in an error."""

    file: str
    place: str
    value: Mapping[str, Any]
    is_csv: bool = False
    """Numbers are texts."""

    def error(self, field: str, problem: str) -> DatasetError:
        return DatasetError(f"{self.file}: {self.place}: {field}: {problem}")

    def get(self, field: str) -> Any:
        if (value := self.value.get(field)) is None:
            raise self.error(field, f"missing; found the fields {list(self.value)}")
        return value

    def text(self, field: str) -> str:
        if not isinstance(value := self.get(field), str):
            raise self.error(field, f"must be text, found {type(value).__name__}")
        return value

    def tokens(self, field: str, at_least: int = 0) -> int:
        found = value = self.get(field)
        if self.is_csv:
            with contextlib.suppress(ValueError):
                value = int(found)
        if type(value) is not int or value < at_least:
            raise self.error(field, f"must be a whole number of at least {at_least}, found {_short(found)}")
        return value

    def number(self, field: str, unit: str) -> float:
        value = self.get(field)
        with contextlib.suppress(ValueError, OverflowError):
            if type(value) in ((str,) if self.is_csv else (int, float)):
                number = _NUMBERS[unit](value)
                if math.isfinite(number):
                    return number
        raise self.error(field, f"must be a {unit}, found {_short(value)}")

    def meets(self, where: Mapping[str, frozenset[str]]) -> bool:
        for field, allowed in where.items():
            if field not in self.value:
                raise self.error(field, f"the filter names a field that this row does not have; found {[*self.value]}")
            value = self.value[field]
            if allowed.isdisjoint(str(v) for v in (value if isinstance(value, list) else [value])):
                return False
        return True

    def row(self, **fields: Any) -> WorkloadRow:
        return WorkloadRow(source_id=self.place if self.is_csv else str(self.value.get("id", self.place)), **fields)


def _short(value: object) -> str:
    shown = repr(value) if not isinstance(value, int) or abs(value) < _LARGEST_SHOWN else "a huge number"
    return shown if len(shown) <= _MOST_CHARS else f"{shown[:_MOST_CHARS]}..."


def _csv_entries(file: str, text: str) -> Iterator[_Entry]:
    lines = csv.DictReader(io.StringIO(text, newline=""), restkey="", restval="")
    try:
        for value in lines:
            yield _Entry(file, f"line {lines.line_num}", value, is_csv=True)
    except csv.Error as error:
        raise DatasetError(f"{file}: line {lines.line_num + 1}: not CSV: {error}") from error


def _json_entries(file: str, text: str, bad: _BadRows) -> Iterator[_Entry]:
    """Objects of a JSON array, or of JSON lines (blank lines are ignored)."""
    is_array = text.lstrip().startswith("[")
    parts = [text] if is_array else text.split("\n")
    for line, part in enumerate(parts, 1):
        if not part.strip():
            continue
        if is_array:
            for number, value in enumerate(_parsed(file, line, part), 1):
                yield from bad.guarded(functools.partial(_json_entry, file, f"entry {number}"), value)
        else:
            yield from bad.guarded(functools.partial(_json_line, file, line), part)


def _json_line(file: str, line: int, part: str) -> _Entry:
    return _json_entry(file, f"line {line}", _parsed(file, line, part))


def _json_entry(file: str, place: str, value: Any) -> _Entry:
    if not isinstance(value, dict):
        raise DatasetError(f"{file}: {place}: must be a JSON object, found {type(value).__name__}")
    return _Entry(file, place, value)


def _parsed(file: str, line: int, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{file}: line {line + error.lineno - 1}: not JSON: {error.msg}") from error
    except (RecursionError, ValueError) as error:  # of a number with thousands of digits
        raise DatasetError(f"{file}: line {line}: not JSON that can be read: {error}") from error


def _detect(first: _Entry) -> str:
    known = {name: format for name, format in _FORMATS.items() if format.is_csv == first.is_csv}
    for name, format in known.items():
        if not format.telltales.isdisjoint(first.value):
            return name
    raise DatasetError(
        f"{first.file}: {first.place}: format not recognised from the fields {list(first.value)}; "
        f"name one of {', '.join(known)}"
    )


_FRACTION = re.compile(r"([^.]+)(?:(\.\d+)([Z+-].*)?)?")
"""A time's decimals, and what stands before and after them."""


def _date_and_time(text: str) -> float:
    """Seconds since 1970 of ``2023-11-16 18:15:46.6805900+01:00``, with more decimals than `datetime` reads.

    Without an offset, or with ``Z``, it is UTC.
    """
    if (parts := _FRACTION.fullmatch(text)) is None:
        raise ValueError(text)
    before, fraction, offset = parts.groups(default="")
    moment = datetime.fromisoformat(before + offset)
    since_epoch = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    return since_epoch + float(f"0{fraction or '.0'}")


_QUANTILES = 9
"""As many as `length_distribution.LEVELS`."""
_NUMBERS: dict[str, Callable[[Any], float]] = {
    "number": float,
    "number of seconds": float,
    "number of milliseconds": lambda value: float(value) / 1000,
    "date and time": _date_and_time,
}


def _sharegpt(entry: _Entry) -> WorkloadRow | None:
    """Every user message that an assistant's message follows, in order; other messages are passed over."""
    turns = entry.value.get("conversations")
    if not isinstance(turns, list):
        raise entry.error("conversations", "must be a list of turns")
    for number, turn in enumerate(turns):
        if not (isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("from", "value"))):
            raise entry.error(f"conversations[{number}]", "must be an object with the texts 'from' and 'value'")
    answered = [
        {"prompt": question["value"], "output_text": answer["value"]}
        for question, answer in itertools.pairwise(turns)
        if question["from"] in _USER_ROLES and answer["from"] in _ASSISTANT_ROLES
    ]
    return entry.row(**answered[0], later=tuple(entry.row(**turn) for turn in answered[1:])) if answered else None


def _alpaca(entry: _Entry) -> WorkloadRow:
    parts = [entry.text("instruction"), entry.text("input") if "input" in entry.value else ""]
    return entry.row(prompt="\n\n".join(part for part in parts if part), output_text=entry.text("output"))


def _jsonl(entry: _Entry) -> WorkloadRow:
    has = entry.value.keys()
    for texts, counts in (("prompt", "prompt_tokens"), ("output", "output_tokens")):
        if texts not in has and counts not in has:
            raise entry.error(texts, f"missing; give {texts} (text) or {counts} (a number)")
    timed = "prompt_tokens" in has and entry.value.get("timestamp") is not None
    return entry.row(
        prompt=entry.text("prompt") if "prompt" in has else None,
        prompt_tokens=entry.tokens("prompt_tokens", 1) if "prompt_tokens" in has else None,
        output_text=entry.text("output") if "output" in has else None,
        output_tokens=entry.tokens("output_tokens", 1) if "output_tokens" in has else None,
        output_quantiles=_quantiles(entry) if entry.value.get("output_quantiles") is not None else None,
        arrival_s=entry.number("timestamp", "number of seconds") if timed else None,
    )


def _quantiles(entry: _Entry) -> tuple[int, ...]:
    found = entry.value["output_quantiles"]
    whole = isinstance(found, list) and all(type(tokens) is int and tokens >= 1 for tokens in found)
    if not whole or len(found) != _QUANTILES or found != sorted(found):
        allowed = f"must be a list of {_QUANTILES} ascending whole numbers of at least 1, found {found!r}"
        raise entry.error("output_quantiles", allowed)
    return tuple(found)


@dataclass(frozen=True)
class _Format:
    telltales: frozenset[str]
    """Fields by one of which the first row shows that it is of this format."""
    read: Callable[[_Entry], WorkloadRow | None]
    is_csv: bool = False
    by_end: bool = False
    """Whether rows are in the order in which requests ended, or were sent by several clients."""
    columns: tuple[str, ...] = ()
    """Fields that are lists with a value per request; none: an entry is a request."""

    def entries(self, found: Sequence[_Entry]) -> Iterator[_Entry]:
        """Yield an entry per request."""
        for entry in found:
            yield from _requests_of(entry, self.columns) if self.columns else (entry,)

    def ordered(self, rows: Iterable[WorkloadRow]) -> tuple[WorkloadRow, ...]:
        """Return rows by arrival, where the file has another order."""
        return tuple(sorted(rows, key=lambda row: row.arrival_s or 0.0) if self.by_end else rows)


def _requests_of(entry: _Entry, columns: Sequence[str]) -> Iterator[_Entry]:
    lists = [entry.get(name) for name in columns]
    for name, values in zip(columns, lists, strict=True):
        if not isinstance(values, list) or len(values) != len(lists[0]):
            raise entry.error(name, f"must be a list, with as many values as {columns[0]}")
    for number, values in enumerate(zip(*lists, strict=True), 1):
        yield _Entry(entry.file, f"{entry.place}: request {number}", dict(zip(columns, values, strict=True)))


def _request_log(entry: _Entry) -> WorkloadRow | None:
    """A line of the server's own request log; conversations are in it if clients name them.

    Those say more of what prompts share than hash ids do, which know blocks only.
    """
    prompt_tokens, output_tokens = entry.tokens("prompt_tokens"), entry.tokens("output_tokens")
    arrival_s = entry.number("arrival_unix_s", "number of seconds")
    named = entry.value.get("conversation_id") is not None
    conversation = entry.text("conversation_id") if named else None
    hash_ids, token_ids = _hash_ids(entry, "prompt_tokens", prompt_tokens), _ids(entry, "prompt_token_ids")
    if token_ids is not None and len(token_ids) != prompt_tokens:
        raise entry.error("prompt_token_ids", f"must have prompt_tokens={prompt_tokens} ids, found {len(token_ids)}")
    share = entry.number("sample", "number") if "sample" in entry.value else 1.0
    if not 0 < share <= 1:
        raise entry.error("sample", f"must be above 0 and at most 1, found {share!r}")
    if not output_tokens or not prompt_tokens:
        return None
    return entry.row(
        prompt_tokens=prompt_tokens, output_tokens=output_tokens, arrival_s=arrival_s, conversation=conversation,
        hash_ids=None if named else hash_ids, token_ids=token_ids, share=share,
        tenant=entry.text("salt_tag") if entry.value.get("salt_tag") is not None else "",
    )  # fmt: skip


def _ids(entry: _Entry, field: str) -> tuple[int, ...] | None:
    ids = entry.value.get(field)
    if ids is None:
        return None
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise entry.error(field, "must be a list of whole numbers of at least 0")
    return tuple(ids)


def _hash_ids(entry: _Entry, prompt: str | None, prompt_tokens: int | None) -> tuple[int, ...] | None:
    ids = _ids(entry, "hash_ids")
    if ids is not None and (needed := -(-(prompt_tokens or 0) // HASH_BLOCK_TOKENS)) != len(ids):
        raise entry.error("hash_ids", f"must have {needed} ids for {prompt}={prompt_tokens}, found {len(ids)}")
    return ids


def _trace(
    prompt: str | None, output: str, time: str | None = None, unit: str = "number of seconds", *, is_csv: bool = True
) -> _Format:
    """Return a format with lengths, an arrival time, and hash ids if there are any, in the fields so named."""

    def read(entry: _Entry) -> WorkloadRow | None:
        prompt_tokens = None if prompt is None else entry.tokens(prompt)
        output_tokens = entry.tokens(output)
        arrival_s = None if time is None else entry.number(time, unit)
        hash_ids = _hash_ids(entry, prompt, prompt_tokens)
        if not output_tokens or prompt_tokens == 0:
            return None  # the service failed or refused: no tokens to serve
        return entry.row(
            prompt_tokens=prompt_tokens, output_tokens=output_tokens, arrival_s=arrival_s, hash_ids=hash_ids
        )

    return _Format(frozenset({prompt or output}), read, is_csv)


_BENCH = ("input_lens", "output_lens", "start_times")
_FORMATS = {
    "sharegpt": _Format(frozenset({"conversations"}), _sharegpt),
    "alpaca": _Format(frozenset({"instruction"}), _alpaca),
    "request-log": _Format(frozenset({"arrival_unix_s"}), _request_log, by_end=True),
    "vllm-bench": dataclasses.replace(_trace(*_BENCH, is_csv=False), by_end=True, columns=_BENCH),
    "jsonl": _Format(frozenset({"prompt", "prompt_tokens"}), _jsonl),
    "mooncake": _trace("input_length", "output_length", "timestamp", "number of milliseconds", is_csv=False),
    "burstgpt": _trace("Request tokens", "Response tokens", "Timestamp"),
    "azure": _trace("ContextTokens", "GeneratedTokens", "TIMESTAMP", "date and time"),
    "lengths": _trace("num_prefill_tokens", "num_decode_tokens"),
    "lmsys": _trace(None, "output_token_length"),
}
FORMATS = ("auto", *_FORMATS)
