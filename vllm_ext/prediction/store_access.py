"""Who may use a vector store's folder: its owner only, and one that saves at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""Embeddings tell what was asked: nobody but the owner may read them."""
LOCK = ".lock"
_ATTEMPTS = 100
"""At a folder that others move away again and again."""


def private(path: str, flags: int) -> int:
    """Opener for `open`: a file that is made is its owner's only."""
    return os.open(path, flags, FILE_MODE)


def hide(folder: Path) -> None:
    """Take from others what they may do in a folder that an earlier version made; the owner's rights stay."""
    mode = stat.S_IMODE(folder.stat().st_mode)
    if mode & ~FOLDER_MODE:
        with contextlib.suppress(PermissionError):  # another owner's, or a file system without permissions
            folder.chmod(mode & FOLDER_MODE)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Wait until no other process saves here, and keep others from it; the system frees the lock of a killed one.

    The folder is made if it is not there.

    Raises:
        OSError: it can't be made or written.
    """
    with _locked(folder):
        yield


@contextlib.contextmanager
def unsaved(folder: Path) -> Iterator[None]:
    """Wait until no process saves here, and keep all from it; nothing is written."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(FileNotFoundError):  # whoever saves makes one
            fcntl.flock(stack.enter_context((folder / LOCK).open("rb")), fcntl.LOCK_SH)
        yield


def _locked(folder: Path) -> IO[bytes]:
    path = folder / LOCK
    for _ in range(_ATTEMPTS):
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            file = stack.enter_context(open(path, "ab", opener=private))
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                stack.pop_all()
                return file
        # The folder was set aside while we waited: what we locked is no longer the folder of that name.
    raise OSError(errno.EBUSY, "it was moved away again and again", str(folder))
