"""A chunk of KV in a file, which says itself whether it is whole: header, key, payload.

| bytes | |
|---|---|
| 8 | magic, `MAGIC` |
| 4 | version of this format, `VERSION` |
| 4 | length of the key |
| 8 | length of the payload |
| 32 | BLAKE3 of the 24 bytes before, the key and the payload |
| | key, payload |

Numbers are little-endian. A file is written under another name and renamed, so a process that is killed leaves none
behind that is not whole. It is not forced to the disk: what a power failure damages the checksum finds.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import struct
from pathlib import Path

from blake3 import blake3

MAGIC = b"vxkvdisk"
VERSION = 2
FILE_MODE, FOLDER_MODE = 0o600, 0o700
"""Prompts can be reconstructed from KV: nobody but the owner may read it."""
TEMPORARY = ".tmp"
"""Suffix of files that are being written."""
PROCESS = f".{secrets.token_hex(4)}-"
"""Beginning of the names of those that this process writes."""
_FIELDS = struct.Struct("<8sIIQ")
_DIGEST_BYTES = 32


class DamagedChunk(Exception):
    """A file is not the chunk that it should be."""


def file_bytes(key: bytes, payload_bytes: int) -> int:
    """Return the size of a chunk's file."""
    return _FIELDS.size + _DIGEST_BYTES + len(key) + payload_bytes


def write_chunk(path: Path, key: bytes, payload: memoryview) -> None:
    """Write a file that appears under its name when it is complete; one of that name is replaced.

    Args:
        path: In a folder that is there.
        key: Of the chunk.
        payload: Contiguous bytes.

    Raises:
        OSError: it can't be written; nothing is left behind.
    """
    body = payload.cast("B")
    write_whole(path, _head(key, body), body)


def write_whole(path: Path, head: bytes, body: memoryview) -> None:
    """Write a file of two parts that appears under its name when it is complete; raises as `write_chunk`."""
    fresh = path.with_name(f"{PROCESS}{secrets.token_hex(8)}{TEMPORARY}")
    try:
        handle = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, FILE_MODE)
        try:
            _write_all(handle, head, body)
        finally:
            os.close(handle)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def read_chunk(path: Path, key: bytes, into: memoryview) -> None:
    """Read the payload of a chunk's file.

    Args:
        path: Of the file.
        key: That it must have.
        into: Contiguous bytes, as many as the payload must have; after an error their contents mean nothing.

    Raises:
        DamagedChunk: it is not that chunk, whole; the message says what is wrong.
        OSError: it can't be read.
    """
    body = into.cast("B")
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size, expected = os.fstat(handle).st_size, file_bytes(key, len(body))
        if size != expected:
            raise DamagedChunk(f"it has {size} bytes, and {expected} are expected")
        head = bytearray(expected - len(body))
        if _read_all(handle, memoryview(head), body) < expected:
            raise DamagedChunk("it was cut short while it was read")
    finally:
        os.close(handle)
    if head[: _FIELDS.size] != _fields(key, body):
        raise DamagedChunk("its header is of another format, or of another chunk")
    if bytes(head) != _head(key, body):
        raise DamagedChunk("its checksum or its key is wrong")


def _fields(key: bytes, body: memoryview) -> bytes:
    return _FIELDS.pack(MAGIC, VERSION, len(key), len(body))


def _head(key: bytes, body: memoryview) -> bytes:
    """Return what comes before the payload."""
    fields = _fields(key, body)
    return fields + blake3(fields).update(key).update(body).digest() + key


def _write_all(handle: int, head: bytes, body: memoryview) -> None:
    written = os.writev(handle, [head, body])
    while written < len(head):  # one write is enough, but for huge ones and on odd file systems
        written += os.write(handle, head[written:])
    while written < len(head) + len(body):
        written += os.write(handle, body[written - len(head) :])


def _read_all(handle: int, head: memoryview, body: memoryview) -> int:
    """Fill both as far as the file goes; returns the bytes read."""
    total = got = os.readv(handle, [head, body])
    while got and total < len(head) + len(body):
        rest = [head[total:], body] if total < len(head) else [body[total - len(head) :]]
        got = os.readv(handle, rest)
        total += got
    return total
