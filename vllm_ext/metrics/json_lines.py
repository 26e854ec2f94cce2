"""A file of JSON lines that never grows beyond a bound, and stays readable whatever happens to it from outside."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from vllm.logger import init_logger

logger = init_logger("vllm.vllm_ext.json_lines")

_MIB = 1 << 20
_MODE = 0o600
"""Of a new file; one that is there keeps its own."""


class JsonLines:
    """Appends whole lines, and rotates: ``FILE`` becomes ``FILE.1``, ``FILE.1`` becomes ``FILE.2``, the oldest goes.

    The file is opened for each append, so that an outside logrotate may move, truncate or delete it at any time.
    Behind half a line, which a crash or a copy left, the next one begins on a line of its own.
    """

    def __init__(self, path: Path, option: str, *, max_mib: int = 0, keep: int = 1) -> None:
        """Take where to write; nothing is opened yet.

        Args:
            path: The file; folders on the way are made.
            option: The one that names it, for messages.
            max_mib: Size at which the file is rotated, in MiB; a line that is longer has a file of its own. 0: never.
            keep: Rotated files that are kept.
        """
        self._path, self._option = path, option
        self._max_bytes, self._keep = max_mib * _MIB, keep
        self._failed = False

    def append(self, records: Sequence[Any], head: object = None) -> int:
        """Append one line per record; return how many of the last were lost because the file can't be written.

        That is reported once. Serving goes on, and the next append tries again.

        Args:
            records: Fit for JSON.
            head: First line of a new file, and of what follows half a line; None: there is none.
        """
        lines = list(map(_line, records))
        first = b"" if head is None else _line(head)
        written = 0
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            while written < len(lines):
                written += self._write(lines[written:], first)
        except OSError as error:
            if not self._failed:
                self._failed = True
                logger.error(
                    "%s=%s can't be written (%s); lost lines are counted, and not logged again",
                    self._option, self._path, error,
                )  # fmt: skip
        return len(lines) - written

    def _write(self, lines: Sequence[bytes], head: bytes) -> int:
        """Write as many lines as the file has room for, and return how many; if it has none, rotate.

        Raises:
            OSError: nothing was written: a part that went into the file is cut off again.
        """
        with open(self._path, "a+b", buffering=0, opener=lambda path, flags: os.open(path, flags, _MODE)) as file:
            before = os.fstat(file.fileno()).st_size
            torn = before > 0 and os.pread(file.fileno(), 1, before - 1) != b"\n"
            begin = b"\n" * torn + head * (torn or not before)
            if count := self._fitting(before, len(begin), lines):
                data = begin + b"".join(lines[:count])
                try:
                    if file.write(data) != len(data):
                        raise OSError("no space left for whole lines")
                except OSError:
                    file.truncate(before)
                    raise
                return count
        RotatingFileHandler(self._path, backupCount=self._keep, delay=True).doRollover()
        older = (self._path.with_name(f"{self._path.name}.{number}") for number in itertools.count(self._keep + 1))
        for one in itertools.takewhile(Path.exists, older):  # of a server that was to keep more
            one.unlink()
        return 0

    def _fitting(self, size: int, more: int, lines: Sequence[bytes]) -> int:
        if not self._max_bytes:
            return len(lines)
        ends = itertools.accumulate(map(len, lines), initial=size + more)
        fitting = sum(end <= self._max_bytes for end in itertools.islice(ends, 1, None))
        return max(fitting, 0 if size else 1)


def _line(record: object) -> bytes:
    return json.dumps(record).encode() + b"\n"
