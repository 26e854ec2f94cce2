"""Recordings of real runs, as `engine_compare.py --record FILE` writes them, read for replay and validation.

A recording is a file of JSON lines, gzipped if its name ends in ``.gz``. Each run is a block of lines that begins with
``run`` and ends with ``end``; blocks follow one another, so that a benchmark can append run by run.

| type | what it says |
|---|---|
| ``run`` | format, system, load, repeat, the settings the scheduler was built with, model, versions |
| ``add`` | a request reached the scheduler: id, prompt tokens, bounds, hints, and when |
| ``step`` | a ``schedule()``: who computes how many tokens, from where on; who is new, resumed, preempted |
| ``update`` | an ``update_from_output()``: the tokens sampled for a step, who ended and why |
| ``finish`` | requests were ended from outside (a client left) |
| ``call`` | another call from outside that changes what is decided: a reset of the prefix cache, a pause |
| ``request`` | what a client of the run saw: when its request was due and sent, when each token came |
| ``end`` | how many lines the block has, and how many entries did not fit into the record |

All times are seconds of the machine's monotonic clock, those of ``request`` after ``client_start_s`` of the run.
``at_s`` and ``end_s`` frame a call; ``clock`` holds the readings that the scheduler's policies took in it, to the last
bit. The fields of each line are documented in `vllm_ext.simulation.recording_lines`.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vllm_ext.simulation.recording_lines import FORMAT, TYPES, ClientRequest, End, Entry, Header, Line


class RecordingError(ValueError):
    """A recording can't be read, or holds what can't be used; the message names file, line and field."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a recording."""

    source: str
    """Name of the file."""
    line: int
    """Where it begins there."""
    header: Header
    entries: tuple[Entry, ...]
    """What happened to the scheduler, in order."""
    lines: tuple[int, ...]
    """Line of each entry, for messages."""
    requests: tuple[ClientRequest, ...]
    """What the clients of the measured part saw."""
    dropped: int
    """Entries at the end that did not fit into the record."""

    @property
    def label(self) -> str:
        """System, load and repeat."""
        header = self.header
        return f"{header.system} at load {header.load:g}, repeat {header.repeat}"

    def of_type(self, kind: type[Entry]) -> Iterator[Any]:
        """Yield the entries of one type."""
        return (entry for entry in self.entries if isinstance(entry, kind))

    def client_id(self, req_id: str) -> str:
        """Return the client's id behind vLLM's internal one."""
        return req_id.rpartition("-")[0] or req_id


def start(path: Path) -> None:
    """Begin an empty recording; what was there is gone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")


def append(
    path: Path, header: Header, entries: Iterable[str], requests: Iterable[ClientRequest], *, dropped: int = 0
) -> None:
    """Append one run in one piece; a run that is cut short by a crash is told from its missing ``end``.

    Args:
        entries: Lines of JSON as the engine core's record gives them.
        dropped: Entries that did not fit into that record.
    """
    lines = [header.model_dump_json(), *entries, *(request.model_dump_json() for request in requests)]
    lines.append(End(lines=len(lines) + 1, dropped=dropped).model_dump_json())
    data = "".join(line + "\n" for line in lines).encode()
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)  # members of a gzip file may follow one another
    with path.open("ab") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> list[Run]:
    """Read all runs of a recording.

    Raises:
        OSError: there is no such file, or it can't be opened.
        RecordingError: it is damaged, cut short or of another format; names the line.
    """
    runs: list[Run] = []
    block: _Block | None = None
    number = 0
    for number, line in _lines(path):
        where = f"{path.name}, line {number}"
        if isinstance(line, Header):
            if block is not None:
                raise RecordingError(f"{where}: a run begins before the one of line {block.line} has ended")
            block = _Block(path.name, number, line)
        elif block is None:
            raise RecordingError(f"{where}: a line of type {line.type!r} before the first line of a run")  # type: ignore[attr-defined]
        elif isinstance(line, End):
            runs.append(block.close(line, where))
            block = None
        else:
            block.add(line, number)
    if block is not None:
        raise RecordingError(
            f"{path.name}: the run of line {block.line} has no 'end' after line {number}; the recording was cut short"
        )
    if not runs:
        raise RecordingError(f"{path.name}: holds no run; was it written by engine_compare.py --record?")
    return runs


class _Block:
    """The lines of a run while it is read."""

    def __init__(self, source: str, line: int, header: Header) -> None:
        self.line = line
        self._source = source
        self._header = header
        self._entries: list[Any] = []
        self._lines: list[int] = []
        self._requests: list[ClientRequest] = []

    def add(self, line: Line, number: int) -> None:
        if isinstance(line, ClientRequest):
            self._requests.append(line)
        else:
            self._entries.append(line)
            self._lines.append(number)

    def close(self, end: End, where: str) -> Run:
        found = 2 + len(self._entries) + len(self._requests)
        if found != end.lines:
            raise RecordingError(
                f"{where}: field 'lines': {end.lines} lines were written for the run of line {self.line}, "
                f"{found} are there"
            )
        return Run(
            source=self._source,
            line=self.line,
            header=self._header,
            entries=tuple(self._entries),
            lines=tuple(self._lines),
            requests=tuple(self._requests),
            dropped=end.dropped,
        )


def _lines(path: Path) -> Iterator[tuple[int, Line]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                yield number, _parse(raw, f"{path.name}, line {number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordingError(f"{path.name}, after line {number}: the compressed data is damaged ({error})") from error


def _parse(raw: bytes, where: str) -> Line:
    try:
        fields = json.loads(raw)  # floats to the last bit
    except ValueError as error:
        raise RecordingError(f"{where}: not JSON ({error})") from error
    kind = fields.get("type") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in TYPES:
        raise RecordingError(f"{where}: field 'type': {kind!r} must be one of {', '.join(TYPES)}")
    if kind == "run" and fields.get("format") != FORMAT:
        raise RecordingError(f"{where}: field 'format': {fields.get('format')!r}, this version reads {FORMAT}")
    try:
        return TYPES[kind].model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise RecordingError(f"{where}: field {field!r}: {first['msg']} (found {first.get('input')!r:.80})") from error


def pick(runs: Sequence[Run], *, system: str | None = None) -> list[Run]:
    """Return the runs of a system, or all.

    Raises:
        RecordingError: there is none.
    """
    found = [run for run in runs if system in (None, run.header.system)]
    if not found:
        known = ", ".join(dict.fromkeys(run.header.system for run in runs))
        raise RecordingError(f"system={system!r}: the recording holds {known}")
    return found
