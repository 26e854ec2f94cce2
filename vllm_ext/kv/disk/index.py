"""Which chunks are on disk, how large they are, when they were used, and which go first. In memory, without any I/O.

The step path asks it, and the threads that read and write files change it, so each call holds a lock, and none for
long.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeAlias

Name: TypeAlias = bytes | str
"""A chunk's key; or the path, below the tier's folder, of a file that is no chunk of this server's."""


class _File(NamedTuple):
    num_bytes: int
    used_s: float
    """When it was used last, in seconds since the epoch."""


class DiskIndex:
    """Files by name, least recently used first, of at most ``max_bytes`` together.

    Args:
        max_bytes: Of all files, those that are being written included.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._files: OrderedDict[Name, _File] = OrderedDict()
        self._writing: dict[Name, int] = {}
        self._pins: Counter[Name] = Counter()
        self._used_bytes = 0
        self._touched: dict[Name, float] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._files

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those that are being written included."""
        return self._used_bytes

    def add_older(self, name: Name, num_bytes: int, used_s: float) -> list[Name]:
        """Note a file that was used before all that are known; one that is known stays as it is.

        Returns:
            Files for which there is no room, forgotten already, which must be deleted.
        """
        with self._lock:
            if name not in self._files and name not in self._writing:
                self._files[name] = _File(num_bytes, used_s)
                self._files.move_to_end(name, last=False)
                self._used_bytes += num_bytes
            return self._make_room(0) or []

    def begin_write(self, name: Name, num_bytes: int) -> list[Name] | None:
        """Make room for a file.

        Returns:
            Files that must be deleted before it is written, forgotten here already; ``None``: do not write it, since it
            is there, or being written, or there is no room.
        """
        with self._lock:
            if name in self._files or name in self._writing:
                return None
            chosen = self._make_room(num_bytes)
            if chosen is None:
                return None
            self._writing[name] = num_bytes
            self._used_bytes += num_bytes
            return chosen

    def begin_rename(self, name: Name, new_name: Name) -> bool:
        """Let a file be found no more under its name; it counts all the time, and `end_write` ends this too.

        Returns:
            Whether to go on: the file is known, and the new name is not being written.
        """
        with self._lock:
            if name not in self._files or new_name in self._writing:
                return False
            self._remove(new_name)  # it is overwritten
            self._writing[new_name] = self._files.pop(name).num_bytes
            self._touched.pop(name, None)
            return True

    def end_write(self, name: Name, *, written: bool, oldest: bool = False) -> None:
        """Note that a write is through; only then the file is found. The ``oldest`` is the next to go."""
        with self._lock:
            num_bytes = self._writing.pop(name)
            if written:
                self._files[name] = _File(num_bytes, time.time())
                self._files.move_to_end(name, last=not oldest)
            else:
                self._used_bytes -= num_bytes

    def pin(self, names: Iterable[Name]) -> None:
        """Keep files while they are read; pins count."""
        with self._lock:
            self._pins.update(names)

    def unpin(self, name: Name) -> None:
        """Take one pin off."""
        with self._lock:
            self._pins[name] -= 1
            if self._pins[name] <= 0:
                del self._pins[name]

    def touch(self, names: Sequence[Name]) -> None:
        """Note that files were used now, the first of a prefix last: its end goes first, as it is useless alone."""
        now = time.time()
        with self._lock:
            for name in reversed(names):
                if (file := self._files.get(name)) is not None:
                    self._files[name] = file._replace(used_s=now)
                    self._files.move_to_end(name)
                    self._touched[name] = now

    def take_touched(self) -> dict[Name, float]:
        """Return files used since the last call, and when, in seconds since the epoch."""
        with self._lock:
            touched, self._touched = self._touched, {}
        return touched

    def remove(self, name: Name) -> bool:
        """Forget a file; returns whether it was known."""
        with self._lock:
            return self._remove(name)

    def expire(self, before_s: float) -> list[Name]:
        """Forget files that were used last before a moment, in seconds since the epoch, but those that are read.

        Returns:
            Their names; they must be deleted.
        """
        with self._lock:
            chosen: list[Name] = []
            for name, file in self._files.items():
                if file.used_s < before_s:
                    if name not in self._pins:
                        chosen.append(name)
                elif isinstance(name, bytes):
                    break  # later ones were used later; of other files the damaged ones are in front whatever their age
            for name in chosen:
                self._remove(name)
            return chosen

    def rename_chunks(self, rename: Callable[[bytes], str]) -> list[str]:
        """Turn all chunks into files that nobody finds by a key; returns their new names."""
        with self._lock:
            names = {name: rename(name) for name in self._files if isinstance(name, bytes)}
            renamed = ((names[name] if isinstance(name, bytes) else name, file) for name, file in self._files.items())
            self._files = OrderedDict(renamed)
            self._touched.clear()
            return list(names.values())

    def _remove(self, name: Name) -> bool:
        file = self._files.pop(name, None)
        if file is None:
            return False
        self._used_bytes -= file.num_bytes
        self._touched.pop(name, None)
        return True

    def _make_room(self, num_bytes: int) -> list[Name] | None:
        """Forget the oldest files until so many bytes fit; ``None`` if those that are not read are too few."""
        missing = self._used_bytes + num_bytes - self.max_bytes
        chosen: list[Name] = []
        for name, file in self._files.items():
            if missing <= 0:
                break
            if name not in self._pins:
                chosen.append(name)
                missing -= file.num_bytes
        if missing > 0:
            return None
        for name in chosen:
            self._remove(name)
        return chosen
