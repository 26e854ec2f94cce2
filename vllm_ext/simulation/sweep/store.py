"""Finished points on disk, in one sqlite3 file, so that whatever was interrupted goes on where it stopped.

A point's key is a digest of all that decides its outcome: the description of the run, the versions of vllm-ext and
vLLM, our own sources, and the content of the files and modules that the description names. Rows hold nothing of the
clock or the machine. Only the process that hands points out writes; several may share a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from vllm_ext.observability.files import set_aside, sha256_of
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.sources import module_files, source_digest, with_neighbours

logger = logging.getLogger(__name__)

NAME = "points.sqlite3"
_TABLE = "create table if not exists points (key text primary key, spec text, metrics text, sha256 text)"
_BUSY_S = 60.0
_FILES = {
    "file": (".",),
    "source": (".",),
    "prompts_from": (".",),
    "profile": (".",),
    "model": (".", "config.json"),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"),
}
"""Fields of a description that may name a file, or a folder: which files in there decide the outcome."""


class StoreError(OSError):
    """The store cannot be used; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: with metrics, or with an error."""

    metrics: Mapping[str, float] | None = None
    """Flat metrics; None if the run failed."""
    error: str | None = None
    """``Type: message`` of what was raised; None if it went well."""

    @property
    def failed(self) -> bool:
        """Whether the run has no metrics."""
        return self.metrics is None


@functools.cache
def versions() -> dict[str, str]:
    """Return what decides a run's outcome beside its description: the versions of vllm-ext and vLLM, our sources."""
    found = {"sources": source_digest()}
    for package in ("vllm-ext", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


class PointStore:
    """Finished points in a folder; a context manager, which opens and closes the file."""

    def __init__(self, folder: Path) -> None:
        """Use a folder; it is made when the store is opened."""
        self.path = folder / NAME
        self._versions = versions()
        self._checksums: dict[tuple[str, int, int], str] = {}
        self._rows: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        """Open the file. A damaged one is reported and set aside; rows that are whole go over into a new one.

        Raises:
            OSError: the folder or the file cannot be made, or read.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._rows = _opened(self.path)
        except sqlite3.DatabaseError as damage:
            if isinstance(damage, sqlite3.OperationalError):  # no rights, no space, locked: nothing is wrong with it
                raise StoreError(f"{self.path}: cannot be opened: {damage}") from damage
            kept = list(_whole_rows(self.path))
            for suffix in ("-wal", "-shm"):
                self.path.with_name(NAME + suffix).unlink(missing_ok=True)
            instead = f"{len(kept)} points could still be read, the rest is computed again"
            set_aside(self.path, damage, what=f"{self.path}", instead=instead, logger=logger)
            self._rows = _opened(self.path)
            with self._rows:
                self._rows.executemany("insert or replace into points values (?, ?, ?, ?)", kept)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._rows is not None:
            self._rows.close()
            self._rows = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other sweeps out of the folder meanwhile: they would compute the same points.

        Raises:
            StoreError: another sweep is at work there.
            OSError: the folder cannot be made.
        """
        folder = self.path.parent
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise StoreError(f"{folder.name}: another sweep is at work in this folder") from error
        finally:
            os.close(descriptor)

    def key(self, spec: SimulationSpec) -> str:
        """Return the key of a point."""
        description = spec.model_dump(mode="json")
        files = {str(file): self._checksum(file) for file in sorted(set(_files(description)))}
        decisive = {"versions": self._versions, "spec": description, "files": files}
        return hashlib.sha256(_canonical(decisive).encode()).hexdigest()[:40]

    def load(self, key: str) -> Outcome | None:
        """Return a stored outcome; None if there is none. A row whose checksum is wrong is reported and removed."""
        row = self._open.execute("select * from points where key = ?", (key,)).fetchone()
        if row is None:
            return None
        if not _is_whole(row):
            logger.warning("%s: the point %s is damaged; removed, computed again", self.path, key)
            with self._open as rows:
                rows.execute("delete from points where key = ?", (key,))
            return None
        return Outcome(metrics=json.loads(row[2]))

    def save(self, key: str, spec: SimulationSpec, metrics: Mapping[str, float]) -> None:
        """Store the metrics of a finished point.

        Raises:
            OSError: the file cannot be written.
            ValueError: a metric is not finite.
        """
        content = (key, _canonical(spec.model_dump(mode="json")), _canonical(metrics))
        try:
            with self._open as rows:
                rows.execute("insert or replace into points values (?, ?, ?, ?)", (*content, _sha256(content)))
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: cannot be written: {error}") from error

    @property
    def _open(self) -> sqlite3.Connection:
        if self._rows is None:
            raise RuntimeError(f"{self.path}: must be used within its context, `with store:`")
        return self._rows

    def _checksum(self, path: Path) -> str:
        """SHA-256 of a file, computed once while its size and time stay."""
        state = path.stat()
        known = (str(path), state.st_size, state.st_mtime_ns)
        if known not in self._checksums:
            self._checksums[known] = sha256_of(path)
        return self._checksums[known]


def _opened(path: Path) -> sqlite3.Connection:
    """Open or make the file; raises sqlite3.DatabaseError if it is damaged."""
    rows = sqlite3.connect(path, timeout=_BUSY_S)
    try:
        rows.execute("pragma journal_mode=wal")
        if (found := rows.execute("pragma quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        rows.execute(_TABLE)
        if len(rows.execute("pragma table_info(points)").fetchall()) != 4:
            raise sqlite3.DatabaseError("its table is another program's")
    except BaseException:
        rows.close()
        raise
    return rows


def _whole_rows(path: Path) -> Iterator[tuple[str, ...]]:
    """Yield what can still be read of a damaged file, up to the first page that can't."""
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as rows:
        rows.text_factory = lambda raw: raw.decode(errors="replace")
        yield from filter(_is_whole, rows.execute("select * from points"))


def _is_whole(row: tuple[Any, ...]) -> bool:
    return len(row) == 4 and all(isinstance(cell, str) for cell in row) and row[3] == _sha256(row[:3])


def _files(value: Any, name: str = "") -> Iterator[Path]:
    """Existing files that a description names, and the sources of the modules it names."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _files(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _files(inner, name)
    elif isinstance(value, str) and value:
        if name == "modules":
            yield from module_files(value)
        if name == "policies" and (path := Path(value.rpartition(":")[0])).is_file():
            yield from with_neighbours(path)
        for inside in _FILES.get(name, ()):
            if (path := Path(value) / inside).is_file():
                yield path


def _sha256(content: tuple[str, ...]) -> str:
    return hashlib.sha256("\0".join(content).encode()).hexdigest()


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
