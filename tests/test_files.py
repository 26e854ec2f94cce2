"""Files are whole or not there."""

from __future__ import annotations

import errno
import gzip
import os
import stat
from pathlib import Path

import pytest

from vllm_ext.files import packed, replaced


def test_a_file_appears_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "x"
    with replaced(path) as file:
        file.write(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole"
    assert [p.name for p in path.parent.iterdir()] == ["x"]


def test_an_interruption_leaves_the_earlier_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"earlier")

    def interrupted() -> None:
        with replaced(path) as file:
            file.write(b"ha")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"earlier"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_write_that_fails_names_the_file(tmp_path: Path) -> None:
    """A full disk's error has none."""
    path = tmp_path / "x"

    def full() -> None:
        with replaced(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        full()


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with replaced(tmp_path / "x") as file:
            file.write(b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640


def test_compressed_bytes_hold_neither_name_nor_time(tmp_path: Path) -> None:
    for name in ("a.gz", "b.gz"):
        with replaced(tmp_path / name) as file, packed(file, compress=True) as out:
            out.write(b"content")
    assert gzip.decompress((tmp_path / "a.gz").read_bytes()) == b"content"
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "b.gz").read_bytes()
    assert (tmp_path / "a.gz").read_bytes()[4:8] == bytes(4)
