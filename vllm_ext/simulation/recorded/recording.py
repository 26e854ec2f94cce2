"""Recordings of real runs, as `record_run.py` writes them, read for replay and validation.

A recording is a file of JSON lines, gzipped if its name ends in ``.gz``. Each run is a block of lines that begins with
``run`` and ends with ``end``; blocks follow one another, so that a benchmark can append run by run. What each type of
line holds stands at its class below, and in `docs/simulator-results.md`.

All times are seconds of the machine's monotonic clock, those of ``request`` after ``client_start_s`` of the run.
``at_s`` and ``end_s`` frame a call; ``clock`` holds the readings that the scheduler's policies took in it, to the last
bit.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from vllm_ext.config.model import first_problem


class RecordingError(ValueError):
    """A recording can't be read, or holds what can't be used; the message names file, line and field."""


class Line(BaseModel):
    """Any line; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSettings(Line):
    """What a recorded scheduler was built with; see `vllm_ext.simulation.recorded.recorder.settings`."""

    system: str
    scheduler_cls: str
    options: dict[str, Any]
    runtime_coefficients: tuple[float, ...] | None = None
    runtime_pivot: tuple[int, float] | None = None
    policy: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    prefix_caching: bool
    async_scheduling: bool
    chunked_prefill: bool
    watermark: float
    long_prefill_token_threshold: int
    reserve_full_isl: bool
    lookahead_tokens: int
    speculative_tokens: int
    v2_model_runner: bool
    kv_groups: tuple[str, ...]
    connector: str | None


class Header(Line):
    """The first line of a run."""

    type: Literal["run"] = "run"
    format: Literal[1] = 1
    system: str
    """As the benchmark names it."""
    load: float
    """Fraction of the capacity."""
    repeat: int
    model: str
    """Name of the model or of its folder."""
    versions: dict[str, str]
    settings: EngineSettings
    client_start_s: float = 0.0
    """When the measured part began; ``request`` lines count from here."""
    facts: dict[str, Any] = Field(default_factory=dict)
    """What else was observed of the run: load of the machine, queue lengths."""


class _Call(Line):
    at_s: float
    end_s: float
    clock: tuple[float, ...]


class Add(_Call):
    """A request that reached the scheduler."""

    type: Literal["add"] = "add"
    req_id: str
    """vLLM's internal id: the client's, with a random suffix."""
    arrival_time: float
    """Wall clock of the front end, as vLLM's priority policy compares it."""
    prompt: tuple[int, ...]
    max_tokens: int
    priority: int
    session_id: str | None
    cache_salt: str | None
    extra_args: dict[str, Any] | None
    unsupported: tuple[str, ...]
    """Features of the request that a replay does not model."""


class Step(_Call):
    """A decision: a ``schedule()``."""

    type: Literal["step"] = "step"
    step: int
    throttled: bool
    scheduled: tuple[tuple[str, int], ...]
    computed: tuple[int, ...]
    """Per entry of ``scheduled``: tokens whose KV was there before."""
    new: tuple[str, ...]
    resumed: tuple[str, ...]
    preempted: tuple[str, ...]


class Update(_Call):
    """The output of a step: an ``update_from_output()``."""

    type: Literal["update"] = "update"
    step: int
    """Number of the step it belongs to."""
    tokens: tuple[tuple[str, tuple[int, ...]], ...]
    """Sampled tokens by request, in the runner's order; none for a partial prefill."""
    finished: tuple[tuple[str, str], ...]
    """(request, finish reason)."""
    busy: bool
    """Whether the engine goes on at once."""


class Finish(_Call):
    """Requests ended from outside: a client left."""

    type: Literal["finish"] = "finish"
    req_ids: tuple[str, ...] | None
    """None: all."""
    status: str
    """Name of vLLM's ``RequestStatus``."""


class OtherCall(_Call):
    """Another call from outside that changes what is decided later: a reset of the prefix cache, a pause."""

    type: Literal["call"] = "call"
    name: Literal["reset_prefix_cache", "set_pause_state", "update_predictions"]
    args: tuple[Any, ...]


class ClientRequest(Line):
    """What the client saw of one measured request."""

    type: Literal["request"] = "request"
    system: str
    load: float
    repeat: int
    req_id: str
    """The client's id: that of the ``add`` line without its random suffix."""
    source_id: str
    arrival_s: float
    """When it was due."""
    sent_s: float
    """When it was sent."""
    prompt_tokens: int
    output_tokens: int
    token_times_s: tuple[float, ...]


class End(Line):
    """The last line of a run."""

    type: Literal["end"] = "end"
    lines: int
    dropped: int


Entry = Add | Step | Update | Finish | OtherCall
_LINE: TypeAdapter[Any] = TypeAdapter(Annotated[Header | Entry | ClientRequest | End, Field(discriminator="type")])


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
    block: list[tuple[int, Any]] = []
    for number, line in _lines(path):
        where = f"{path.name}, line {number}"
        if block and isinstance(line, Header):
            raise RecordingError(f"{where}: a run begins before the one of line {block[0][0]} has ended")
        if not block and not isinstance(line, Header):
            raise RecordingError(f"{where}: a line of type {line.type!r} before the first line of a run")
        block.append((number, line))
        if isinstance(line, End):
            runs.append(_run(path.name, block, where))
            block = []
    if block:
        raise RecordingError(
            f"{path.name}: the run of line {block[0][0]} has no 'end' after line {block[-1][0]}; "
            "the recording was cut short"
        )
    if not runs:
        raise RecordingError(f"{path.name}: holds no run; was it written by record_run.py?")
    return runs


def _run(source: str, block: Sequence[tuple[int, Any]], where: str) -> Run:
    (first, header), (_, end) = block[0], block[-1]
    if len(block) != end.lines:
        raise RecordingError(
            f"{where}: field 'lines': {end.lines} lines were written for the run of line {first}, "
            f"{len(block)} are there"
        )
    entries = [(number, line) for number, line in block if isinstance(line, Entry)]
    return Run(
        source=source,
        line=first,
        header=header,
        entries=tuple(entry for _, entry in entries),
        lines=tuple(number for number, _ in entries),
        requests=tuple(line for _, line in block if isinstance(line, ClientRequest)),
        dropped=end.dropped,
    )


def _lines(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    yield number, _LINE.validate_json(raw)
                except ValidationError as error:
                    raise RecordingError(f"{path.name}, line {number}: {first_problem(error, skip=1)}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RecordingError(f"{path.name}, after line {number}: the compressed data is damaged ({error})") from error
