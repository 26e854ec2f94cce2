"""CUDA machine code inside shared objects: clear what is for other chips, so that the file packs to what one needs.

    section     .nv_fatbin: container, container, ..
    container   u32 magic, u16 version, u16 header bytes, u64 bytes of its entries; entry, entry, ..
    entry       u16 kind, u16 version, u32 header bytes, u64 bytes of its payload, .., at byte 28: u32 architecture, ..;
                payload

The CUDA driver chooses an entry by its header, and reads no other payload. Headers stay and nothing moves: payloads are
overwritten with zeros.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

SECTION = b".nv_fatbin"
_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
_ARCHITECTURE_AT = 28
_ALIGNMENT = 8
_ELF_64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_ELF_HEADER_BYTES = 64
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")


class MalformedError(ValueError):
    """A file is not what its headers say."""


class Kind(IntEnum):
    """What the payload of an entry is."""

    PTX = 1
    ELF = 2


_KINDS = frozenset(Kind)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One piece of device code; offsets are those of the file."""

    kind: Kind
    architecture: int
    """Compute capability times ten; 90 stands for sm_90 and sm_90a."""
    start: int
    end: int

    @property
    def name(self) -> str:
        """Kind and architecture, for people."""
        return f"{'sm' if self.kind is Kind.ELF else 'compute'}_{self.architecture}"


@dataclass(frozen=True, kw_only=True)
class Thinned:
    """Bytes of payloads by `Entry.name`."""

    kept: Counter[str]
    dropped: Counter[str]


def thin(path: Path, architecture: int) -> Thinned:
    """Clear the device code of a shared object that a chip never runs, in place.

    Of each container this keeps machine code of the architecture itself; else that of an older one of the same major
    version, which the chip runs too; else the newest PTX that the driver can compile for it; else nothing, because vLLM
    launches no such kernel there.

    Args:
        path: An ELF file for 64 bits, little-endian; one without device code stays as it is.
        architecture: Compute capability times ten.

    Raises:
        MalformedError: headers contradict each other or the file's size; the file is unchanged.
    """
    data = bytearray(path.read_bytes())
    kept: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for entries in list(_containers(data, *_section(data, SECTION))):
        usable = _usable(entries, architecture)
        for entry in entries:
            size = entry.end - entry.start
            (kept if entry in usable else dropped)[entry.name] += size
            if entry not in usable:
                data[entry.start : entry.end] = bytes(size)
    if dropped:
        path.write_bytes(data)
    return Thinned(kept=kept, dropped=dropped)


def _usable(entries: Sequence[Entry], architecture: int) -> list[Entry]:
    machine = [entry for entry in entries if entry.kind is Kind.ELF]
    major = architecture // 10 * 10
    ptx = (entry for entry in entries if entry.kind is Kind.PTX and entry.architecture <= architecture)
    return (
        [entry for entry in machine if entry.architecture == architecture]
        or [entry for entry in machine if major <= entry.architecture < architecture]
        or sorted(ptx, key=lambda entry: entry.architecture)[-1:]
    )


def _section(data: bytearray, wanted: bytes) -> tuple[int, int]:
    """Return where a section starts and ends in the file; twice 0 if there is none.

    Raises:
        MalformedError: no ELF file of the kind, or its section headers lead out of it.
    """
    if not data.startswith(_ELF_64_LITTLE_ENDIAN) or len(data) < _ELF_HEADER_BYTES:
        raise MalformedError("no ELF file for 64 bits, little-endian")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    if size != _SECTION_HEADER.size or table + size * count > len(data) or names_index >= count:
        raise MalformedError("section headers are not inside of the file")
    headers = [_SECTION_HEADER.unpack_from(data, table + size * index) for index in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, start, length, *_ in headers:
        if _is_name(data, names + name, wanted):
            if start + length > len(data):
                raise MalformedError(f"section {wanted.decode()} ends behind the file")
            return start, start + length
    return 0, 0


def _is_name(data: bytearray, at: int, wanted: bytes) -> bool:
    return data[at : at + len(wanted) + 1] == wanted + b"\0"


def _containers(data: bytearray, at: int, end: int) -> Iterator[list[Entry]]:
    """Yield the entries of each container of a section.

    Raises:
        MalformedError: what should be a container is none, or does not end where it says.
    """
    while at < end:
        if not any(data[at : min(at + _ALIGNMENT, end)]):  # padding
            at += _ALIGNMENT
            continue
        if at + _CONTAINER.size > end:
            raise MalformedError(f"no container of device code at byte {at}")
        magic, _, header, size = _CONTAINER.unpack_from(data, at)
        start = at + header
        if magic != _MAGIC or header < _CONTAINER.size or start + size > end:
            raise MalformedError(f"no container of device code at byte {at}")
        at = start + size
        yield list(_entries(data, start, at))


def _entries(data: bytearray, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        if at + _ARCHITECTURE_AT + 4 > end:
            raise MalformedError(f"no entry of device code at byte {at}")
        kind, _, header, size = _ENTRY.unpack_from(data, at)
        (architecture,) = struct.unpack_from("<I", data, at + _ARCHITECTURE_AT)
        start = at + header
        if kind not in _KINDS or header < _ARCHITECTURE_AT + 4 or start + size > end:
            raise MalformedError(f"no entry of device code at byte {at}")
        at = start + size
        yield Entry(kind=Kind(kind), architecture=architecture, start=start, end=at)
