"""The folder of the disk tier: found again after a restart, within its limit, whatever is wrong with its files."""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.disk import folder as disk_folder
from vllm_ext.kv.disk.folder import DAMAGED, FORMAT, MAX_DAMAGED, SUFFIX, Folder, FolderCounts, check_writable
from vllm_ext.kv.disk.format import TEMPORARY, VERSION, file_bytes

PAYLOAD_BYTES = 100
FILE_BYTES = file_bytes(bytes(36), PAYLOAD_BYTES)


def key(number: int) -> bytes:
    return bytes([number]) * 36


def payload(number: int) -> memoryview:
    return memoryview(bytes([number]) * PAYLOAD_BYTES)


@contextmanager
def opened(root: Path, *, files: int = 10, name: str = "kv-model-0", ttl_s: float = 0.0) -> Iterator[Folder]:
    """A folder with room for so many chunks, as a server finds it."""
    folder = Folder(root, name, max_bytes=files * FILE_BYTES, facts={"model": name}, ttl_s=ttl_s)
    folder.scan()
    try:
        yield folder
    finally:
        folder.close()


def write(folder: Folder, *numbers: int) -> None:
    for number in numbers:
        assert folder.write(key(number), payload(number))


def read(folder: Folder, number: int) -> bytes | None:
    into = bytearray(PAYLOAD_BYTES)
    return bytes(into) if folder.read(key(number), memoryview(into)) else None


def known(folder: Folder) -> set[int]:
    return {number for number in range(64) if key(number) in folder.index}


def chunk_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob(f"*{SUFFIX}") if DAMAGED not in path.parts)


def test_a_restart_finds_what_was_written(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        write(folder, 1, 2)
    with opened(tmp_path) as folder:
        assert known(folder) == {1, 2}
        assert read(folder, 2) == bytes(payload(2))
        assert folder.index.used_bytes == 2 * FILE_BYTES


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    with opened(tmp_path, files=3) as folder:
        write(folder, 1, 2, 3)
        folder.index.touch([key(1)])
        write(folder, 4)
        assert known(folder) == {1, 3, 4}
        assert len(chunk_files(tmp_path)) == 3
        assert folder.take_counts() == FolderCounts(evicted=1)


def test_the_end_of_a_prefix_goes_before_its_beginning(tmp_path: Path) -> None:
    with opened(tmp_path, files=3) as folder:
        write(folder, 1, 2, 3)
        folder.index.touch([key(1), key(2), key(3)])
        write(folder, 4)
        assert known(folder) == {1, 2, 4}


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, files=3) as folder:
        write(folder, 1, 2, 3)
        for path in chunk_files(tmp_path):
            os.utime(path, (1, 1))
        folder.index.touch([key(2)])
    with opened(tmp_path, files=3) as folder:
        write(folder, 4, 5)
        assert known(folder) == {2, 4, 5}


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        write(folder, *range(8))
    with opened(tmp_path, files=3) as folder:
        assert len(known(folder)) == len(chunk_files(tmp_path)) == 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is, in the only element."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def test_what_was_not_used_for_its_time_is_deleted(tmp_path: Path, clock: list[float]) -> None:
    with opened(tmp_path, ttl_s=100.0) as folder:
        write(folder, 1, 2, 3)
        clock[0] += 60
        folder.index.touch([key(2)])
        write(folder, 4)
        folder.expire()
        assert known(folder) == {1, 2, 3, 4}
        clock[0] += 60
        folder.index.pin([key(3)])
        folder.expire()
        assert known(folder) == {2, 3, 4}, "3 is being read"
        folder.index.unpin(key(3))
        folder.expire()
        assert known(folder) == {2, 4}
        assert len(chunk_files(tmp_path)) == 2
        assert folder.index.used_bytes == 2 * FILE_BYTES
        assert folder.take_counts() == FolderCounts(expired=2)


def test_a_restart_finds_only_what_has_time_left(tmp_path: Path, clock: list[float]) -> None:
    with opened(tmp_path) as folder:
        write(folder, 1, 2, 3)
        clock[0] += 60
        folder.index.touch([key(2)])
    clock[0] += 60
    with opened(tmp_path, ttl_s=100.0) as folder:
        assert known(folder) == {2}
        assert len(chunk_files(tmp_path)) == 1
        clock[0] += 60
        folder.expire()
        assert known(folder) == set()
    with opened(tmp_path) as folder:
        folder.expire()
        assert known(folder) == set(), "and without a time to live nothing is deleted, or comes back"


def test_times_to_live_reach_other_models_and_damaged_chunks(tmp_path: Path, clock: list[float]) -> None:
    with opened(tmp_path, name="kv-model-1") as folder:
        write(folder, 1)
    with opened(tmp_path, name="kv-model-2", ttl_s=100.0) as folder:
        write(folder, 2, 3)
        next(path for path in chunk_files(tmp_path) if path.stem == key(2).hex()).write_bytes(b"rubbish")
        assert read(folder, 2) is None
        clock[0] += 60
        write(folder, 4)
        clock[0] += 60
        folder.expire()
        assert known(folder) == {4}, "although the damaged one stands before all others"
        assert [path.stem for path in tmp_path.rglob(f"*{SUFFIX}")] == [key(4).hex()]


def test_what_is_read_is_not_evicted(tmp_path: Path) -> None:
    with opened(tmp_path, files=2) as folder:
        write(folder, 1, 2)
        folder.index.pin([key(1), key(2)])
        assert folder.write(key(3), payload(3)), "it is passed over, not an error"
        assert known(folder) == {1, 2}
        folder.index.unpin(key(2))
        write(folder, 3)
        assert known(folder) == {1, 3}


def test_the_limit_holds_while_several_write(tmp_path: Path) -> None:
    """Sampled from outside while four threads write ten times what there is room for."""
    seen: list[int] = []
    with opened(tmp_path, files=5) as folder:
        threads = [threading.Thread(target=write, args=(folder, *range(start, 52, 4))) for start in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            seen.append(folder.index.used_bytes)
        for thread in threads:
            thread.join()
        assert max(seen, default=0) <= 5 * FILE_BYTES
        assert len(chunk_files(tmp_path)) == len(known(folder)) <= 5
        assert all(read(folder, number) == bytes(payload(number)) for number in known(folder))


def test_a_damaged_chunk_is_reported_set_aside_and_not_found_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as folder:
        write(folder, 1, 2, 3)
        for path in chunk_files(tmp_path)[:2]:
            path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        with caplog.at_level(logging.WARNING, logger="vllm.vllm_ext.kv"):
            assert [read(folder, number) for number in (1, 2, 3)] == [None, None, bytes(payload(3))]
        assert known(folder) == {3}
        assert len(list((tmp_path / DAMAGED).iterdir())) == 2
        assert folder.take_counts() == FolderCounts(damaged=2)
        assert len([record for record in caplog.records if "damaged" in record.message]) == 1
        write(folder, 1)
        assert read(folder, 1) == bytes(payload(1))
    with opened(tmp_path) as folder:
        assert known(folder) == {1, 3}


def test_few_damaged_chunks_are_kept_and_they_count(tmp_path: Path) -> None:
    with opened(tmp_path, files=20) as folder:
        write(folder, *range(15))
        for path in chunk_files(tmp_path):
            path.write_bytes(b"\0" * FILE_BYTES)
        assert [read(folder, number) for number in range(15)] == [None] * 15
        assert len(list((tmp_path / DAMAGED).iterdir())) == MAX_DAMAGED
        assert folder.index.used_bytes == MAX_DAMAGED * FILE_BYTES
        write(folder, *range(20, 40))
        assert not list((tmp_path / DAMAGED).iterdir()), "they go first"


def test_a_chunk_that_cannot_be_read_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as folder:
        write(folder, 1, 2)
        chunk_files(tmp_path)[0].unlink()
        assert read(folder, 1) is None

        def failing(*_: object) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(disk_folder, "read_chunk", failing)
        assert read(folder, 2) is None
        assert known(folder) == set()
        assert folder.take_counts() == FolderCounts(unreadable=2)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES])
def test_a_chunk_that_cannot_be_written_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    with opened(tmp_path) as folder:
        write(folder, 1)

        def refusing(*_: object) -> None:
            raise OSError(error, os.strerror(error))

        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, logger="vllm.vllm_ext.kv"):
            patched.setattr(disk_folder, "write_chunk", refusing)
            assert not folder.write(key(2), payload(2))
            assert not folder.write(key(3), payload(3))
        assert folder.take_counts() == FolderCounts(unwritten=2)
        assert [os.strerror(error) in record.message for record in caplog.records] == [True]
        assert folder.index.used_bytes == FILE_BYTES
        write(folder, 2)
        assert known(folder) == {1, 2}


def test_unfinished_files_of_a_killed_server_are_removed(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        write(folder, 1)
    leftover = chunk_files(tmp_path)[0].with_name(f".0123abcd-4567{TEMPORARY}")
    leftover.write_bytes(b"half")
    with opened(tmp_path) as folder:
        assert not leftover.exists()
        assert known(folder) == {1}


def test_chunks_of_another_model_are_not_found_but_count_and_go_first(tmp_path: Path) -> None:
    with opened(tmp_path, name="kv-model-1") as folder:
        write(folder, 1, 2)
    for path in chunk_files(tmp_path):
        os.utime(path, (1, 1))
    with opened(tmp_path, files=3, name="kv-model-2") as folder:
        assert known(folder) == set()
        write(folder, 3, 4, 5)
        assert known(folder) == {3, 4, 5}
        assert {path.parent.parent.name for path in chunk_files(tmp_path)} == {"kv-model-2"}


def test_chunks_in_an_earlier_format_are_reported_and_go_before_all_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path, name="kv-model-0") as others:
        write(others, 1, 2)
    with opened(tmp_path, name="kv-model-old") as old:
        write(old, 3, 4)
    (tmp_path / "kv-model-old" / FORMAT).write_text(json.dumps({"format": VERSION - 1}))
    caplog.clear()
    with caplog.at_level(logging.WARNING, disk_folder.logger.name), opened(tmp_path, files=4, name="kv-model-1") as new:
        (said,) = caplog.messages
        assert f"kv-model-old holds KV in format {VERSION - 1} of chunks, and this version's is {VERSION}" in said
        write(new, 5, 6)
        assert {path.parts[-3] for path in chunk_files(tmp_path)} == {"kv-model-0", "kv-model-1"}


def test_files_of_strangers_are_left_alone(tmp_path: Path) -> None:
    note = tmp_path / "note.txt"
    note.write_text("mine")
    with opened(tmp_path, files=1) as folder:
        write(folder, 1, 2)
    assert note.read_text() == "mine"


def test_after_a_reset_nothing_is_found_and_a_restart_finds_nothing_of_it(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        write(folder, 1, 2)
        delete = folder.start_afresh()
        assert known(folder) == set()
        write(folder, 1, 3)
        assert folder.index.used_bytes == 4 * FILE_BYTES, "what is not deleted yet counts"
        delete()
        assert folder.index.used_bytes == 2 * FILE_BYTES
        assert len(chunk_files(tmp_path)) == 2
        assert (known(folder), read(folder, 1)) == ({1, 3}, bytes(payload(1)))
    with opened(tmp_path) as folder:
        assert known(folder) == set(), "it may be of weights that were on no disk"
        assert chunk_files(tmp_path) == []


def test_a_server_killed_after_a_reset_leaves_nothing_to_find(tmp_path: Path) -> None:
    with opened(tmp_path) as folder:
        folder.start_afresh()()
        write(folder, 1)
        (left,) = chunk_files(tmp_path)
        copy = left.read_bytes()
    left.parent.mkdir(parents=True)
    left.write_bytes(copy)
    with opened(tmp_path) as folder:
        assert known(folder) == set()
        assert not left.exists()


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="used by another server"):
        Folder(tmp_path, "kv-other", max_bytes=1, facts={})
    with opened(tmp_path) as folder:
        assert known(folder) == set()


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    with opened(tmp_path / "deep" / "root") as folder:
        write(folder, 1)
        folder.start_afresh()
        write(folder, 2)
        paths = [tmp_path / "deep" / "root", *(tmp_path / "deep" / "root").rglob("*")]
        assert {path.stat().st_mode & 0o77 for path in paths} == {0}


def test_a_directory_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_dir"):
        check_writable(str(tmp_path / "file" / "below"))
    check_writable(str(tmp_path / "new"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="disk_dir"):
        Folder(tmp_path / "file", "kv-model", max_bytes=1, facts={})
