"""What may happen to a store's file: damage, a full disk, a read-only place, deletion. Predictions go on."""

from __future__ import annotations

import errno
import os
import sqlite3
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.learned_parts import entry, everything, store
from vllm_ext.prediction import store_file
from vllm_ext.prediction.folder import STORE


def filled(folder: Path, count: int = 400) -> Path:
    one = store(folder)
    one.add([entry(f"w{number}", number + 1) for number in range(count)])
    one.close()
    return folder / STORE


def nothing_like_it(path: Path) -> None:
    path.write_bytes(b"garbage " * 1000)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 10 * 4096 + 7])


def pages(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    for start in range(4096 * 4, len(whole), 4096 * 3):
        whole[start : start + 512] = b"\xff" * 512
    path.write_bytes(whole)


def newer(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")


@pytest.mark.parametrize("damage", [nothing_like_it, cut, pages, newer], ids=lambda f: f.__name__)
def test_a_damaged_file_is_set_aside_and_learning_starts_anew(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path)
    damage(path)
    broken = path.read_bytes()
    one = store(tmp_path)
    assert len(everything(one)) == 0
    assert one.add([entry("new", 5)])
    assert everything(one).tokens.tolist() == [5]
    assert path.with_name(f"{STORE}.damaged-1").read_bytes() == broken
    assert "is damaged" in caplog.text


def test_three_damaged_files_are_kept_at_most(tmp_path: Path) -> None:
    for number in range(5):
        tmp_path.joinpath(STORE).write_bytes(b"%d" % number * 5000)
        store(tmp_path).close()
    aside = sorted(file for file in tmp_path.iterdir() if "damaged" in file.name)
    assert [file.name for file in aside] == [f"{STORE}.damaged-{n}" for n in (1, 2, 3)]
    assert [file.read_bytes()[:1] for file in aside] == [b"2", b"3", b"4"]


def test_damage_that_comes_while_serving_is_set_aside_as_well(tmp_path: Path) -> None:
    one, path = store(tmp_path, keep_prompts=True), tmp_path / STORE
    one.add([entry(f"w{number} " + 5000 * "x", number + 1) for number in range(1500)])  # more than sqlite caches
    opened = one.opened
    pages(path)
    path.with_name(f"{STORE}-wal").write_bytes(b"")
    assert len(everything(one)) < 1500
    assert one.add([entry("new", 5)])
    assert one.opened > opened
    assert everything(one).tokens.tolist()[-1] == 5
    assert path.with_name(f"{STORE}.damaged-1").exists()


@pytest.mark.parametrize(
    ("column", "value"),
    [("vector", b"\0" * 64), ("vector", b"short"), ("vector", "text"), ("crc", 5), ("tokens", 0), ("tokens", "x")],
    ids=str,
)
def test_a_damaged_entry_is_deleted_and_the_others_stay(
    tmp_path: Path, column: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = filled(tmp_path, 10)
    with sqlite3.connect(path) as db:
        db.execute(f"UPDATE entries SET {column} = ? WHERE id = 4", (value,))
        if value == b"\0" * 64:  # its checksum is right, but it is no unit vector
            db.execute("UPDATE entries SET crc = ? WHERE id = 4", (zlib.crc32(value),))
    db.close()
    one = store(tmp_path)
    assert everything(one).ids.tolist() == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM entries").fetchone() == (9,)
    assert caplog.text.count("damaged entries") == 1


class FullDisk:
    """A connection that can't write; everything else is the real one's."""

    def __init__(self, real: sqlite3.Connection) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def __enter__(self) -> Any:
        return self._real.__enter__()

    def __exit__(self, *error: Any) -> Any:  # noqa: PYI036 - handed on
        return self._real.__exit__(*error)

    def executemany(self, *_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")


def test_a_full_disk_pauses_learning_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = store(tmp_path)
    assert one.add([entry("before", 1)])
    with monkeypatch.context() as full:
        full.setattr(one, "_db", FullDisk(one._db))
        assert not one.add([entry("lost", 2)])
        assert not one.add([entry("lost too", 2)])
        assert everything(one).tokens.tolist() == [1]
    assert one.add([entry("after", 3)])
    assert everything(one).tokens.tolist() == [1, 3]
    assert caplog.text.count("learning pauses") == 1
    assert not list(tmp_path.glob("*damaged*"))


@pytest.mark.parametrize("fault", ["read-only", "no lock", "new place"])
def test_where_nothing_can_be_written_it_goes_on_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """A read-only place; NFS, which has no locks for a write-ahead log."""
    known = 0 if fault == "new place" else 10
    if known:
        filled(tmp_path, known)

    def refused(*_: Any) -> Any:
        if fault == "no lock":
            raise sqlite3.OperationalError("locking protocol")
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(store_file, "_open", refused)
    before = sorted(file.name for file in tmp_path.iterdir())
    one = store(tmp_path)
    assert one.in_memory
    assert len(everything(one)) == known
    assert one.add([entry("new", 77)])
    assert everything(one).tokens.tolist()[-1] == 77
    assert not one.is_replaced()
    assert sorted(file.name for file in tmp_path.iterdir() if not file.name.endswith(("-shm", "-wal"))) == before
    assert caplog.text.count("lasts until the process ends") == 1


def test_a_deleted_file_is_made_again(tmp_path: Path) -> None:
    filled(tmp_path, 10)
    one = store(tmp_path)
    assert not one.is_replaced()
    for file in tmp_path.iterdir():
        file.unlink()
    assert one.is_replaced()
    assert one.add([entry("new", 3)])
    assert everything(one).tokens.tolist() == [3]
