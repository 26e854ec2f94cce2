"""The folder of the disk tier: chunks in files of their own, within a limit, damaged ones set aside.

    DIR/vllm-ext-kv-0/.lock                   held by the server that uses it
    DIR/vllm-ext-kv-0/kv-MODEL-0123456789abcdef/ab/abcdef...kv
                                         chunks of one model in one format, by the first byte of their key
    DIR/vllm-ext-kv-0/kv-MODEL-0123456789abcdef/format.json
                                         what its name stands for
    DIR/vllm-ext-kv-0/fleeting-01234567/      chunks that count for this process only, see `Folder.start_afresh`
    DIR/vllm-ext-kv-0/damaged/                the last few that were damaged

Chunks of other models count towards the limit, and go when they are the least recently used. Every method that touches
files is for the threads of the tier: none may run on the step path.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.disk.format import (
    FILE_MODE,
    FOLDER_MODE,
    PROCESS,
    TEMPORARY,
    VERSION,
    DamagedChunk,
    file_bytes,
    read_chunk,
    write_chunk,
    write_whole,
)
from vllm_ext.kv.disk.index import DiskIndex, Name

logger = logging.getLogger("vllm.vllm_ext.kv")

SUFFIX = ".kv"
DAMAGED, FLEETING, LOCK, FORMAT = "damaged", "fleeting-", ".lock", "format.json"
MAX_DAMAGED = 8
"""Damaged files that are kept for whoever wants to know what happened to them."""


class FolderCounts(NamedTuple):
    """What happened since the last time it was asked for."""

    damaged: int = 0
    """Chunks that were not what they should be."""
    unreadable: int = 0
    """Chunks that the system could not read."""
    unwritten: int = 0
    """Chunks that the system could not write: a full disk, missing permissions."""
    evicted: int = 0
    """Files deleted to make room."""
    expired: int = 0
    """Files deleted since they were not used for so long."""


def check_writable(directory: str) -> None:
    """Make the directory of the disk tier, its owner's only, if it is not there.

    Raises:
        ConfigError: it can't be made, or nothing can be written there.
    """
    try:
        os.makedirs(directory, FOLDER_MODE, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError("kv_tier.disk_dir", directory, f"must be a directory that can be written: {error}") from error


class Folder:
    """Chunks on disk.

    Args:
        root: Made if it is not there; its owner's only.
        name: Of the folder of this model and format.
        max_bytes: Of all files below ``root`` together.
        facts: What ``name`` stands for, for whoever looks into the folder.
        ttl_s: Seconds after its last use at which any file below ``root`` is deleted; 0: never.

    Raises:
        ConfigError: another server uses it, or it can't be written.
    """

    def __init__(self, root: Path, name: str, *, max_bytes: int, facts: Mapping[str, Any], ttl_s: float = 0.0) -> None:
        self.root = root
        self.ttl_s = ttl_s
        self.index = DiskIndex(max_bytes)
        self._home = self._current = root / name
        self._counts = dict.fromkeys(FolderCounts._fields, 0)
        self._logged: set[str] = set()
        self._guard = threading.Lock()
        self._closing = False
        try:
            root.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
            root.chmod(FOLDER_MODE)
            self._lock: int | None = os.open(root / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
        except OSError as error:
            raise ConfigError("kv_tier.disk_dir", str(root), f"can't be written: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._make(self._home)
            text = json.dumps(dict(facts), indent=1, sort_keys=True)
            write_whole(self._home / FORMAT, text.encode(), memoryview(b""))
        except OSError as error:
            os.close(self._lock)
            busy = isinstance(error, BlockingIOError)
            why = "is used by another server; give each its own" if busy else f"can't be used: {error}"
            raise ConfigError("kv_tier.disk_dir", str(root), why) from error

    # --- one chunk --------------------------------------------------------------------------------------------------

    def write(self, key: bytes, payload: memoryview) -> bool:
        """Keep a chunk, if it can be; returns false if the system refused."""
        victims = self.index.begin_write(key, file_bytes(key, len(payload)))
        if victims is None:
            return True
        written = False
        try:
            self._evict(victims)
            path = self._path(key)
            self._make(path.parent)
            write_chunk(path, key, payload)
            written = True
        except OSError as error:
            self._report("unwritten", "a chunk of KV can't be written to disk and is not kept", error)
        finally:
            self.index.end_write(key, written=written)
        return written

    def read(self, key: bytes, into: memoryview) -> bool:
        """Fill ``into``; returns false if there is no such chunk that is whole, and then it is never found again."""
        path = self._path(key)
        try:
            read_chunk(path, key, into)
            return True
        except DamagedChunk as error:
            self._report("damaged", f"a chunk of KV on disk is damaged and set aside ({path.name})", error)
            self._set_aside(key, path)
        except FileNotFoundError as error:  # evicted since it was asked for, or deleted by somebody
            if self.index.remove(key):
                self._report("unreadable", "a chunk of KV is not on disk any more", error)
        except OSError as error:
            self._report("unreadable", "a chunk of KV on disk can't be read and is forgotten", error)
            if self.index.remove(key):
                with contextlib.suppress(OSError):
                    path.unlink()
        return False

    def delete(self, names: Iterable[Name]) -> None:
        """Delete files that the index has forgotten, and was not told of again since."""
        for name in names:
            if name not in self.index:
                with contextlib.suppress(OSError):
                    self._path(name).unlink(missing_ok=True)

    def save_times(self) -> None:
        """Let files know when they were used, for the order after a restart."""
        for name, used_s in self.index.take_touched().items():
            with contextlib.suppress(OSError):
                os.utime(self._path(name), (used_s, used_s))

    # --- all of them ------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Find what earlier servers left, the most recently used first; remove what they did not finish.

        What is in another version's format is never read again, and goes first.
        """
        outdated = self._outdated()
        found: list[tuple[float, int, Path]] = []
        for path in self._files():
            with contextlib.suppress(OSError):
                if not self._is_leftover(path):
                    status = path.stat()
                    used_s = 0.0 if path.parent.parent in outdated else status.st_mtime
                    found.append((used_s, status.st_size, path))
                elif not path.name.startswith(PROCESS):
                    path.unlink()
        for used_s, size, path in sorted(found, reverse=True):
            if self.ttl_s and used_s < time.time() - self.ttl_s:
                with contextlib.suppress(OSError):
                    path.unlink()
                    self._count("expired")
                continue
            victims = self.index.add_older(self._name_of(path), size, used_s)
            with contextlib.suppress(OSError):
                self._evict(victims)

    def expire(self) -> None:
        """Delete what was not used for `ttl_s`, if that is not 0."""
        if not self.ttl_s:
            return
        expired = self.index.expire(time.time() - self.ttl_s)
        self.delete(expired)
        self._count("expired", len(expired))

    def start_afresh(self) -> Callable[[], None]:
        """Forget all chunks; what is kept from now on is found by this process only.

        vLLM resets its caches when the weights of a model were replaced in memory. KV of such weights must not be found
        by a server that starts with those on disk.

        Returns:
            What deletes the files, for a thread of the tier.
        """
        folder = self._current
        forgotten = self.index.rename_chunks(lambda key: str(self._path(key).relative_to(self.root)))
        self._current = self.root / f"{FLEETING}{secrets.token_hex(4)}"

        def delete() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            for name in forgotten:
                self.index.remove(name)

        return delete

    def take_counts(self) -> FolderCounts:
        """Return what happened since the last call."""
        with self._guard:
            taken, self._counts = self._counts, dict.fromkeys(FolderCounts._fields, 0)
        return FolderCounts(**taken)

    def stop_scan(self) -> None:
        """Make `scan` return soon."""
        self._closing = True

    def close(self) -> None:
        """Let go of the folder; no other thread may use it any more. Another time does nothing."""
        if self._lock is None:
            return
        self.save_times()
        for path in self.root.glob(f"{FLEETING}*"):
            shutil.rmtree(path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    # --- parts ------------------------------------------------------------------------------------------------------

    def _path(self, name: Name) -> Path:
        if isinstance(name, str):
            return self.root / name
        digits = name.hex()
        return self._current / digits[:2] / f"{digits}{SUFFIX}"

    def _name_of(self, path: Path) -> Name:
        """Return a chunk's key, or the path of a file that is none of this server's."""
        if path.parent.parent == self._home and path.suffix == SUFFIX:
            with contextlib.suppress(ValueError):
                key = bytes.fromhex(path.stem)
                if self._path(key) == path:
                    return key
        return str(path.relative_to(self.root))

    def _files(self) -> Iterator[Path]:
        for folder, _, names in os.walk(self.root):
            for name in names:
                if self._closing:
                    return
                if name.endswith((SUFFIX, TEMPORARY)):
                    yield Path(folder, name)

    def _outdated(self) -> set[Path]:
        """Return the folders whose chunks are in another version's format, and say that they are there."""
        folders = set()
        for path in self.root.glob(f"*/{FORMAT}"):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                version = json.loads(path.read_bytes()).get("format", VERSION)
                if version != VERSION:
                    folders.add(path.parent)
                    logger.warning(
                        "%s holds KV in format %s of chunks, and this version's is %s: set aside until room is needed, "
                        "and computed again when it is asked for", path.parent, version, VERSION,
                    )  # fmt: skip
        return folders

    def _is_leftover(self, path: Path) -> bool:
        """Whether a file was never finished, or counted for another process only."""
        fleeting = path.relative_to(self.root).parts[0].startswith(FLEETING)
        return path.suffix == TEMPORARY or (fleeting and not path.is_relative_to(self._current))

    def _evict(self, victims: Iterable[Name]) -> None:
        for victim in victims:
            self._path(victim).unlink(missing_ok=True)
            self._count("evicted")

    def _make(self, folder: Path) -> None:
        if not folder.parent.is_dir():
            self._make(folder.parent)
        folder.mkdir(FOLDER_MODE, exist_ok=True)

    def _set_aside(self, key: bytes, path: Path) -> None:
        """Move a file to the damaged ones, where only the last few stay; they count, and go first."""
        folder = self.root / DAMAGED
        aside = folder / path.name
        name = str(aside.relative_to(self.root))
        if not self.index.begin_rename(key, name):
            return
        moved = False
        try:
            self._make(folder)
            kept = sorted((old for old in folder.iterdir() if old != aside), key=lambda old: old.stat().st_mtime)
            for old in kept[: max(0, len(kept) + 1 - MAX_DAMAGED)]:
                self.index.remove(str(old.relative_to(self.root)))
                old.unlink()
            os.replace(path, aside)
            os.utime(aside)
            moved = True
        except OSError:
            with contextlib.suppress(OSError):
                path.unlink()
        finally:
            self.index.end_write(name, written=moved, oldest=True)

    def _count(self, field: str, number: int = 1) -> None:
        with self._guard:
            self._counts[field] += number

    def _report(self, field: str, what: str, error: Exception) -> None:
        """Count, and log the first of a kind."""
        self._count(field)
        if field not in self._logged:
            self._logged.add(field)
            logger.warning("%s: %s; its tokens are computed again (not logged again)", what, error)
