"""Exported entries: what other tools read is what the store held; prompts and vectors only where they may be."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from vllm_ext.prediction import seeding
from vllm_ext.prediction.store_export import SUFFIXES, export
from vllm_ext.prediction.store_rows import Entries

from .store_parts import DIM, random_units

TEXTS = ['a "quoted", two\nlines', "", "日本語 \ud800"]


def make_entries(*, prompts: bool = False, count: int = 3) -> Entries:
    return Entries.checked(
        DIM, random_units(count, DIM), [5, 7, 7][:count], ["m/b", "", "m/a"][:count], [0.0, 1.5, 2e9][:count],
        prompts=TEXTS[:count] if prompts else None, prompt_tokens=[12, 0, 3][:count],
    )  # fmt: skip


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_json_lines_hold_an_object_per_entry(tmp_path: Path) -> None:
    export(make_entries(), tmp_path / "a.jsonl")
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()] == [
        {"output_tokens": 5, "time_s": None, "model": "m/b", "prompt_tokens": 12},
        {"output_tokens": 7, "time_s": 1.5, "model": ""},
        {"output_tokens": 7, "time_s": 2e9, "model": "m/a", "prompt_tokens": 3},
    ]


def test_csv_holds_a_line_per_entry(tmp_path: Path) -> None:
    export(make_entries(), tmp_path / "a.csv")
    assert (
        tmp_path / "a.csv"
    ).read_text() == "output_tokens,time_s,model,prompt_tokens\n5,,m/b,12\n7,1.5,,\n7,2000000000.0,m/a,3\n"


def test_numpy_arrays_hold_all_but_texts_and_need_no_pickle(tmp_path: Path) -> None:
    entries = make_entries(prompts=True)
    export(entries, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as found:
        assert sorted(found) == ["model_codes", "models", "output_tokens", "prompt_tokens", "times_s", "vectors"]
        assert found["vectors"].tobytes() == entries.vectors.tobytes()
        assert found["output_tokens"].tolist() == [5, 7, 7]
        assert found["prompt_tokens"].tolist() == [12, 0, 3]
        assert found["times_s"].tolist() == [0.0, 1.5, 2e9]
        assert found["models"][found["model_codes"]].tolist() == ["m/b", "", "m/a"]


def test_vectors_only_if_asked_for(tmp_path: Path) -> None:
    entries = make_entries()
    for name in ("a.jsonl", "a.csv"):
        export(entries, tmp_path / name, vectors=True)
    rows = [json.loads(line)["vector"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert np.array(rows, np.float32).tobytes() == entries.vectors.tobytes()
    lines = read_csv(tmp_path / "a.csv")
    assert np.float32(lines[2][f"v{DIM - 1}"]) == entries.vectors[2, DIM - 1]
    export(entries, tmp_path / "b.jsonl")
    assert "vector" not in (tmp_path / "b.jsonl").read_text()


def test_prompts_that_were_kept_go_along(tmp_path: Path) -> None:
    entries = make_entries(prompts=True)
    for name in ("a.jsonl", "a.csv"):
        export(entries, tmp_path / name)
    lines = (tmp_path / "a.jsonl").read_text().splitlines()
    assert [json.loads(line)["prompt"] for line in lines] == TEXTS
    assert [line["prompt"] for line in read_csv(tmp_path / "a.csv")] == [*TEXTS[:2], "日本語 \\ud800"]


def test_json_lines_with_prompts_are_a_dataset(tmp_path: Path) -> None:
    export(make_entries(prompts=True), tmp_path / "a.jsonl")
    found = seeding.read_rows(tmp_path / "a.jsonl")
    assert [(row.prompt, row.output_tokens) for row in found.rows] == list(zip(TEXTS, [5, 7, 7], strict=True))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_entries_are_a_file_without_entries_and_equal_ones_equal_bytes(tmp_path: Path, suffix: str) -> None:
    export(make_entries(count=0), tmp_path / f"none{suffix}")
    assert (tmp_path / f"none{suffix}").exists()
    for name in ("a", "b"):
        export(make_entries(), tmp_path / f"{name}{suffix}", vectors=True)
    assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


@pytest.mark.parametrize("name", ["a.pkl", "a", "a.jsonl.gz"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"must end in \.jsonl, \.csv, \.npz"):
        export(make_entries(), tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_text("mine")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for owner, name in ((json, "dumps"), (csv, "writer"), (np, "savez")):
        monkeypatch.setattr(owner, name, full)
    with pytest.raises(OSError, match="No space left"):
        export(make_entries(), path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_text() == "mine"
