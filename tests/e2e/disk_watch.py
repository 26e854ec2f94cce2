"""The folder of a disk tier during a run, and a disk that is full from time to time: for engines in this process."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import odd_disks

_FULL_FOR = 25
"""Steps that the disk is full, and then has room again."""
_PREFIX = "vllm:kv_offload_disk_"


class DiskWatch:
    """Keeps books of what lies in the folder, file by file: to look there takes longer than it stays as it is.

    Attributes:
        largest_bytes: Most that lay there at once, files that were being written included.
    """

    def __init__(self, folder: Path, *, fills: bool) -> None:
        """Begin.

        Args:
            folder: Of the tier.
            fills: Whether the disk is full again and again.
        """
        self._folder, self._steps = folder, 0
        self._switch = folder.parent / "state.txt" if fills else None
        self._bytes = self.largest_bytes = 0
        self._guard = threading.Lock()
        self._watch_writes()
        self._watch_deletions()
        if self._switch is not None:
            odd_disks.install(self._switch)

    def before_step(self) -> None:
        """Fill the disk, or make room on it."""
        self._steps += 1
        if self._switch is not None and self._steps % _FULL_FOR == 0:
            full = self._steps // _FULL_FOR % 2
            self._switch.write_text(odd_disks.FULL if full else "")

    def found(self, metrics: list[Any]) -> dict[str, float]:
        """Return what was seen, what lies there at last, and what the tier says of the disk in vLLM's metrics."""
        told = {each.name.removeprefix(_PREFIX): each.value for each in metrics if each.name.startswith(_PREFIX)}
        left = sum(path.stat().st_size for path in self._folder.rglob("*.bin.*"))
        return {**told, "largest_bytes": self.largest_bytes, "booked_bytes": self._bytes, "left_bytes": left}

    def _watch_writes(self) -> None:
        from vllm_ext.kv.disk import tier as module

        store = module.batch_store_block

        def storing(paths: list[str], rows: memoryview, offsets: list[int], num_bytes: int, direct: bool) -> None:
            self._book(num_bytes)
            try:
                store(paths, rows, offsets, num_bytes, direct)
            except OSError:
                self._book(-num_bytes)
                raise

        module.batch_store_block = storing

    def _watch_deletions(self) -> None:
        unlink = os.unlink

        def deleting(path: str, **where: Any) -> None:
            ours = not where and ".bin." in str(path) and str(path).startswith(str(self._folder))
            size = os.stat(path).st_size if ours else 0
            unlink(path, **where)
            self._book(-size)

        os.unlink = deleting

    def _book(self, num_bytes: int) -> None:
        with self._guard:
            self._bytes += num_bytes
            self.largest_bytes = max(self.largest_bytes, self._bytes)
