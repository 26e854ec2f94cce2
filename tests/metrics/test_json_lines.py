"""A file of JSON lines: whole lines, a bound, its mode, and what happens to it from outside."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.metrics import json_lines
from vllm_ext.metrics.json_lines import JsonLines

LINE_BYTES = 13
"""Of a record of these tests, its newline included."""


def record(number: int) -> dict[str, int]:
    return {"n": 100_00 + number}


def numbers(path: Path) -> list[int]:
    text = path.read_text()
    assert not text or text.endswith("\n"), "lines are appended whole"
    return [json.loads(line)["n"] - 100_00 for line in text.splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "log"


@pytest.fixture(autouse=True)
def tiny_mib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "_MIB", 5 * LINE_BYTES)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(json_lines.logger, "error", lambda message, *args: found.append(message % args))
    return found


def bounded(path: Path, keep: int = 2) -> JsonLines:
    return JsonLines(path, "request_log", max_mib=1, keep=keep)


def test_a_line_is_as_long_as_these_tests_think(path: Path) -> None:
    JsonLines(path, "x").append([record(0)])
    assert path.stat().st_size == LINE_BYTES


def test_an_existing_log_is_continued(path: Path) -> None:
    JsonLines(path, "request_log").append([record(1)])
    JsonLines(path, "request_log").append([record(2), record(3)])
    assert numbers(path) == [1, 2, 3]


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 100])
def test_a_full_file_is_rotated_and_the_oldest_goes(path: Path, batch: int) -> None:
    log = bounded(path)
    for first in range(0, 100, batch):
        assert log.append([record(n) for n in range(first, min(first + batch, 100))]) == 0
    files = {each.name: numbers(each) for each in path.parent.iterdir()}
    assert files.keys() == {"log", "log.1", "log.2"}
    kept = files["log.2"] + files["log.1"] + files["log"]
    assert kept == list(range(100 - len(kept), 100)), "the newest ones, in order, none twice"
    assert all(each.stat().st_size <= 5 * LINE_BYTES for each in path.parent.iterdir())
    assert len(files["log.1"]) == len(files["log.2"]) == 5


def test_files_of_a_server_that_kept_more_go_with_the_next_rotation(path: Path) -> None:
    path.parent.mkdir()
    for number in (1, 2, 3, 4, 6):
        path.with_name(f"log.{number}").write_text("old\n")
    bounded(path).append([record(n) for n in range(6)])
    assert sorted(each.name for each in path.parent.iterdir()) == ["log", "log.1", "log.2", "log.6"]


def test_without_a_bound_nothing_is_rotated(path: Path) -> None:
    JsonLines(path, "request_log").append([record(n) for n in range(50)])
    assert [each.name for each in path.parent.iterdir()] == ["log"]


def test_a_line_that_is_longer_than_a_file_has_one_of_its_own(path: Path) -> None:
    log = bounded(path)
    log.append([record(0), {"n": 100_01, "text": "x" * 1000}, record(2)])
    assert (numbers(path.with_name("log.2")), numbers(path.with_name("log.1")), numbers(path)) == ([0], [1], [2])


def test_a_new_file_is_the_owner_s_alone_and_a_rotated_one_too(path: Path) -> None:
    before = os.umask(0)
    try:
        bounded(path).append([record(n) for n in range(6)])
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()} == {0o600}


def test_a_file_that_is_there_keeps_its_mode(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    path.chmod(0o640)
    JsonLines(path, "request_log").append([record(0)])
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("how", ["moved", "truncated", "deleted", "folder gone"])
def test_what_logrotate_does_outside_costs_nothing(path: Path, how: str) -> None:
    log = JsonLines(path, "request_log")
    log.append([record(0)])
    if how == "moved":
        path.rename(path.with_name("moved"))
    elif how == "truncated":
        os.truncate(path, 0)
    else:
        path.unlink()
    if how == "folder gone":
        path.parent.rmdir()
    assert log.append([record(1)]) == 0
    assert numbers(path) == [1]


@pytest.mark.parametrize("kind", ["folder in its place", "parent is a file"])
def test_lost_lines_are_counted_each_time_and_reported_once(path: Path, kind: str, messages: list[str]) -> None:
    if kind == "folder in its place":
        path.mkdir(parents=True)
    else:
        path.parent.write_text("")
    log = JsonLines(path, "request_log")
    assert [log.append([record(0), record(1)]), log.append([record(2)])] == [2, 1]
    assert len(messages) == 1
    assert f"request_log={path}" in messages[0]


@pytest.mark.parametrize("failure", ["short", "raises"])
def test_half_a_line_is_cut_off_again(
    path: Path, failure: str, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    """As of a disk that is full: the next line must not begin behind the half of another."""

    class Full(io.FileIO):
        def write(self, data: Any) -> int:
            super().write(bytes(data)[:7])
            if failure == "raises":
                raise OSError(errno.ENOSPC, "No space left on device")
            return 7

    log = JsonLines(path, "request_log")
    log.append([record(0)])
    with monkeypatch.context() as broken:
        broken.setattr(json_lines, "open", lambda file, mode, **_: Full(file, mode.replace("b", "")), raising=False)
        assert log.append([record(1), record(2)]) == 2
    assert log.append([record(3)]) == 0
    assert numbers(path) == [0, 3]
    assert len(messages) == 1


def test_lines_before_a_rotation_that_fails_are_not_counted_as_lost(path: Path, messages: list[str]) -> None:
    path.parent.mkdir()
    (path.with_name("log.1")).mkdir()  # which no file replaces
    (path.with_name("log.1") / "x").touch()
    assert bounded(path, keep=1).append([record(n) for n in range(7)]) == 2
    assert numbers(path) == [0, 1, 2, 3, 4]
    assert len(messages) == 1


@pytest.mark.parametrize("torn", [b'{"n": 10', b"[", b"{}"])
def test_half_a_line_of_another_writer_does_not_run_into_the_next(path: Path, torn: bytes) -> None:
    """A crash, or a copy of a file that is written to, leaves one; a line glued to it would be lost as well."""
    path.parent.mkdir()
    path.write_bytes(b'{"n": 10000}\n' + torn)
    log = JsonLines(path, "request_log")
    assert log.append([record(1), record(2)]) == 0
    assert log.append([record(3)]) == 0
    first, half, *others = path.read_bytes().splitlines()
    assert (half, [json.loads(line)["n"] - 100_00 for line in (first, *others)]) == (torn, [0, 1, 2, 3])


def test_every_new_file_begins_with_the_head(path: Path, messages: list[str]) -> None:
    """Also the one after a failure, a rotation from outside, and one of its own."""
    log, head = bounded(path), record(99)
    path.parent.mkdir()
    path.mkdir()
    assert log.append([record(0)], head) == 1
    path.rmdir()
    for number in range(1, 4):
        log.append([record(number)], head)
    assert numbers(path) == [99, 1, 2, 3]
    path.rename(path.with_name("moved"))
    log.append([record(n) for n in range(4, 10)], head)
    assert (numbers(path.with_name("log.1")), numbers(path)) == ([99, 4, 5, 6, 7], [99, 8, 9])
    os.truncate(path, 2 * LINE_BYTES - 3)
    log.append([record(10)], head)
    assert path.read_text().splitlines()[2:] == [json.dumps(head), json.dumps(record(10))]
    assert len(messages) == 1
