"""`vllm-ext predictor` inspect, merge, export and eval: what they print and write, and what a mistake leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.extent import HANG_S
from vllm_ext.cli.predictor import main
from vllm_ext.prediction import decoder_file
from vllm_ext.prediction.folder import DECODER, STORE

from .predictor_parts import (
    DIM,
    FAST,
    ROWS,
    SECRET,
    complaint,
    entries_of,
    result,
    snapshot,
    trained,
    use_fakes,
    write_dataset,
)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    use_fakes(monkeypatch, tmp_path)


# --- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_prints_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path)
    before = snapshot(folder)
    capsys.readouterr()
    assert main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    for text in (f"{ROWS} entries", "m: 120", "fake@0123:head+tail-128, dim 8", "min 9", "all right", "trained on 120"):
        assert text in shown.out
    assert main(["inspect", str(folder), "--json"]) == 0
    got = result(capsys)
    assert (got["store"]["entries"], got["decoder"]["spec"]["num_examples"], got["problems"]) == (ROWS, ROWS, [])
    assert snapshot(folder) == before


def test_inspect_finds_the_folder_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--dataset", write_dataset(tmp_path / "a.jsonl"), "--model", "org/m", "--quiet", *FAST])
    capsys.readouterr()
    assert main(["inspect", "--model", "org/m", "--json"]) == 0
    assert result(capsys)["store"]["models"] == {"org/m": ROWS}


def test_inspect_of_a_damaged_predictor_names_the_file_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path)
    (folder / DECODER).write_bytes((folder / DECODER).read_bytes()[:-4])
    before = snapshot(folder)
    capsys.readouterr()
    for options in ((), ("--json",)):
        assert main(["inspect", str(folder), *options]) == 1
        shown = capsys.readouterr()
        (line,) = shown.err.splitlines()
        assert str(folder / DECODER) in line
        assert "damaged" in line
    assert json.loads(shown.out)["problems"] == [line.removeprefix("vllm-ext predictor inspect: ")]
    assert snapshot(folder) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none: holds no predictor"),
        ([], "FOLDER or --model"),
        (["none", "--model", "m"], "give one of them"),
        (["--model", "m"], "holds no predictor"),
    ],
)
def test_inspect_without_a_predictor_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in complaint(capsys, ["inspect", *arguments])


# --- merge ------------------------------------------------------------------------------------------------------------


def test_merge_makes_one_predictor_of_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = trained(tmp_path, "one", count=40), trained(tmp_path, "two", count=30, start=20, model="n")
    before = {folder: snapshot(folder) for folder in (one, two)}
    capsys.readouterr()
    out = tmp_path / "both"
    assert main(["merge", str(one), str(two), "--out", str(out), *FAST]) == 0
    got = result(capsys)
    entries = entries_of(out)
    assert (got["name"], got["metrics"]["entries_before"], got["metrics"]["entries"]) == (
        "predictor_merge",
        70,
        len(entries),
    )
    assert len({vector.tobytes() for vector in entries.vectors}) == 50
    assert decoder_file.load(out / DECODER).spec.num_examples == len(entries)
    assert {folder: snapshot(folder) for folder in (one, two)} == before


def test_merge_into_one_of_them_needs_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = trained(tmp_path, "one", count=40), trained(tmp_path, "two", count=40, start=40)
    capsys.readouterr()
    merge = ["merge", str(one), str(two), "--out", str(one), "--quiet", *FAST]
    assert "holds a predictor already; say --overwrite" in complaint(capsys, merge)
    assert main([*merge, "--overwrite"]) == 0
    assert len(entries_of(one)) == 80


def test_merge_refuses_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = trained(tmp_path, "one"), trained(tmp_path, "other", "--prompt-tokens", "64")
    damaged = trained(tmp_path, "damaged")
    (damaged / STORE / "CURRENT").write_text("{}")
    (tmp_path / "none").mkdir()
    capsys.readouterr()
    for folder, message in ((other, "must be 'fake@0123:head+tail-128'"), (damaged, "format=None"),
                            (tmp_path / "none", "none: holds no store")):  # fmt: skip
        line = complaint(capsys, ["merge", str(one), str(folder), "--out", str(tmp_path / "out"), *FAST, "--quiet"])
        assert message in line
    assert not (tmp_path / "out").exists()


# --- export and eval --------------------------------------------------------------------------------------------------


def test_export_writes_what_other_tools_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path, "p", "--keep-prompts")
    for name in ("a.jsonl", "a.csv", "a.npz"):
        assert main(["export", str(folder), "--out", str(tmp_path / name)]) == 0
    first = json.loads((tmp_path / "a.jsonl").read_text().splitlines()[0])
    prompt = f"{SECRET} mood -9 seed 0"
    assert first == {"output_tokens": 9, "time_s": None, "model": "m", "prompt_tokens": 5, "prompt": prompt}
    with np.load(tmp_path / "a.npz") as arrays:
        assert arrays["vectors"].shape == (ROWS, DIM)
    capsys.readouterr()
    assert "must end in" in complaint(capsys, ["export", str(folder), "--out", str(tmp_path / "a.pkl")])
    assert "CURRENT" in complaint(capsys, ["export", str(tmp_path), "--out", str(tmp_path / "b.csv")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "a.jsonl", "a.npz", "p", "p.jsonl"]


def test_what_was_exported_can_be_learned_again(tmp_path: Path) -> None:
    folder = trained(tmp_path, "p", "--keep-prompts")
    main(["export", str(folder), "--out", str(tmp_path / "a.jsonl")])
    again = ["train", "--dataset", str(tmp_path / "a.jsonl"), "--model", "m", "--out", str(tmp_path / "q"), "--quiet"]
    assert main([*again, *FAST]) == 0
    assert entries_of(tmp_path / "q").lengths.tolist() == entries_of(folder).lengths.tolist()
    assert entries_of(tmp_path / "q").vectors.tobytes() == entries_of(folder).vectors.tobytes()


def test_eval_gets_its_arguments_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Sequence[str]] = []
    module = types.ModuleType("vllm_ext.cli.predictor_eval")
    module.main = lambda argv: seen.append(argv) or 5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm_ext.cli.predictor_eval", module)
    assert main(["eval", "--train", "B", "--help"]) == 5
    assert seen == [["--train", "B", "--help"]]


@pytest.mark.parametrize("arguments", [[], ["trian"], ["merge", "--out", "x"], ["export", "p"]])
def test_a_wrong_command_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert complaint(capsys, arguments).startswith("vllm-ext predictor")


def test_help_lists_the_actions_and_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from vllm_ext.cli.predictor import main\n"
        "for arguments in (['--help'], ['train', '--help']):\n"
        "    try: main(arguments)\n"
        "    except SystemExit as stopped: assert stopped.code == 0\n"
        "print([m for m in ('numpy', 'torch', 'faiss', 'sentence_transformers', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S)
    for action in ("train", "eval", "inspect", "merge", "export", "--keep-prompts"):
        assert action in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
