"""A store without its CURRENT, and one that is set aside while others save: nothing whole is lost unseen."""

from __future__ import annotations

import fcntl
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.extent import HANG_S
from vllm_ext.prediction import store_access, store_files, store_generation
from vllm_ext.prediction.store_access import alone
from vllm_ext.prediction.store_files import load, read, save

from .store_parts import DIM, contents, generation, load_enc, make_store


def bytes_below(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def lost_store(folder: Path, count: int = 3) -> tuple[str, dict[str, bytes]]:
    """A store whose CURRENT is gone; returns the generation's name and its files."""
    save(make_store(count), folder)
    there = generation(folder)
    (folder / "CURRENT").unlink()
    return there.name, bytes_below(there)


def test_a_lost_current_is_reported_and_the_store_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It was an empty store without a word, and the next save removed what was there."""
    folder = tmp_path / "store"
    name, files = lost_store(folder)
    with pytest.raises(ValueError, match=f"CURRENT: missing, though {name} is there"):
        read(folder)
    assert len(load_enc(folder)) == 0
    (record,) = caplog.records
    assert "CURRENT: missing" in record.getMessage()
    assert "store.damaged-1" in record.getMessage()
    assert bytes_below(tmp_path / "store.damaged-1" / name) == files
    save(make_store(1), folder)
    assert len(load_enc(folder)) == 1
    assert bytes_below(tmp_path / "store.damaged-1" / name) == files


LOSSES: dict[str, Callable[[Path], object]] = {
    "lost": lambda folder: (folder / "CURRENT").unlink(),
    "cut": lambda folder: (folder / "CURRENT").write_bytes((folder / "CURRENT").read_bytes()[:-9]),
    "empty": lambda folder: (folder / "CURRENT").write_bytes(b""),
    "naming another": lambda folder: (folder / "CURRENT").write_bytes(
        (folder / "CURRENT").read_bytes().replace(generation(folder).name.encode(), b"gen-000001-00000000")
    ),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_save_keeps_the_generation_that_nothing_declares_old(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, loss: Callable[[Path], object]
) -> None:
    save(make_store(3), tmp_path)
    there = generation(tmp_path)
    files = bytes_below(there)
    loss(tmp_path)
    save(make_store(2), tmp_path)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"kept as {there.name}.lost" in record.getMessage()
    save(make_store(4), tmp_path)
    assert len(caplog.records) == 1, "once is enough"
    assert contents(load_enc(tmp_path)) == contents(make_store(4))
    assert bytes_below(tmp_path / f"{there.name}.lost") == files
    assert len(list(tmp_path.iterdir())) == 4


def test_what_a_first_save_cut_off_left_is_no_store_and_goes_with_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "store"
    name, _ = lost_store(folder)
    (folder / name / "metadata.json").unlink()  # it is written last
    with pytest.raises(FileNotFoundError):
        read(folder)
    assert len(load_enc(folder)) == 0
    save(make_store(2), folder)
    assert not caplog.records
    assert sorted(path.name for path in folder.iterdir()) == sorted([".lock", "CURRENT", generation(folder).name])


def test_a_reader_waits_for_the_first_save_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between its last file and CURRENT, the folder looks like one that lost CURRENT."""
    save(make_store(3), tmp_path)
    current = (tmp_path / "CURRENT").read_bytes()
    waiting, found, real = threading.Event(), list[int](), store_generation.unsaved

    @contextmanager
    def unsaved(folder: Path) -> Iterator[None]:
        waiting.set()
        with real(folder):
            yield

    monkeypatch.setattr(store_generation, "unsaved", unsaved)
    reader = threading.Thread(target=lambda: found.append(len(read(tmp_path)[0])))
    with alone(tmp_path):
        (tmp_path / "CURRENT").unlink()
        reader.start()
        assert waiting.wait(HANG_S)
        (tmp_path / "CURRENT").write_bytes(current)
    reader.join()
    assert found == [3]


@pytest.mark.parametrize("damage", ["CURRENT", "entries.npz"])
def test_a_state_saved_since_the_damage_was_seen_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    folder = tmp_path / "store"
    save(make_store(3), folder)
    (path,) = folder.rglob(damage)
    path.write_bytes(b"damaged")

    @contextmanager
    def late(folder: Path) -> Iterator[None]:
        save(make_store(7), folder)
        caplog.clear()
        with alone(folder):
            yield

    monkeypatch.setattr(store_files, "alone", late)
    assert contents(load_enc(folder)) == contents(make_store(7))
    assert not caplog.records
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_saver_that_waited_while_the_folder_was_set_aside_writes_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, aside = tmp_path / "store", tmp_path / "store.damaged-1"
    save(make_store(3), folder)
    waiting, real = threading.Event(), fcntl.flock

    def flock(file: object, operation: int) -> None:
        waiting.set()
        real(file, operation)  # type: ignore[arg-type]

    saver = threading.Thread(target=save, args=(make_store(5), folder))
    with alone(folder):
        before = bytes_below(generation(folder))
        monkeypatch.setattr(store_access.fcntl, "flock", flock)
        saver.start()
        assert waiting.wait(HANG_S)
        folder.rename(aside)
    saver.join()
    assert contents(load_enc(folder)) == contents(make_store(5))
    assert bytes_below(generation(aside)) == before


def test_an_error_within_the_lock_is_passed_on_and_frees_it(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="mine"), alone(tmp_path):
        raise FileNotFoundError("mine")
    save(make_store(1), tmp_path)
    assert len(load(tmp_path, DIM, encoder="enc")) == 1


def test_a_folder_that_is_moved_away_all_the_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_access.os.path, "samestat", lambda one, other: False)
    with pytest.raises(OSError, match="moved away again and again"):
        save(make_store(1), tmp_path / "store")
