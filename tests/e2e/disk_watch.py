"""The folder of a disk tier during a run, and a disk that is full from time to time: for engines in this process."""

from __future__ import annotations

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
        left = sum(path.stat().st_size for path in self._folder.rglob("*.kv"))
        return {**told, "largest_bytes": self.largest_bytes, "booked_bytes": self._bytes, "left_bytes": left}

    def _watch_writes(self) -> None:
        from vllm_ext.kv.disk import folder as module
        from vllm_ext.kv.disk.format import file_bytes

        write_chunk = module.write_chunk

        def writing(path: Path, key: bytes, payload: memoryview) -> None:
            size = file_bytes(key, len(payload))
            self._book(size)
            try:
                write_chunk(path, key, payload)
            except OSError:
                self._book(-size)
                raise

        module.write_chunk = writing

    def _watch_deletions(self) -> None:
        unlink = Path.unlink

        def deleting(path: Path, missing_ok: bool = False) -> None:
            ours = path.suffix == ".kv" and path.is_relative_to(self._folder) and path.exists()
            size = path.stat().st_size if ours else 0
            unlink(path, missing_ok=missing_ok)
            self._book(-size)

        Path.unlink = deleting  # type: ignore[method-assign]

    def _book(self, num_bytes: int) -> None:
        with self._guard:
            self._bytes += num_bytes
            self.largest_bytes = max(self.largest_bytes, self._bytes)
