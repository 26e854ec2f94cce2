"""A disk that is full or can't be written: imported by the engine of a server, by its option ``modules``.

The variable ``ODD_DISK`` names a file. While it holds ``full`` or ``read-only``, system calls that would write below
the folder in which it lies fail as they do on such a disk, so that a test can change the disk of a running server.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vllm.v1.kv_offload.tiering.fs import io

VARIABLE = "ODD_DISK"
FULL, READ_ONLY = "full", "read-only"

_WRITES_TO_FILES = ("write", "writev")
_CHANGES_FOLDERS = ("mkdir", "replace", "rmdir", "unlink", "utime")


def install(switch: Path) -> None:
    """Let writes below the folder of ``switch`` fail as it says."""
    folder = str(switch.parent)

    io._HAS_FSIO_C = False  # vLLM's writes in Python make the system calls that are replaced here

    def state() -> str:
        return switch.read_text(encoding="utf-8").strip() if switch.exists() else ""

    def is_ours(where: Any) -> bool:
        path = os.readlink(f"/proc/self/fd/{where}") if isinstance(where, int) else os.fspath(where)
        return str(path).startswith(f"{folder}/") and str(path) != str(switch)

    def failing(real: Callable[..., Any], fails_when: str, code: int) -> Callable[..., Any]:
        def call(where: Any, *args: Any, **kwargs: Any) -> Any:
            if is_ours(where) and state() == fails_when:
                raise OSError(code, os.strerror(code), str(where))
            return real(where, *args, **kwargs)

        return call

    def opening(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            if flags & (os.O_WRONLY | os.O_RDWR) and is_ours(path) and state() == READ_ONLY:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return real(path, flags, *args, **kwargs)

        return call

    for name in _WRITES_TO_FILES:
        setattr(os, name, failing(getattr(os, name), FULL, errno.ENOSPC))
    for name in _CHANGES_FOLDERS:
        setattr(os, name, failing(getattr(os, name), READ_ONLY, errno.EROFS))
    os.open = opening(os.open)


if VARIABLE in os.environ:
    install(Path(os.environ[VARIABLE]))
