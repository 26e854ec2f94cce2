"""Files of the disk tier: found again after a restart, within their limit, whatever is wrong with them."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.fs import io

from tests.support.upstream import needs
from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.disk import tier as disk_tier
from vllm_ext.kv.disk.files import DiskFiles, check_writable
from vllm_ext.kv.disk.identity import MODEL_KEY
from vllm_ext.kv.disk.tier import counter_name

from .disk_parts import Rig, chunk_files, contents, fill, key, rig, stored

pytestmark = needs("kv-disk")

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


def name(files: DiskFiles, number: int) -> str:
    """Every tenth is another model's."""
    return f"{files.root}/{'model' if number % 10 else 'other'}_r0/{number:02}/{number:04}.bin"


def write(files: DiskFiles, *numbers: int) -> None:
    for number in numbers:
        path = Path(f"{name(files, number)}.abc")
        if files.begin_write(name(files, number), SIZE):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(SIZE))
            os.utime(path, (time.time(), time.time()))
            files.end_write(name(files, number), SIZE, "abc")


def known(files: DiskFiles) -> set[int]:
    return {number for number in range(64) if name(files, number) in files}


class Model:
    """What must be there: numbers by when they were used, the first to go first."""

    def __init__(self) -> None:
        self.now, self.used_s, self.reading = 1e9, dict[int, float](), set[int]()
        self.forgotten: set[int] = set()
        self.evicted = self.expired = 0
        self._touched: list[tuple[int, float]] = []

    def touch(self, numbers: Iterable[int]) -> None:
        self._touched += [(number, self.now) for number in numbers]

    def settle(self) -> None:
        for number, used_s in self._touched:
            if self.used_s.pop(number, None) is not None:
                self.used_s[number] = used_s
        for number in self.forgotten:
            del self.used_s[number]
        self._touched, self.forgotten = [], set()

    def make_room(self, limit: int) -> bool:
        while len(self.used_s) > limit:
            if (oldest := next((number for number in self.used_s if number not in self.reading), None)) is None:
                return False
            del self.used_s[oldest]
            self.evicted += 1
        return True

    def write(self, number: int, limit: int) -> None:
        self.settle()
        if number not in self.used_s and self.make_room(limit - 1):
            self.used_s[number] = self.now

    def sweep(self, ttl_s: float) -> None:
        self.settle()
        old = {n for n, used_s in self.used_s.items() if used_s < self.now - ttl_s} - self.reading if ttl_s else set()
        self.expired += len(old)
        self.used_s = {number: used_s for number, used_s in self.used_s.items() if number not in old}

    def restart(self, limit: int, ttl_s: float) -> None:
        self.used_s = dict(sorted(self.used_s.items(), key=lambda item: (item[1], item[0] % 10 == 0, item[0])))
        self.reading, self.evicted, self.expired = set(), 0, 0
        self.make_room(limit)
        self.sweep(ttl_s)


@pytest.mark.parametrize("seed", range(8))
def test_what_was_used_least_recently_goes_first_over_restarts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Whatever is written, used, read, forgotten; also with a lower limit, and where the clock is put back."""
    dice, model = random.Random(seed), Model()
    monkeypatch.setattr(time, "time", lambda: model.now)
    for life in range(6):
        limit, ttl_s = dice.randint(3, 9), dice.choice((0.0, 30.0))
        with opened(tmp_path, files=limit, ttl_s=ttl_s) as files:
            model.restart(limit, ttl_s)
            for _ in range(60):
                model.now += dice.choice((1, 1, 1, 10) if dice.random() < 0.98 else (-100,))
                numbers = dice.sample(range(16), dice.randint(1, 3))
                do = dice.random()
                if do < 0.4:
                    write(files, numbers[0])
                    model.write(numbers[0], limit)
                elif do < 0.6:
                    files.touch([name(files, number) for number in numbers])
                    model.touch(reversed(numbers))
                elif do < 0.7:
                    files.forget([name(files, number) for number in numbers])
                    model.forgotten.update(number for number in numbers if number in model.used_s)
                elif do < 0.8:
                    numbers = range(16) if dice.random() < 0.3 else numbers
                    model.reading = set(numbers) & model.used_s.keys() - model.forgotten
                    files.reading.clear()
                    files.reading.update(name(files, number) for number in model.reading)
                else:
                    files.sweep()
                    model.sweep(ttl_s)
                assert known(files) == model.used_s.keys() - model.forgotten
                assert {int(path.name[:4]) for path in chunk_files(tmp_path)} == set(model.used_s), "files go later"
                assert (len(files), files.used_bytes) == (len(model.used_s), SIZE * len(model.used_s))
                assert (files.counts["evicted"], files.counts["expired"]) == (model.evicted, model.expired)
                assert all(files.path(name(files, n)) == f"{name(files, n)}.abc" for n in model.used_s)
        model.sweep(ttl_s)
        assert life or model.used_s


def test_damaged_files_of_one_chunk_replace_each_other(tmp_path: Path) -> None:
    with opened(tmp_path) as files:
        for model in ("one_r0", "two_r0"):
            chunk = f"{files.root}/{model}/01/0001.bin"
            damaged = Path(f"{chunk}.{model[0].encode().hex()}")
            damaged.parent.mkdir(parents=True)
            damaged.write_bytes(bytes(SIZE))
            assert files.begin_write(chunk, SIZE)
            files.end_write(chunk, SIZE, damaged.suffix[1:])
            files.set_aside(chunk)
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
        write(files, 10)
    earlier = tmp_path / "kv-model-0" / "ab" / "abcd.kv"
    earlier.parent.mkdir(parents=True)
    earlier.write_bytes(bytes(SIZE))
    for path in (earlier, *chunk_files(tmp_path)):
        os.utime(path, (1, 1))
    with opened(tmp_path, files=3) as files:
        assert (known(files), len(files)) == ({10}, 2)
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


def counted(tiers: Rig) -> dict[str, float]:
    values = tiers.disk.get_stats()._values
    return {kind: values[counter_name(kind)][()] for kind in disk_tier.COUNTERS if counter_name(kind) in values}


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("damage", ["first bit", "last bit", "cut", "long", "emptied", "swapped", "renamed"])
def test_a_damaged_chunk_is_reported_set_aside_and_computed_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, damage: str, fast: bool
) -> None:
    """With vLLM's compiled reads and writes, and with those in Python."""
    monkeypatch.setattr(io, "_HAS_FSIO_C", fast and io._HAS_FSIO_C)
    _, path, other = stored(tmp_path, 1, 2, 3)
    raw = path.read_bytes()
    damaged = {
        "first bit": bytes([raw[0] ^ 1]) + raw[1:],
        "last bit": raw[:-1] + bytes([raw[-1] ^ 128]),
        "cut": raw[:-1],
        "long": raw + b"\0",
        "emptied": b"",
    }.get(damage, other.read_bytes())
    path.write_bytes(damaged)
    if damage == "renamed":  # with a checksum that is right, of another chunk
        path = path.rename(path.with_suffix(other.suffix))
    with rig(tmp_path) as tiers, caplog.at_level(logging.WARNING, disk_tier.logger.name):
        assert tiers.load(tiers.request(1, 2, 3), 1, 2, 3) == contents(1)
        assert counted(tiers) == {"damaged": 1}
        assert tiers.on_disk(1, 2, 3) == [True, False, True]
        assert [record.message for record in caplog.records if "is damaged and set aside" in record.message]
        assert [found.parent.name for found in tmp_path.rglob(path.name)] == ["damaged"]
        assert next(tmp_path.rglob(path.name)).read_bytes() == damaged
        fill(tiers, 2)
        assert tiers.file(2).read_bytes() == raw


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


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS])
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
        assert counted(tiers) == {}, "each is told once"
        said = [record.message for record in caplog.records if "written" in record.message]
        assert [os.strerror(error) in message for message in said] == [True]
        assert tiers.disk.files.used_bytes == 0
        assert tiers.load(tiers.request(2, 3), 2, 3) == contents(2, 3), "host memory has them"
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
