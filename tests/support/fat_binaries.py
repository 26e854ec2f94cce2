"""Shared objects with CUDA device code, of a few bytes each, and what can be wrong with them."""

from __future__ import annotations

import struct

PTX, ELF = 1, 2
CODE = b"machine code.. "
CONTAINER_BYTES, ENTRY_BYTES, ELF_BYTES = 16, 64, 64


def entry(kind: int, architecture: int, code: bytes = CODE + b"\0") -> bytes:
    header = struct.pack("<HHIQQII", kind, 0x101, ENTRY_BYTES, len(code), 0, 0, architecture)
    return header.ljust(ENTRY_BYTES, b"h") + code


def container(*entries: bytes) -> bytes:
    return struct.pack("<IHHQ", 0xBA55ED50, 1, CONTAINER_BYTES, sum(map(len, entries))) + b"".join(entries)


def shared_object(device_code: bytes, *, section: bytes = b".nv_fatbin") -> bytes:
    """An ELF file with a section of device code, the names of sections, and their headers."""
    names = b"\0" + section + b"\0.shstrtab\0"
    rows = [
        (0, 0, 0, 0, 0, 0),
        (1, 1, 0, 0, ELF_BYTES, len(device_code)),
        (2 + len(section), 3, 0, 0, ELF_BYTES + len(device_code), len(names)),
    ]
    table = ELF_BYTES + len(device_code) + len(names)
    header = b"\x7fELF\x02\x01".ljust(40, b"\0") + struct.pack("<Q", table)
    header = header.ljust(58, b"\0") + struct.pack("<HHH", 64, len(rows), 2)
    return header + device_code + names + b"".join(struct.pack("<IIQQQQIIQQ", *row, 0, 0, 8, 0) for row in rows)


HOPPER = shared_object(container(entry(ELF, 80), entry(ELF, 90)) + container(entry(PTX, 100)))


def changed(data: bytes, at: int, form: str, value: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(form, out, at, value)
    return bytes(out)


AT = {"container": ELF_BYTES, "entry": ELF_BYTES + CONTAINER_BYTES}
SECTION_ROW = len(HOPPER) - 2 * 64
MALFORMED = {
    "no ELF": (b"MZ" + HOPPER[2:], "no ELF file"),
    "32 bits": (changed(HOPPER, 4, "<B", 1), "no ELF file"),
    "cut off in the header": (HOPPER[:40], "no ELF file"),
    "cut off": (HOPPER[:-1], "section headers are not inside"),
    "headers of sections elsewhere": (changed(HOPPER, 40, "<Q", 2**40), "section headers are not inside"),
    "names of sections elsewhere": (changed(HOPPER, 62, "<H", 9), "section headers are not inside"),
    "a section that goes on": (changed(HOPPER, SECTION_ROW + 32, "<Q", 2**20), "ends behind the file"),
    "no magic": (changed(HOPPER, AT["container"], "<I", 1), "no container of device code at byte 64"),
    "a container that goes on": (changed(HOPPER, AT["container"] + 8, "<Q", 2**40), "no container"),
    "a container without a header": (changed(HOPPER, AT["container"] + 6, "<H", 4), "no container"),
    "a container shorter than its entry": (changed(HOPPER, AT["container"] + 8, "<Q", 24), "no entry"),
    "an entry that goes on": (changed(HOPPER, AT["entry"] + 8, "<Q", 2**40), "no entry of device code at byte 80"),
    "an entry without a header": (changed(HOPPER, AT["entry"] + 4, "<I", 0), "no entry"),
    "an unknown kind": (changed(HOPPER, AT["entry"], "<H", 8), "no entry"),
    "a second container cut off": (shared_object(container(entry(ELF, 80)) + b"\x50\xed\x55\xba"), "no container"),
}
