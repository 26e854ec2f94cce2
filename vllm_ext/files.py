"""Files that are whole or not there."""

from __future__ import annotations

import gzip
import hashlib
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import IO, BinaryIO, cast

_CHUNK_BYTES = 1 << 20


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears under its name when it is complete.

    Folders on the way are made. After an error the file that was there before is as it was.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name[:100]}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with fresh.open("xb") as file:
            yield cast(BinaryIO, file)
        os.replace(fresh, path)
    except BaseException as error:
        fresh.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            error.filename = str(path)  # a write that fails, as on a full disk, names no file
        raise


def set_aside(
    path: Path, damage: Exception, *, what: str, instead: str, logger: logging.Logger, suffix: str = "damaged"
) -> None:
    """Rename what can't be used to the first free ``<name>.<suffix>-N``, and warn.

    Args:
        path: File or folder.
        damage: What is wrong with it.
        what: It is, for the warning.
        instead: What happens without it.
        logger: Whose warning it is.
        suffix: In the new name.
    """
    aside = next(free for n in count(1) if not os.path.lexists(free := path.with_name(f"{path.name}.{suffix}-{n}")))
    try:
        path.rename(aside)
    except OSError as error:  # a read-only place, or another process was quicker
        logger.warning("%s not used: %s; it can't be set aside (%s); %s", what, damage, error, instead)
    else:
        logger.warning("%s not used: %s; set aside as %s; %s", what, damage, aside.name, instead)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file of any size, in hexadecimal digits.

    Raises:
        OSError: it can't be read.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


@contextmanager
def packed(file: BinaryIO, *, compress: bool) -> Iterator[IO[bytes]]:
    """Compress what is written if asked to; equal content gives equal bytes, as no name and no time go in."""
    if not compress:
        yield file
        return
    with gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0) as archive:
        yield cast(IO[bytes], archive)
