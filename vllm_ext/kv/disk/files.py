"""Which files the disk tier has, when they were used, and which go first, within a limit and a time to live.

A chunk's file lies in the folder that vLLM's `FileMapper` names, and ends in the checksum of what it holds:

    ROOT/MODEL_0123456789ab_r0/ab/abcdef...bin.CHECKSUM

Files of other models and formats count towards the limit, and go when they are the least recently used. The step path
changes no file and takes no lock: it asks a dict, and leaves notes for the threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from vllm_ext.config.errors import ConfigError

_MODE = 0o700
"""Prompts can be reconstructed from KV: nobody but the owner may look below the root."""
_DAMAGED = "damaged"
"""Folder of files that were not what they should be."""
_UNFINISHED, _FLEETING = ".tmp", "fleeting-"
_OURS = re.compile(r"[0-9a-f]+\.(bin\.[0-9a-f]+(.*\.tmp)?|kv)")
"""Names of chunks, of those that vLLM did not finish, and of earlier versions' files; others are strangers'."""


def check_writable(directory: str) -> None:
    """Make the directory of the disk tier, its owner's only, if it is not there.

    Raises:
        ConfigError: it can't be made, or nothing can be written there.
    """
    try:
        os.makedirs(directory, _MODE, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise ConfigError("kv_tier.disk_dir", directory, f"must be a directory that can be written: {error}") from error


class _File(NamedTuple):
    suffix: str
    num_bytes: int
    used_s: float
    """When it was used last, in seconds since the epoch: its mtime."""


class DiskFiles:
    """Files below a root, least recently used first; each by its path up to the last dot.

    Args:
        root: Made if it is not there; its owner's only, and locked for this process.
        max_bytes: Of all files together, those that are being written included.
        ttl_s: Seconds after its last use at which any file is deleted; 0: never.

    Attributes:
        used_bytes: Of all files.
        reading: Files that are read or about to be, which stay; for the step path to change.
        counts: What happened so far, by kind.

    Raises:
        ConfigError: another server uses the root, or it can't be written.
    """

    def __init__(self, root: str, *, max_bytes: int, ttl_s: float) -> None:
        self.root, self.max_bytes, self.ttl_s = root, max_bytes, ttl_s
        self.used_bytes = 0
        self.reading: set[str] = set()
        self.counts: Counter[str] = Counter()
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._forgotten: set[str] = set()
        self._touched: deque[tuple[str, float]] = deque()
        self._emptied: tuple[str, ...] = ()
        self._opened_s = time.time()
        self._guard = threading.Lock()
        """Of the threads."""
        try:
            self.make_root()
            os.chmod(root, _MODE)
            self._lock = open(f"{root}/.lock", "w")  # noqa: SIM115 - until the end
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            busy = isinstance(error, BlockingIOError)
            why = "is used by another server; give each its own" if busy else f"can't be written: {error}"
            raise ConfigError("kv_tier.disk_dir", root, why) from error
        self._remove_fleeting()

    def __len__(self) -> int:
        return len(self._files)

    # --- for the step path ------------------------------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        return name in self._files and name not in self._forgotten

    def touch(self, names: Sequence[str]) -> None:
        """Note that files were used now, the first of a prefix last: its end goes first, as it is useless alone."""
        now = time.time()
        self._touched.extend((name, now) for name in reversed(names))

    def forget(self, names: Iterable[str]) -> None:
        """Let files be found no more; `sweep` deletes them."""
        self._forgotten.update(name for name in names if name in self._files)

    def start_afresh(self, base: str) -> str:
        """Forget all whose path begins so; returns another beginning, whose files no other process ever finds."""
        self._emptied += (base,)
        self.forget([name for name in list(self._files) if name.startswith(base)])
        return f"{self.root}/{_FLEETING}{secrets.token_hex(4)}"

    # --- for the threads --------------------------------------------------------------------------------------------

    def path(self, name: str) -> str | None:
        """Return the path of a file; None if there is none."""
        file = self._files.get(name)
        return file and f"{name}.{file.suffix}"

    def make_root(self) -> None:
        """Make the root, if it is not there, or was deleted."""
        os.makedirs(self.root, _MODE, exist_ok=True)

    def begin_write(self, name: str, num_bytes: int) -> bool:
        """Delete the oldest files until this one fits; returns whether it does, and is new. Then call `end_write`."""
        with self._guard:
            self._settle()
            if name in self._files or not self._make_room(num_bytes):
                return False
            self.used_bytes += num_bytes
            return True

    def end_write(self, name: str, num_bytes: int, suffix: str) -> None:
        """Note that a file is written, and found from now on; an empty suffix: it is not."""
        with self._guard:
            if not suffix:
                self.used_bytes -= num_bytes
                return
            self._remove(name, but=suffix)  # one that the scan found meanwhile
            self._files[name] = _File(suffix, num_bytes, time.time())

    def remove(self, name: str) -> bool:
        """Delete a file; returns false if it was deleted already."""
        with self._guard:
            return self._remove(name)

    def set_aside(self, name: str) -> None:
        """Move a damaged file out of its chunk's way, for whoever asks what happened; it goes when it is the oldest."""
        with self._guard:
            if (file := self._files.get(name)) is None:
                return
            aside = f"{self.root}/{_DAMAGED}/{name.rpartition('/')[2]}"
            try:
                os.makedirs(f"{self.root}/{_DAMAGED}", exist_ok=True)
                os.replace(f"{name}.{file.suffix}", f"{aside}.{file.suffix}")
            except OSError:
                self._remove(name)
                return
            del self._files[name]
            self._remove(aside, but=file.suffix)
            self._files[aside] = file

    def count(self, kind: str) -> None:
        """Count what happened."""
        with self._guard:
            self.counts[kind] += 1

    def sweep(self) -> None:
        """Delete what was forgotten, and what was not used for `ttl_s`."""
        with self._guard:
            self._settle()
            if self.ttl_s:
                self._expire(time.time() - self.ttl_s)

    def scan(self, closing: threading.Event) -> None:
        """Find what earlier servers left, the most recently used first; remove what they did not finish."""
        found = []
        for folder, _, files in os.walk(self.root):
            for path in (f"{folder}/{file}" for file in files if _OURS.fullmatch(file)):
                with contextlib.suppress(OSError):
                    status = os.stat(path)
                    if not path.endswith(_UNFINISHED):
                        found.append((status.st_mtime, status.st_size, path))
                    elif status.st_mtime < self._opened_s:
                        os.unlink(path)
            if closing.is_set():
                return
        with self._guard:
            for used_s, num_bytes, path in sorted(found, reverse=True):
                self._add_oldest(path, num_bytes, used_s)
            self._make_room(0)
        self.sweep()

    def close(self) -> None:
        """Sweep for the last time, and let go of the root; no thread may use it any more."""
        if not self._lock.closed:
            self.sweep()
            self._remove_fleeting()
            self._lock.close()

    # --- parts, under the guard -------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Do what the step path noted; the order of use is in the files' times, too, for the next server."""
        while self._touched:
            name, used_s = self._touched.popleft()
            if (file := self._files.get(name)) is not None:
                self._files[name] = file._replace(used_s=used_s)
                self._files.move_to_end(name)
                with contextlib.suppress(OSError):
                    os.utime(f"{name}.{file.suffix}", (used_s, used_s))
        for name in list(self._forgotten):
            self._remove(name)
            self._forgotten.discard(name)

    def _add_oldest(self, path: str, num_bytes: int, used_s: float) -> None:
        name, _, suffix = path.rpartition(".")
        known = self._files.get(name)
        if known is None:
            self._files[name] = _File(suffix, num_bytes, used_s)
            self._files.move_to_end(name, last=False)
            self.used_bytes += num_bytes
            if name.startswith(self._emptied):
                self._remove(name)
        elif known.suffix != suffix:  # another one of the same chunk, and older
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _make_room(self, num_bytes: int) -> bool:
        while self.used_bytes + num_bytes > self.max_bytes:
            oldest = next((name for name in self._files if name not in self.reading), None)
            if oldest is None:
                return False
            self._remove(oldest)
            self.counts["evicted"] += 1
        return True

    def _expire(self, before_s: float) -> None:
        # All are looked at: where the clock was put back, those used last are not the youngest.
        old = [name for name, file in self._files.items() if file.used_s < before_s]
        for name in (name for name in old if name not in self.reading):
            self._remove(name)
            self.counts["expired"] += 1

    def _remove(self, name: str, *, but: str = "") -> bool:
        """Let go of a file and delete it, unless its suffix says that another was put in its place."""
        if (file := self._files.pop(name, None)) is None:
            return False
        if file.suffix != but:
            with contextlib.suppress(OSError):
                os.unlink(f"{name}.{file.suffix}")
        self.used_bytes -= file.num_bytes
        return True

    def _remove_fleeting(self) -> None:
        for folder in Path(self.root).glob(f"{_FLEETING}*"):
            shutil.rmtree(folder, ignore_errors=True)
