"""Which chunks are on disk, how large they are, and which go first: least recently used. In memory, without any I/O.

The step path asks it, and the threads that read and write files change it, so each call holds a lock, and none for
long.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

Name: TypeAlias = bytes | str
"""A chunk's key; or the path, below the tier's folder, of a file that is no chunk of this server's."""


class DiskIndex:
    """Files by name, least recently used first, of at most ``max_bytes`` together.

    Args:
        max_bytes: Of all files, those that are being written included.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._sizes: OrderedDict[Name, int] = OrderedDict()
        self._writing: dict[Name, int] = {}
        self._pins: Counter[Name] = Counter()
        self._used_bytes = 0
        self._touched: dict[Name, float] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: object) -> bool:
        with self._lock:
            return name in self._sizes

    @property
    def used_bytes(self) -> int:
        """Bytes of all files, those that are being written included."""
        return self._used_bytes

    def add_older(self, name: Name, num_bytes: int) -> list[Name]:
        """Note a file that was used before all that are known; one that is known stays as it is.

        Returns:
            Files for which there is no room, forgotten already, which must be deleted.
        """
        with self._lock:
            if name not in self._sizes and name not in self._writing:
                self._sizes[name] = num_bytes
                self._sizes.move_to_end(name, last=False)
                self._used_bytes += num_bytes
            return self._make_room(0) or []

    def begin_write(self, name: Name, num_bytes: int) -> list[Name] | None:
        """Make room for a file.

        Returns:
            Files that must be deleted before it is written, forgotten here already; ``None``: do not write it, since it
            is there, or being written, or there is no room.
        """
        with self._lock:
            if name in self._sizes or name in self._writing:
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
            if name not in self._sizes or new_name in self._writing:
                return False
            self._remove(new_name)  # it is overwritten
            self._writing[new_name] = self._sizes.pop(name)
            self._touched.pop(name, None)
            return True

    def end_write(self, name: Name, *, written: bool, oldest: bool = False) -> None:
        """Note that a write is through; only then the file is found. The ``oldest`` is the next to go."""
        with self._lock:
            num_bytes = self._writing.pop(name)
            if written:
                self._sizes[name] = num_bytes
                self._sizes.move_to_end(name, last=not oldest)
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
                if name in self._sizes:
                    self._sizes.move_to_end(name)
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

    def rename_chunks(self, rename: Callable[[bytes], str]) -> list[str]:
        """Turn all chunks into files that nobody finds by a key; returns their new names."""
        with self._lock:
            names = {name: rename(name) for name in self._sizes if isinstance(name, bytes)}
            renamed = ((names[name] if isinstance(name, bytes) else name, size) for name, size in self._sizes.items())
            self._sizes = OrderedDict(renamed)
            self._touched.clear()
            return list(names.values())

    def _remove(self, name: Name) -> bool:
        num_bytes = self._sizes.pop(name, None)
        if num_bytes is None:
            return False
        self._used_bytes -= num_bytes
        self._touched.pop(name, None)
        return True

    def _make_room(self, num_bytes: int) -> list[Name] | None:
        """Forget the oldest files until so many bytes fit; ``None`` if those that are not read are too few."""
        missing = self._used_bytes + num_bytes - self.max_bytes
        chosen: list[Name] = []
        for name, size in self._sizes.items():
            if missing <= 0:
                break
            if name not in self._pins:
                chosen.append(name)
                missing -= size
        if missing > 0:
            return None
        for name in chosen:
            self._remove(name)
        return chosen
