"""Readers of workloads published as JSON: an array of objects, or one object a line."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_ext.datasets.rows import HASH_BLOCK_TOKENS, DatasetError, WorkloadRow

_USER_ROLES = frozenset({"human", "user"})
_ASSISTANT_ROLES = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})


@dataclass(frozen=True)
class Entry:
    """One JSON object of a file, and what to call it in an error."""

    file: str
    place: str
    value: dict[str, Any]

    def error(self, field: str, problem: str) -> DatasetError:
        """Return an error that names file, place and field."""
        return DatasetError(f"{self.file}: {self.place}: {field}: {problem}")

    def text(self, field: str, default: str | None = None) -> str:
        """Return a text field."""
        value = self.value.get(field, default)
        if not isinstance(value, str):
            raise self.error(field, "missing" if value is None else f"must be text, found {type(value).__name__}")
        return value

    def tokens(self, field: str, at_least: int = 1) -> int:
        """Return a count of tokens."""
        if field not in self.value:
            raise self.error(field, "missing")
        value = self.value[field]
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise self.error(field, f"must be a whole number of at least {at_least}, found {value!r}")
        return value

    def number(self, field: str, unit: str) -> float | None:
        """Return a finite number, or None if the field is missing or null."""
        value = self.value.get(field)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(field, f"must be a number of {unit}, found {value!r}")
        return float(value)

    @property
    def source_id(self) -> str:
        """The row's id, or its place."""
        return str(self.value.get("id", self.place))


def entries(file: str, text: str) -> Iterator[Entry]:
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
        yield Entry(file, place, value)


def detect(file: str, found: list[Entry]) -> str:
    """Return the format that the first entry's fields belong to."""
    if not found:
        raise DatasetError(f"{file}: the file holds no rows")
    first = found[0].value
    for format, fields in _TELLTALES.items():
        if not fields.isdisjoint(first):
            return format
    raise DatasetError(
        f"{file}: {found[0].place}: format not recognised from the fields {sorted(first)}; "
        f"name one of {', '.join(READERS)}"
    )


def selected(entry: Entry, where: Mapping[str, frozenset[str]]) -> bool:
    """Whether every field of the filter equals, or is a list containing, one of the values wanted."""
    for field, allowed in where.items():
        if field not in entry.value:
            raise entry.error(field, "the filter names a field that this row does not have")
        value = entry.value[field]
        if allowed.isdisjoint(str(v) for v in (value if isinstance(value, list) else [value])):
            return False
    return True


def answered_questions(entry: Entry) -> tuple[WorkloadRow, ...]:
    """Every user message that an assistant's message follows, in order; other messages are passed over."""
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
    return tuple(
        WorkloadRow(source_id=entry.source_id, prompt=question["value"], output_text=answer["value"])
        for question, answer in itertools.pairwise(turns)
        if question["from"] in _USER_ROLES and answer["from"] in _ASSISTANT_ROLES
    )


def _sharegpt(entry: Entry) -> WorkloadRow | None:
    return next(iter(answered_questions(entry)), None)


def _alpaca(entry: Entry) -> WorkloadRow:
    parts = [entry.text("instruction"), entry.text("input", default="")]
    prompt = "\n\n".join(part for part in parts if part)
    return WorkloadRow(source_id=entry.source_id, prompt=prompt, output_text=entry.text("output"))


def _jsonl(entry: Entry) -> WorkloadRow:
    has = entry.value.keys()
    for texts, counts in (("prompt", "prompt_tokens"), ("output", "output_tokens")):
        if texts not in has and counts not in has:
            raise entry.error(texts, f"missing; give {texts} (text) or {counts} (a number)")
    return WorkloadRow(
        source_id=entry.source_id,
        prompt=entry.text("prompt") if "prompt" in has else None,
        prompt_tokens=entry.tokens("prompt_tokens") if "prompt_tokens" in has else None,
        output_text=entry.text("output") if "output" in has else None,
        output_tokens=entry.tokens("output_tokens") if "output_tokens" in has else None,
        arrival_s=entry.number("timestamp", "seconds") if "prompt_tokens" in has else None,
    )


def _mooncake(entry: Entry) -> WorkloadRow | None:
    prompt_tokens = entry.tokens("input_length", at_least=0)
    output_tokens = entry.tokens("output_length", at_least=0)
    arrival_ms = entry.number("timestamp", "milliseconds")
    if arrival_ms is None:
        raise entry.error("timestamp", "missing")
    hash_ids = entry.value.get("hash_ids")
    if hash_ids is not None:
        if not isinstance(hash_ids, list) or not all(type(i) is int and i >= 0 for i in hash_ids):
            raise entry.error("hash_ids", "must be a list of whole numbers of at least 0")
        if (needed := -(-prompt_tokens // HASH_BLOCK_TOKENS)) != len(hash_ids):
            raise entry.error(
                "hash_ids", f"must have {needed} ids for input_length={prompt_tokens}, found {len(hash_ids)}"
            )
    if not (prompt_tokens and output_tokens):
        return None
    return WorkloadRow(
        source_id=entry.source_id,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        arrival_s=arrival_ms / 1000,
        hash_ids=None if hash_ids is None else tuple(hash_ids),
    )


READERS: dict[str, Callable[[Entry], WorkloadRow | None]] = {
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "jsonl": _jsonl,
    "mooncake": _mooncake,
}
_TELLTALES = {
    "sharegpt": {"conversations"},
    "alpaca": {"instruction"},
    "jsonl": {"prompt", "prompt_tokens"},
    "mooncake": {"input_length"},
}
