"""Files of the disk tier: found again after a restart, within their limit, whatever is wrong with them."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.fs import io

from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.disk import tier as disk_tier
from vllm_ext.kv.disk.files import DiskFiles, check_writable
from vllm_ext.kv.disk.identity import MODEL_KEY
from vllm_ext.kv.disk.tier import counter_name

from .disk_parts import FILE_BYTES, Rig, chunk_files, contents, fill, key, rig

SIZE = 100


@contextmanager
def opened(root: Path, *, files: int = 10, ttl_s: float = 0.0) -> Iterator[DiskFiles]:
    """A root with room for so many files, as a server finds it."""
    found = DiskFiles(str(root), max_bytes=files * SIZE, ttl_s=ttl_s)
    found.scan(threading.Event())
    try:
        yield found
    finally:
        found.close()


def name(files: DiskFiles, number: int, model: str = "model_r0") -> str:
    return f"{files.root}/{model}/{number:02}/{number:04}.bin"


def write(files: DiskFiles, *numbers: int, model: str = "model_r0") -> None:
    for number in numbers:
        path = Path(f"{name(files, number, model)}.abc")
        if files.begin_write(name(files, number, model), SIZE):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(SIZE))
            files.end_write(name(files, number, model), SIZE, "abc")


def known(files: DiskFiles, model: str = "model_r0") -> set[int]:
    return {number for number in range(64) if name(files, number, model) in files}


def touch(files: DiskFiles, *numbers: int) -> None:
    files.touch([name(files, number) for number in numbers])


def test_a_restart_finds_what_was_written_in_the_order_of_use(tmp_path: Path) -> None:
    with opened(tmp_path, files=3) as files:
        write(files, 1, 2, 3)
        for path in chunk_files(tmp_path):
            os.utime(path, (1, 1))
        touch(files, 2)
    with opened(tmp_path, files=3) as files:
        assert known(files) == {1, 2, 3}
        assert files.path(name(files, 2)) == f"{name(files, 2)}.abc"
        assert files.used_bytes == 3 * SIZE
        write(files, 4, 5)
        assert known(files) == {2, 4, 5}


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    with opened(tmp_path, files=3) as files:
        write(files, 1, 2, 3)
        touch(files, 1)
        write(files, 4)
        assert known(files) == {1, 3, 4}
        assert [int(path.name[:4]) for path in chunk_files(tmp_path)] == [1, 3, 4]
        assert files.counts["evicted"] == 1


def test_the_end_of_a_prefix_goes_before_its_beginning(tmp_path: Path) -> None:
    with opened(tmp_path, files=3) as files:
        write(files, 1, 2, 3)
        touch(files, 1, 2, 3)
        write(files, 4)
        assert known(files) == {1, 2, 4}


def test_damaged_files_of_one_chunk_replace_each_other(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        for model in ("one_r0", "two_r0"):
            damaged = Path(f"{name(files, 1, model)}.{model[0].encode().hex()}")
            damaged.parent.mkdir(parents=True)
            damaged.write_bytes(bytes(SIZE))
            assert files.begin_write(name(files, 1, model), SIZE)
            files.end_write(name(files, 1, model), SIZE, damaged.suffix[1:])
            files.set_aside(name(files, 1, model))
        assert [path.name for path in chunk_files(tmp_path)] == ["0001.bin.74"]
        assert files.used_bytes == SIZE


@pytest.mark.parametrize("left", ["abc", "def"], ids=["the same", "an earlier one"])
def test_a_chunk_that_is_found_while_it_is_written_counts_once(tmp_path: Path, left: str) -> None:
    with opened(tmp_path) as files:
        folder = Path(name(files, 1)).parent
        folder.mkdir(parents=True)
        assert files.begin_write(name(files, 1), SIZE)
        for suffix in {left, "abc"}:
            (folder / f"0001.bin.{suffix}").write_bytes(bytes(SIZE))
            os.utime(folder / f"0001.bin.{suffix}", (9, 9) if suffix == left else (1, 1))
        files.scan(threading.Event())
        (folder / "0001.bin.abc").write_bytes(bytes(SIZE))
        files.end_write(name(files, 1), SIZE, "abc")
        assert [path.name for path in chunk_files(tmp_path)] == ["0001.bin.abc"]
        assert files.used_bytes == SIZE


def test_files_of_strangers_stay(tmp_path: Path) -> None:
    names = ("pytorch_model.bin.index.json", "notes.kv", "model.bin.tmp", "add.bin.old")
    for stranger in names:
        (tmp_path / stranger).write_bytes(bytes(SIZE))
        os.utime(tmp_path / stranger, (1, 1))
    with opened(tmp_path, files=1, ttl_s=60) as files:
        assert len(files) == 0
    assert {path.name for path in tmp_path.iterdir()} == {*names, ".lock"}


def test_a_file_of_the_future_keeps_no_other_from_expiring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is put back by a day."""
    with opened(tmp_path, ttl_s=60) as files:
        now = time.time()
        for number, clock in enumerate((now + 86400, now, now + 100)):
            monkeypatch.setattr(time, "time", lambda clock=clock: clock)
            write(files, number)
        files.sweep()
        assert known(files) == {0, 2}


def test_a_lower_limit_holds_from_the_start(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        write(files, *range(8))
    with opened(tmp_path, files=3) as files:
        assert len(known(files)) == len(chunk_files(tmp_path)) == 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is, in the only element."""
    now = [time.time()]
    monkeypatch.setattr(time, "time", lambda: now[0])
    return now


def test_what_was_not_used_for_its_time_is_deleted(tmp_path: Path, clock: list[float]) -> None:
    with opened(tmp_path, ttl_s=100.0) as files:
        write(files, 1, 2, 3)
        clock[0] += 60
        touch(files, 2)
        write(files, 4)
        files.sweep()
        assert known(files) == {1, 2, 3, 4}
        clock[0] += 60
        files.reading.add(name(files, 3))
        files.sweep()
        assert known(files) == {2, 3, 4}, "3 is being read"
        files.reading.clear()
        files.sweep()
        assert known(files) == {2, 4}
        assert len(chunk_files(tmp_path)) == files.counts["expired"] == 2


def test_a_restart_finds_only_what_has_time_left_of_other_models_too(tmp_path: Path, clock: list[float]) -> None:
    with opened(tmp_path) as files:
        write(files, 1, 2, 3)
        write(files, 4, model="other_r0")
        clock[0] += 60
        touch(files, 2)
    clock[0] += 60
    with opened(tmp_path, ttl_s=100.0) as files:
        assert known(files) == {2}
        assert len(chunk_files(tmp_path)) == 1


def test_what_is_read_is_not_evicted(tmp_path: Path) -> None:
    with opened(tmp_path, files=2) as files:
        write(files, 1, 2)
        files.reading.update([name(files, 1), name(files, 2)])
        write(files, 3)
        assert known(files) == {1, 2}
        files.reading.discard(name(files, 2))
        write(files, 3)
        assert known(files) == {1, 3}


def test_the_limit_holds_while_several_write(tmp_path: Path) -> None:
    """Sampled from outside while four threads write ten times what there is room for."""
    seen: list[int] = []
    with opened(tmp_path, files=5) as files:
        threads = [threading.Thread(target=write, args=(files, *range(start, 52, 4))) for start in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            seen.append(files.used_bytes)
        assert max(seen, default=0) <= 5 * SIZE
        assert len(chunk_files(tmp_path)) == len(known(files)) == len(files) == 5


def test_files_of_other_models_and_versions_count_and_go_when_they_are_the_oldest(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        write(files, 1, model="other_r0")
    earlier = tmp_path / "kv-model-0" / "ab" / "abcd.kv"
    earlier.parent.mkdir(parents=True)
    earlier.write_bytes(bytes(SIZE))
    for path in (earlier, *chunk_files(tmp_path)):
        os.utime(path, (1, 1))
    with opened(tmp_path, files=3) as files:
        assert (known(files), len(files)) == (set(), 2)
        write(files, 3, 4, 5)
        assert known(files) == {3, 4, 5}
        assert (earlier.exists(), len(chunk_files(tmp_path))) == (False, 3)


def test_of_two_files_of_a_chunk_the_newer_is_kept(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        write(files, 1)
    older = chunk_files(tmp_path)[0].with_suffix(".def")
    older.write_bytes(bytes(SIZE))
    os.utime(older, (1, 1))
    with opened(tmp_path) as files:
        assert files.path(name(files, 1)) == f"{name(files, 1)}.abc"
        assert files.used_bytes == SIZE
        assert not older.exists()


def test_unfinished_files_of_a_killed_server_are_removed_and_strangers_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        write(files, 1)
    leftover, own = (chunk_files(tmp_path)[0].with_suffix(suffix) for suffix in (".abc_12.tmp", ".abc_34.tmp"))
    for path in (leftover, own, note := tmp_path / "note.txt.tmp"):
        path.write_bytes(b"half")
    os.utime(leftover, (1, 1))
    os.utime(own, (time.time() + 60,) * 2)
    with opened(tmp_path, files=1) as files:
        assert [path.exists() for path in (leftover, own, note)] == [False, True, True], "one is being written"
        assert known(files) == {1}


def test_what_is_forgotten_is_not_found_at_once_and_may_come_again(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        write(files, 1, 2)
        files.forget([name(files, 1), name(files, 9)])
        assert known(files) == {2}
        assert len(chunk_files(tmp_path)) == 2, "the step path deletes nothing"
        write(files, 1)
        files.sweep()
        assert known(files) == {1, 2}
        assert (len(chunk_files(tmp_path)), files.used_bytes) == (2, 2 * SIZE)


def test_what_a_scan_finds_after_a_reset_is_of_weights_that_are_gone(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        write(files, 1)
    files = DiskFiles(str(tmp_path), max_bytes=SIZE, ttl_s=0)
    files.start_afresh(f"{tmp_path}/model")
    files.scan(threading.Event())
    assert (len(files), chunk_files(tmp_path), files.used_bytes) == (0, [], 0)
    files.close()


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(ConfigError, match="used by another server"):
        DiskFiles(str(tmp_path), max_bytes=1, ttl_s=0)
    with opened(tmp_path) as files:
        assert known(files) == set()


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with opened(tmp_path), opened(tmp_path / "deep" / "root"):
        assert [path.stat().st_mode & 0o777 for path in (tmp_path, tmp_path / "deep" / "root")] == [0o700] * 2


def test_a_directory_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_dir"):
        check_writable(str(tmp_path / "file" / "below"))
    check_writable(str(tmp_path / "new"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="disk_dir"):
        DiskFiles(str(tmp_path / "file"), max_bytes=1, ttl_s=0)


# --- with vLLM's reads and writes -----------------------------------------------------------------------------------


def stored(root: Path, *numbers: int, **options: Any) -> list[Path]:
    """Let a server keep chunks; returns their files."""
    with rig(root, **options) as tiers:
        fill(tiers, *numbers)
        return [tiers.file(number) for number in numbers]


def counted(tiers: Rig) -> dict[str, float]:
    values = tiers.disk.get_stats()._values
    return {kind: values[counter_name(kind)][()] for kind in disk_tier.COUNTERS if counter_name(kind) in values}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("damage", ["flipped", "cut", "long", "swapped", "emptied"])
def test_a_damaged_chunk_is_reported_set_aside_and_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, damage: str, fast: bool
) -> None:
    """With vLLM's compiled reads and writes, and with those in Python."""
    monkeypatch.setattr(io, "_HAS_FSIO_C", fast and io._HAS_FSIO_C)
    _, path, other = stored(tmp_path, 1, 2, 3)
    raw = path.read_bytes()
    flipped = raw[:40] + bytes([raw[40] ^ 1]) + raw[41:]
    damaged = {"flipped": flipped, "cut": raw[:-1], "long": raw + b"\0", "swapped": other.read_bytes(), "emptied": b""}
    path.write_bytes(damaged[damage])
    with rig(tmp_path) as tiers, caplog.at_level(logging.WARNING, disk_tier.logger.name):
        assert tiers.load(tiers.request(1, 2, 3), 1, 2, 3) == contents(1)
        assert counted(tiers) == {"damaged": 1}
        assert tiers.on_disk(1, 2, 3) == [True, False, True]
        assert [record.message for record in caplog.records if "is damaged and set aside" in record.message]
        assert not path.exists()
        assert [*tmp_path.rglob(path.name)] == [*tmp_path.rglob(f"damaged/{path.name}")]
        assert next(tmp_path.rglob(f"damaged/{path.name}")).read_bytes() == damaged[damage]
        fill(tiers, 2)
        assert tiers.file(2).read_bytes() == raw


def test_a_chunk_under_another_chunks_name_is_damaged(tmp_path: Path) -> None:
    first, second = stored(tmp_path, 1, 2)
    second.unlink()
    shutil.copy(first, second.with_suffix(first.suffix))
    with rig(tmp_path) as tiers:
        assert tiers.load(tiers.request(1, 2), 1, 2) == contents(1)
        assert counted(tiers) == {"damaged": 1}


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    (path,) = stored(tmp_path, 1)
    raw = path.read_bytes()
    for at in range(0, 48 * 8, 7):
        flipped = bytearray(raw)
        flipped[at // 8] ^= 1 << at % 8
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(flipped)
        with rig(tmp_path) as tiers:
            assert tiers.load(tiers.request(1), 1) == []


CHANGES: list[dict[str, Any]] = [
    {"kv_cache_layout": "HND"},
    {"worker_kv_bytes_per_block": 64},
    {"extra_config": {MODEL_KEY: {"models": [{"name": "other/weights"}]}}},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_kv_of_something_else_is_not_found(tmp_path: Path, change: dict[str, Any]) -> None:
    stored(tmp_path, 1)
    with rig(tmp_path, **change) as tiers:
        assert tiers.load(tiers.request(1), 1) == []
        assert len(tiers.disk.files) == 1, "but it counts"
        fill(tiers, 1)
    assert len(list(tmp_path.glob("*/config.json"))) == 2, "and both say what they are of"
    with rig(tmp_path) as tiers:
        assert tiers.load(tiers.request(1), 1) == contents(1)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_chunk_that_cannot_be_written_is_counted_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: int
) -> None:
    def refusing(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    with rig(tmp_path) as tiers:
        with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, disk_tier.logger.name):
            patched.setattr(disk_tier, "batch_store_block", refusing)
            fill(tiers, 2, 3)
        assert counted(tiers) == {"unwritten": 2}
        said = [record.message for record in caplog.records if "written" in record.message]
        assert [os.strerror(error) in message for message in said] == [True]
        assert tiers.disk.files.used_bytes == 0
        fill(tiers, 4)
        assert tiers.on_disk(2, 3, 4) == [False, False, True]


def test_a_folder_that_is_removed_costs_what_was_in_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    with rig(root) as tiers:
        fill(tiers, 1, 2, 3, 4)
        fill(tiers, 11, 12, 13, 14)
        shutil.rmtree(root)
        assert tiers.load(tiers.request(1, 2), 1, 2) == []
        assert counted(tiers) == {"unreadable": 2}
        fill(tiers, 5)
        assert tiers.on_disk(1, 2, 5) == [False, False, True]
        assert root.stat().st_mode & 0o777 == 0o700


def test_after_a_reset_nothing_is_found_and_a_restart_finds_nothing_of_it(tmp_path: Path) -> None:
    with rig(tmp_path) as tiers:
        fill(tiers, 1, 2)
        tiers.manager.reset_cache()
        assert tiers.on_disk(1, 2) == [False, False]
        tiers.step()
        assert chunk_files(tmp_path) == []
        fill(tiers, 1, 3)
        assert tiers.on_disk(1, 3) == [True, True]
        killed = tiers.file(1)
        copy = killed.read_bytes()
    assert chunk_files(tmp_path) == [], "it may be of weights that were on no disk"
    killed.parent.mkdir(parents=True)
    killed.write_bytes(copy)
    with rig(tmp_path) as tiers:
        assert tiers.lookup(tiers.request(1), 1) == [LookupResult.MISS]
        assert not killed.exists()


def test_nothing_is_read_or_written_on_the_step_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every system call on files refused, it answers as before."""
    with rig(tmp_path) as tiers:
        fill(tiers, 1, 2)
        context = tiers.request(1, 2)

        def refused(*_: object, **__: object) -> None:
            raise AssertionError("the step path touched a file")

        names = ("open", "stat", "access", "utime", "unlink", "replace", "mkdir", "scandir", "rmdir")
        with monkeypatch.context() as patched:
            for call in names:
                patched.setattr(os, call, refused)
            found = [tiers.disk.lookup(key(number), context) for number in (1, 2, 3)]
            tiers.disk.touch([key(1), key(2)], context)
            tiers.disk.get_finished_jobs()
            tiers.disk.get_stats()
        assert found == [LookupResult.HIT, LookupResult.HIT, LookupResult.MISS]


def test_a_limit_of_the_tier_counts_whole_rows(tmp_path: Path) -> None:
    with rig(tmp_path, files=2) as tiers:
        fill(tiers, 1, 2, 3)
        assert tiers.on_disk(1, 2, 3) == [False, True, True]
        assert tiers.disk.files.used_bytes == sum(path.stat().st_size for path in chunk_files(tmp_path))
        assert tiers.disk.files.used_bytes == 2 * FILE_BYTES
