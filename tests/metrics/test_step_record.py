"""The step record: its head, its bound over several starts, and files of others."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.metrics import json_lines, step_record
from vllm_ext.metrics.step_record import StepRecord

ENGINE = {"format": "vllm-ext steps 1", "model": "mine", "vllm_version": "0.32.0"}
OTHER = {**ENGINE, "vllm_version": "0.33.0"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_record, "MOST", 10)


@pytest.fixture(autouse=True)
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []

    def note(message: str, *args: object) -> None:
        found.append(message % args)

    monkeypatch.setattr(step_record.logger, "warning", note)
    monkeypatch.setattr(json_lines.logger, "error", note)
    return found


def steps(first: int, count: int) -> list[Any]:
    return [[number, 0, 9, 0.0, 0.5] for number in range(first, first + count)]


def content(path: Path) -> list[Any]:
    """The head, and the numbers of the steps."""
    head, *rows = map(json.loads, path.read_text().splitlines())
    return [head, *(row[0] for row in rows)]


def test_a_file_is_bounded_over_several_starts(path: Path, messages: list[str]) -> None:
    for start in range(4):
        record = StepRecord(path)
        for batch in range(2):
            record.append(ENGINE, steps(8 * start + 4 * batch, 4))
    assert content(path) == [ENGINE, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert len(messages) == 3, "once in each start that found it full or filled it"
    assert "holds 10 steps: recording stops" in messages[0]


def test_steps_that_cannot_be_written_are_written_later_behind_the_head(path: Path, messages: list[str]) -> None:
    """As on a disk that is full at first."""
    record = StepRecord(path)
    path.mkdir()
    record.append(ENGINE, steps(0, 2))
    record.append(ENGINE, steps(2, 1))
    path.rmdir()
    record.append(ENGINE, steps(3, 1))
    record.append(ENGINE, steps(4, 9))
    assert content(path) == [ENGINE, *range(10)]
    assert ["can't be written" in line for line in messages] == [True, False]


@pytest.mark.parametrize("how", ["moved", "truncated"])
def test_after_a_rotation_from_outside_the_new_file_begins_with_the_head(path: Path, how: str) -> None:
    record = StepRecord(path)
    record.append(ENGINE, steps(0, 2))
    if how == "moved":
        path.rename(path.with_name("moved"))
    else:
        os.truncate(path, 0)
    record.append(ENGINE, steps(2, 2))
    assert content(path) == [ENGINE, 2, 3]


@pytest.mark.parametrize(
    "text", [json.dumps(OTHER) + "\n[1, 0, 9, 0.0, 0.5]\n", "mine, not JSON\n", "[1, 0, 9, 0.0, 0.5]\n"]
)
def test_the_file_of_another_engine_is_renamed_and_reported(path: Path, messages: list[str], text: str) -> None:
    path.write_text(text)
    StepRecord(path).append(ENGINE, steps(5, 1))
    assert content(path) == [ENGINE, 5]
    assert path.with_name("steps.jsonl.other-1").read_text() == text
    (said,) = messages
    assert "set aside as steps.jsonl.other-1; a new file is begun" in said
    assert text[:10] in said


def test_the_file_of_another_engine_that_cannot_be_renamed_is_left_alone(
    path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_text(json.dumps(OTHER) + "\n")

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "rename", refuse)
    record = StepRecord(path)
    record.append(ENGINE, steps(0, 2))
    record.append(ENGINE, steps(2, 2))
    assert content(path) == [OTHER]
    assert "can't be set aside (read-only)" in messages[0]


def test_two_servers_that_name_one_file_do_not_mix_their_steps(path: Path, messages: list[str]) -> None:
    first, second = StepRecord(path), StepRecord(path)
    first.append(ENGINE, steps(0, 1))
    second.append(OTHER, steps(5, 1))
    for number in range(1, 3):
        first.append(ENGINE, steps(number, 1))
    second.append(OTHER, steps(6, 1))
    assert content(path) == [OTHER, 5, 6]
    assert content(path.with_name("steps.jsonl.other-1")) == [ENGINE, 0]
    assert len(messages) == 2
    assert "recording stops" in messages[1]
