"""Readers of recorded workloads: prompts and answers, or only their lengths and arrival times.

Every reader returns rows in file order and never guesses: a bad row is an error that names file, line (or entry) and
field. Lengths in tokens stay unknown where a file has only text; whoever runs the workload counts them with the
tokenizer it serves with.

| format | file | a row |
|---|---|---|
| sharegpt | JSON array or JSON lines of {id, conversations: [{from, value}]} | first turn that is answered |
| alpaca | JSON array or JSON lines of {instruction, input, output} | instruction, blank line, input |
| jsonl | JSON lines of {prompt or prompt_tokens, output or output_tokens, timestamp?} | as it stands |
| mooncake | JSON lines of {timestamp (ms), input_length, output_length, hash_ids?} | with the ids of shared prefixes |
| burstgpt | CSV: Timestamp, Request tokens, Response tokens | failed requests (0 tokens) are skipped and counted |
| azure | CSV: TIMESTAMP, ContextTokens, GeneratedTokens | as burstgpt |
| lengths | CSV: num_prefill_tokens, num_decode_tokens | as burstgpt, without arrival times |
| lmsys | CSV: index, output_token_length, model | output length only |

Any of them may be gzipped.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from pathlib import Path

from vllm_ext.datasets import json_rows, trace_csv
from vllm_ext.datasets.rows import Conversations, Dataset, DatasetError, WorkloadRow

FORMATS = ("auto", *json_rows.READERS, *trace_csv.FORMATS)
_NO_FILTER: Mapping[str, frozenset[str]] = {}


def load(
    path: str | Path,
    format: str = "auto",
    where: Mapping[str, frozenset[str]] | None = None,
    *,
    outputs_only: bool = False,
) -> Dataset:
    """Read a workload file.

    Args:
        path: The file; ``.gz`` is unpacked on the fly.
        format: One of `FORMATS`; ``auto`` looks at the suffix and at the first row.
        where: Keep only JSON objects whose field equals, or is a list containing, one of the given values; of a CSV
            file, lines whose column does.
        outputs_only: Whether a file that says nothing of prompts (``lmsys``) is of use.

    Raises:
        DatasetError: unknown format, unreadable or malformed file, or no row left.
    """
    file = Path(path)
    if format not in FORMATS:
        raise DatasetError(f"dataset format {format!r}: must be one of {', '.join(FORMATS)}")
    stored, text = _read(file)
    if _is_csv(file, format):
        rows, skipped, format = _read_csv(file.name, text, format, where or _NO_FILTER)
    else:
        found = list(json_rows.entries(file.name, text))
        format = json_rows.detect(file.name, found) if format == "auto" else format
        kept = [e for e in found if json_rows.selected(e, where or _NO_FILTER)]
        rows = [row for e in kept if (row := json_rows.READERS[format](e)) is not None]
        skipped = len(kept) - len(rows)
    if not rows:
        raise _no_row(file.name, format, skipped)
    if not outputs_only and rows[0].prompt is None and rows[0].prompt_tokens is None:
        raise DatasetError(
            f"{file.name}: the {format} format has no prompts; prompts_from must say whose lengths to use"
        )
    return Dataset(name=file.name, format=format, rows=tuple(rows), sha256=_checksum(stored), skipped=skipped)


def load_conversations(path: str | Path, where: Mapping[str, frozenset[str]] | None = None) -> Conversations:
    """Read all turns of a file of the ``sharegpt`` format; a turn is a user's message that is answered.

    Raises:
        DatasetError: unreadable or malformed file, another format, or no conversation left.
    """
    file = Path(path)
    stored, text = _read(file)
    found = list(json_rows.entries(file.name, text))
    if not found:
        raise DatasetError(f"{file.name}: the file holds no rows")
    kept = [e for e in found if json_rows.selected(e, where or _NO_FILTER)]
    turns = tuple(rows for e in kept if (rows := json_rows.answered_questions(e)))
    if not turns:
        raise _no_row(file.name, "sharegpt", len(kept))
    return Conversations(name=file.name, turns=turns, sha256=_checksum(stored), skipped=len(kept) - len(turns))


def _read(file: Path) -> tuple[bytes, str]:
    try:
        stored = file.read_bytes()
        return stored, (gzip.decompress(stored) if file.suffix == ".gz" else stored).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DatasetError(f"{file.name}: cannot be read as UTF-8 text: {error}") from error


def _is_csv(file: Path, format: str) -> bool:
    suffix = Path(file.stem).suffix if file.suffix == ".gz" else file.suffix
    return format in trace_csv.FORMATS or (format == "auto" and suffix == ".csv")


def _no_row(file: str, format: str, skipped: int) -> DatasetError:
    return DatasetError(f"{file}: no usable row ({skipped} skipped); check the format ({format}) and the filter")


def _checksum(stored: bytes) -> str:
    return hashlib.sha256(stored).hexdigest()


def _read_csv(
    file: str, text: str, format: str, where: Mapping[str, frozenset[str]]
) -> tuple[list[WorkloadRow], int, str]:
    try:
        trace = trace_csv.read(text, None if format == "auto" else format, where)
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
