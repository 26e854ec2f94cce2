"""Finished points on disk, in one sqlite3 file, so that whatever was interrupted goes on where it stopped.

A point's key is a digest of what decides its outcome: the description of the run, the versions of vllm-ext and vLLM,
and the content of the files and modules that the description names. Beside its metrics lie the names of our modules
that its process had imported and their checksum: once one of them has changed, the point is computed again. Rows hold
nothing of the clock or the machine. Only the process that hands points out writes; several may share a file.
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
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Self

from vllm_ext.files import set_aside, sha256_of
from vllm_ext.simulation.spec import SimulationSpec
from vllm_ext.simulation.sweep.sources import checksums, decisive_files, digest_of, module_files, with_neighbours

logger = logging.getLogger(__name__)

NAME = "points.sqlite3"
_COLUMNS = ("key", "spec", "metrics", "modules", "sources")
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
    modules: tuple[str, ...] = field(default=(), compare=False)
    """Of ours that its process had imported, see `sources.loaded_modules`."""

    @property
    def failed(self) -> bool:
        """Whether the run has no metrics."""
        return self.metrics is None


@functools.cache
def versions() -> dict[str, str]:
    """Return what decides a run's outcome beside its description and our sources: versions of vllm-ext and vLLM."""
    found = {}
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
        _sources()  # now: they may be edited while points are computed
        self._rows: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        """Open the file. A damaged one is reported and set aside, and its points are computed again.

        Raises:
            OSError: the folder or the file cannot be made, or read.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._rows = _opened(self.path)
        except sqlite3.OperationalError as error:  # no rights, no space, locked: nothing is wrong with it
            raise StoreError(f"{self.path}: cannot be opened: {error}") from error
        except sqlite3.DatabaseError as damage:
            for suffix in ("-wal", "-shm"):
                self.path.with_name(NAME + suffix).unlink(missing_ok=True)
            set_aside(self.path, damage, what=f"{self.path}", instead="its points are computed again", logger=logger)
            self._rows = _opened(self.path)
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
        files = {str(file): _checksum(file) for file in sorted(set(_files(description)))}
        decisive = {"versions": self._versions, "spec": description, "files": files}
        return hashlib.sha256(_canonical(decisive).encode()).hexdigest()[:40]

    def load(self, key: str) -> Outcome | None:
        """Return a stored outcome; None if there is none, or if it is of other sources."""
        row = self._open.execute("select metrics, modules, sources from points where key = ?", (key,)).fetchone()
        if row is None or row[2] != _digest(modules := tuple(json.loads(row[1]))):
            return None
        return Outcome(metrics=json.loads(row[0]), modules=modules)

    def save(self, key: str, spec: SimulationSpec, outcome: Outcome) -> None:
        """Store a finished point, in place of that of other sources.

        Raises:
            OSError: the file cannot be written.
            ValueError: a metric is not finite.
        """
        told, modules = _canonical(spec.model_dump(mode="json")), json.dumps(outcome.modules)
        row = (key, told, _canonical(outcome.metrics or {}), modules, _digest(outcome.modules))
        try:
            with self._open as rows:
                rows.execute("insert or replace into points values (?, ?, ?, ?, ?)", row)
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: cannot be written: {error}") from error

    @property
    def _open(self) -> sqlite3.Connection:
        if self._rows is None:
            raise RuntimeError(f"{self.path}: must be used within its context, `with store:`")
        return self._rows


def _opened(path: Path) -> sqlite3.Connection:
    """Open or make the file; raises sqlite3.DatabaseError if it is damaged."""
    rows = sqlite3.connect(path, timeout=_BUSY_S)
    try:
        rows.execute("pragma journal_mode=wal")
        if (found := rows.execute("pragma quick_check(1)").fetchone()[0]) != "ok":
            raise sqlite3.DatabaseError(found)
        rows.execute("drop table if exists runs")  # in which earlier versions had points
        rows.execute(f"create table if not exists points ({_COLUMNS[0]} text primary key, {', '.join(_COLUMNS[1:])})")
        if (names := [column[1] for column in rows.execute("pragma table_info(points)")]) != [*_COLUMNS]:
            raise sqlite3.DatabaseError(f"its table has the columns {', '.join(names)}")
    except BaseException:
        rows.close()
        raise
    return rows


@functools.cache
def _sources() -> dict[str, str]:
    """Return the checksums of our modules as this process found them."""
    return checksums(decisive_files())


@functools.cache
def _digest(modules: tuple[str, ...]) -> str | None:
    return digest_of(modules, _sources())


def _checksum(path: Path) -> str:
    state = path.stat()
    return _sha256(path, state.st_size, state.st_mtime_ns)


@functools.cache
def _sha256(path: Path, size: int, mtime_ns: int) -> str:  # noqa: ARG001 - computed anew when one of them changes
    return sha256_of(path)


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


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
