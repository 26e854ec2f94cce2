"""A chunk's file: what was written comes back, and nothing else is taken for it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ext.kv.disk import format as disk_format
from vllm_ext.kv.disk.format import DamagedChunk, file_bytes, read_chunk, write_chunk

KEY = bytes(range(36))
PAYLOAD = bytes(range(64)) * 2
KEYS = st.binary(min_size=1, max_size=64)


def read(path: Path, key: bytes = KEY, size: int = len(PAYLOAD)) -> bytes:
    into = bytearray(size)
    read_chunk(path, key, memoryview(into))
    return bytes(into)


@pytest.fixture
def chunk(tmp_path: Path) -> Path:
    path = tmp_path / "chunk.kv"
    write_chunk(path, KEY, memoryview(PAYLOAD))
    return path


@settings(max_examples=50, deadline=None)
@given(key=KEYS, payload=st.binary(max_size=5000))
def test_what_was_written_comes_back(tmp_path_factory: pytest.TempPathFactory, key: bytes, payload: bytes) -> None:
    path = tmp_path_factory.mktemp("format") / "chunk.kv"
    write_chunk(path, key, memoryview(payload))
    assert path.stat().st_size == file_bytes(key, len(payload))
    assert read(path, key, len(payload)) == payload


def test_rows_of_several_dimensions_are_taken_byte_by_byte(tmp_path: Path) -> None:
    import numpy as np

    rows = np.arange(12, dtype=np.int16).reshape(3, 4)
    write_chunk(tmp_path / "chunk.kv", KEY, memoryview(rows))
    assert read(tmp_path / "chunk.kv", size=24) == rows.tobytes()


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_every_flipped_bit_is_found(chunk: Path, bit: int) -> None:
    whole = chunk.read_bytes()
    for at in range(len(whole)):
        raw = bytearray(whole)
        raw[at] ^= 1 << bit
        chunk.write_bytes(raw)
        with pytest.raises(DamagedChunk):
            read(chunk)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_rubbish_is_not_taken_for_a_chunk(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("rubbish") / "chunk.kv"
    write_chunk(path, KEY, memoryview(PAYLOAD))
    whole = path.read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    part = data.draw(st.binary(max_size=len(whole)))
    raw = whole[:start] + part + whole[start + len(part) :]
    path.write_bytes(raw)
    if raw == whole:
        assert read(path) == PAYLOAD
    else:
        with pytest.raises(DamagedChunk):
            read(path)


def test_a_file_of_any_other_length_is_damaged(chunk: Path) -> None:
    whole = chunk.read_bytes()
    for raw in [whole[:length] for length in range(len(whole))] + [whole + b"\0"]:
        chunk.write_bytes(raw)
        with pytest.raises(DamagedChunk, match="expected"):
            read(chunk)


def test_another_chunks_file_is_not_taken(chunk: Path) -> None:
    other = bytes([*KEY[:-1], 99])
    with pytest.raises(DamagedChunk):
        read(chunk, other)


def test_another_version_is_not_taken(chunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_format, "VERSION", disk_format.VERSION + 1)
    with pytest.raises(DamagedChunk, match="format"):
        read(chunk)


@pytest.mark.parametrize("failing", ["writev", "replace"])
def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "chunk.kv"
    write_chunk(path, KEY, memoryview(PAYLOAD))
    before = path.read_bytes()
    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space left"):
        write_chunk(path, KEY, memoryview(PAYLOAD[::-1]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["chunk.kv"]
    assert path.read_bytes() == before


def test_writes_and_reads_that_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call may do less than it was asked for."""
    writev, write, readv = os.writev, os.write, os.readv
    monkeypatch.setattr(os, "writev", lambda handle, parts: writev(handle, [bytes(parts[0])[:5]]))
    monkeypatch.setattr(os, "write", lambda handle, part: write(handle, bytes(part)[:7]))
    monkeypatch.setattr(os, "readv", lambda handle, parts: readv(handle, [memoryview(parts[0])[:3]]))
    path = tmp_path / "chunk.kv"
    write_chunk(path, KEY, memoryview(PAYLOAD))
    assert read(path) == PAYLOAD


def test_only_the_owner_may_read_it(chunk: Path) -> None:
    assert chunk.stat().st_mode & 0o777 == 0o600
