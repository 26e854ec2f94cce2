"""Recordings come back as they were written, and what is damaged says where."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.recorded import recording
from vllm_ext.simulation.recorded.recording import RecordingError
from vllm_ext.simulation.recorded.validation import load

from .recorded_runs import add, client, header, some_settings, step

STEP = step(0, 1.0, ("a-1", 3, 0))
CLIENT = client("a", 0.5, 1.0, 2.0)


def written(path: Path, *systems: str) -> Path:
    recording.start(path)
    for system in systems or ("alise",):
        recording.append(path, header(system=system), [add().model_dump_json(), STEP.model_dump_json()], [CLIENT])
    return path


@pytest.mark.parametrize("name", ["run.jsonl", "run.jsonl.gz"])
def test_runs_come_back_as_they_were_written(tmp_path: Path, name: str) -> None:
    runs = recording.read(written(tmp_path / name, "alise", "fcfs"))
    assert [run.header.system for run in runs] == ["alise", "fcfs"]
    assert runs[1].entries == (add(), STEP)
    assert runs[1].requests == (CLIENT,)
    assert (runs[1].line, runs[1].lines) == (6, (7, 8))
    assert runs[0].label == "alise at load 0.8, repeat 0"
    assert runs[0].client_id("measured-3-0a1b2c3d") == "measured-3"


def test_starting_again_leaves_nothing_of_an_older_recording_and_entries_that_did_not_fit_are_told(
    tmp_path: Path,
) -> None:
    path = written(tmp_path / "deep" / "run.jsonl", "alise", "fcfs")
    recording.start(path)
    recording.append(path, header(), [], [], dropped=17)
    assert [run.dropped for run in recording.read(path)] == [17]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_times_survive_to_the_last_bit(tmp_path_factory: pytest.TempPathFactory, readings: list[float]) -> None:
    path = tmp_path_factory.getbasetemp() / "floats.jsonl"
    recording.start(path)
    entry = {**json.loads(add().model_dump_json()), "at_s": readings[0], "clock": readings}
    recording.append(path, header(), [json.dumps(entry)], [])
    read = recording.read(path)[0].entries[0]
    assert list(read.clock) == readings
    assert read.at_s == readings[0]


def _edited(line: int, **fields: Any) -> Callable[[list[str]], list[str]]:
    def edit(lines: list[str]) -> list[str]:
        changed = {**json.loads(lines[line]), **fields}
        lines[line] = json.dumps({key: value for key, value in changed.items() if value is not ...})
        return lines

    return edit


DAMAGES: dict[str, tuple[Callable[[list[str]], list[str]], str]] = {
    "not-json": (lambda lines: [lines[0], "{half", *lines[2:]], r"run\.jsonl, line 2: Invalid JSON"),
    "not-an-object": (lambda lines: [lines[0], "[]", *lines[2:]], r"line 2: Input should be .*object .*found \[\]"),
    "unknown-type": (_edited(1, type="ad"), r"line 2: Input tag 'ad' found using 'type' .* tags: 'run', 'add'"),
    "other-format": (_edited(0, format=99), r"line 1: field 'format': Input should be 1 .found 99"),
    "missing-field": (_edited(1, prompt=...), r"line 2: field 'prompt': Field required"),
    "unknown-field": (_edited(2, speed=1), r"line 3: field 'speed': Extra inputs"),
    "wrong-type": (_edited(2, computed=["x"]), r"line 3: field 'computed\.0': .*found 'x'"),
    "wrong-setting": (
        _edited(0, settings={**some_settings(), "num_blocks": "many"}),
        r"line 1: field 'settings\.num_blocks'",
    ),
    "line-lost": (lambda lines: [lines[0], *lines[2:]], r"line 4: field 'lines': 5 lines were written .* 4 are there"),
    "cut-short": (lambda lines: lines[:-1], r"the run of line 1 has no 'end' after line 4; .* cut short"),
    "no-header": (lambda lines: lines[1:], r"line 1: a line of type 'add' before the first line of a run"),
    "run-in-run": (lambda lines: lines[:2] + lines, r"line 3: a run begins before the one of line 1 has ended"),
    "empty": (lambda lines: [], r"run\.jsonl: holds no run"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_reported_with_file_line_and_field(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path / "run.jsonl")
    edit, message = DAMAGES[damage]
    path.write_text("".join(line + "\n" for line in edit(path.read_text().splitlines())))
    with pytest.raises(RecordingError, match=message):
        recording.read(path)


ARCHIVES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut-short": (lambda data: data[:-20], r"run\.jsonl\.gz, after line \d+: the compressed data is damaged"),
    "flipped-byte": (lambda data: data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :], r"run\.jsonl\.gz"),
    "plain-file": (gzip.decompress, "the compressed data is damaged"),
}


@pytest.mark.parametrize("damage", ARCHIVES)
def test_damaged_archive_is_reported(tmp_path: Path, damage: str) -> None:
    path = written(tmp_path / "run.jsonl.gz")
    edit, message = ARCHIVES[damage]
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(RecordingError, match=message):
        recording.read(path)


def test_runs_of_a_system_that_is_not_there_are_refused_with_those_that_are(tmp_path: Path) -> None:
    path = written(tmp_path / "run.jsonl", "alise", "fcfs")
    assert [run.header.system for run in load(path, "fcfs")] == ["fcfs"]
    assert load(path) == recording.read(path)
    with pytest.raises(RecordingError, match="system='orca': the recording holds alise, fcfs"):
        load(path, "orca")
