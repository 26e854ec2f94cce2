"""Finished points on disk: one JSON file per point, so that an interrupted sweep goes on where it stopped.

A file is named by a digest of all that decides its content: the description of the run, the versions of vllm-ext and
vLLM, the content of the files the description names, and the format's number. It holds nothing of the clock or the
machine, so a sweep that was interrupted leaves the same bytes as one that was not.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_ext.observability.files import replaced, sha256_of
from vllm_ext.simulation.spec import SimulationSpec

logger = logging.getLogger(__name__)

FORMAT = 1
_FILES = {
    "file": (".",),
    "source": (".",),
    "prompts_from": (".",),
    "profile": (".",),
    "model": ("config.json",),
    "tokenizer": ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model"),
}
"""Fields of a description that may name a file, or a folder: which files in there decide the outcome."""


class StoreError(RuntimeError):
    """The folder of a sweep cannot be used; the message says why."""


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


def versions() -> dict[str, str]:
    """Return the versions that decide a run's outcome, of vllm-ext and vLLM; neither is imported."""
    found = {}
    for package in ("vllm-ext", "vllm"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


class PointStore:
    """A folder of finished points.

    Whoever writes calls `locked` first: two sweeps in one folder would compute the same points.
    """

    def __init__(self, folder: Path) -> None:
        """Use a folder; it is made when something is written."""
        self.folder = folder
        self.damaged: list[Path] = []
        """Files that were set aside, by their new names."""
        self._versions = versions()
        self._checksums: dict[tuple[str, int, int], str] = {}

    @contextlib.contextmanager
    def locked(self, name: str = "") -> Iterator[None]:
        """Keep other sweeps out of the folder meanwhile.

        Args:
            name: Only sweeps of the same name are kept out. Others may share points; what two compute at the same time
                is computed twice, and is the same.

        Raises:
            StoreError: another sweep is at work there.
            OSError: the folder cannot be made.
        """
        place = self.folder / name
        place.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(place, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise StoreError(f"{place.name}: another sweep is at work in this folder") from error
        finally:
            os.close(descriptor)

    def key(self, spec: SimulationSpec) -> str:
        """Return the name of a point's file without suffix."""
        description = spec.model_dump(mode="json")
        files = {name: self._checksum(Path(name)) for name in sorted(set(_files(description)))}
        decisive = {"format": FORMAT, "versions": self._versions, "spec": description, "files": files}
        return hashlib.sha256(_canonical(decisive)).hexdigest()[:40]

    def load(self, key: str) -> Outcome | None:
        """Return a stored outcome; None if there is none. A damaged file is reported and set aside as ``.damaged``."""
        path = self._path(key)
        try:
            return _outcome(json.loads(path.read_bytes()), key)
        except FileNotFoundError:
            return None
        except ValueError as damage:
            aside = path.with_name(f"{path.name}.damaged")
            os.replace(path, aside)
            self.damaged.append(aside)
            logger.warning("%s is damaged (%s); set aside as %s, computed again", path.name, damage, aside.name)
            return None

    def save(self, key: str, spec: SimulationSpec, outcome: Outcome) -> None:
        """Store an outcome, atomically.

        Raises:
            OSError: the file cannot be written.
        """
        content = {
            "format": FORMAT,
            "key": key,
            "versions": self._versions,
            "spec": spec.model_dump(mode="json"),
            "metrics": None if outcome.metrics is None else dict(outcome.metrics),
            "error": outcome.error,
        }
        content["sha256"] = _sha256(content)
        with replaced(self._path(key)) as file:
            file.write(json.dumps(content, indent=1, allow_nan=False).encode() + b"\n")

    def _path(self, key: str) -> Path:
        return self.folder / "points" / f"{key}.json"

    def _checksum(self, path: Path) -> str:
        """SHA-256 of a file, computed once while its size and time stay."""
        state = path.stat()
        known = (str(path), state.st_size, state.st_mtime_ns)
        if known not in self._checksums:
            self._checksums[known] = sha256_of(path)
        return self._checksums[known]


def _outcome(content: Any, key: str) -> Outcome:
    if not isinstance(content, dict):
        raise ValueError("no JSON object")
    if content.get("sha256") != _sha256({name: value for name, value in content.items() if name != "sha256"}):
        raise ValueError("its checksum is wrong")
    if content.get("format") != FORMAT or content.get("key") != key:
        raise ValueError("it is another point's, or of another format")
    return Outcome(metrics=content["metrics"], error=content["error"])


def _files(value: Any, name: str = "") -> Iterator[str]:
    """Names of existing files within a description."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _files(inner, key)
    elif isinstance(value, list):
        for inner in value:
            yield from _files(inner, name)
    elif isinstance(value, str) and value:
        for inside in _FILES.get(name, ()):
            if (path := Path(value) / inside).is_file():
                yield str(path)


def _sha256(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(content)).hexdigest()


def _canonical(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
