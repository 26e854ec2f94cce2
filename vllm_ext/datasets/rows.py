"""What readers of recorded workloads return: requests and conversations with their provenance."""

from __future__ import annotations

from dataclasses import dataclass


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

    arrival_s: float | None = None
    """Recorded arrival, in seconds on the file's own clock."""

    hash_ids: tuple[int, ...] | None = None
    """One id per block of `HASH_BLOCK_TOKENS` prompt tokens, the last block perhaps partial: prompts whose leading ids
    are equal have equal leading tokens."""


HASH_BLOCK_TOKENS = 512
"""Tokens of a block of `WorkloadRow.hash_ids`."""


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


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """Recorded conversations with their provenance."""

    name: str
    """File name without folder."""

    turns: tuple[tuple[WorkloadRow, ...], ...]
    """Per conversation, in file order: its answered questions, at least one."""

    sha256: str
    """Of the file as stored (compressed, if it is)."""

    skipped: int = 0
    """Conversations without an answered question."""
