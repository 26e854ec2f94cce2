"""`vllm-ext predictor`: what is trained is shown, exported and cleared; bad input is one line and status 2."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.learned_parts import WordEncoder, ask, made
from vllm_ext.cli.predictor import main
from vllm_ext.prediction import encoder
from vllm_ext.prediction.folder import REGRESSION, STORE, default_folder


class CountingEncoder(WordEncoder):
    def __init__(self, *_: Any, **options: Any) -> None:
        super().__init__()
        self.options = options

    def count_tokens(self, text: str) -> int:
        return len(text.split())


@pytest.fixture(autouse=True)
def _quick_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(encoder, "Encoder", CountingEncoder)
    monkeypatch.setenv("VLLM_EXT_CACHE", str(tmp_path / "cache"))


def dataset(folder: Path, count: int = 100) -> Path:
    """Conversations of two turns, the second answer as long as the first."""
    rows = [
        {
            "id": f"c{n}",
            "conversations": [
                {"from": "human", "value": f"say {'more' if n % 2 else 'little'} about w{n}"},
                {"from": "gpt", "value": "word " * (60 if n % 2 else 4)},
                {"from": "human", "value": f"go on v{n}"},
                {"from": "gpt", "value": "word " * (60 if n % 2 else 4)},
            ],
        }
        for n in range(count)
    ]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def result_of(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_what_is_trained_is_what_the_server_finds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "--dataset", str(dataset(tmp_path)), "--model", "org/name", "--quiet"]
    assert main(command) == 0
    metrics = result_of(capsys)["metrics"]
    assert (metrics["rows"], metrics["entries_before"], metrics["entries"]) == (200, 0, 200)
    assert metrics["regression_examples"] == 200
    folder = default_folder("org/name")
    predictor = made(folder)
    (found,) = predictor.predict([ask("say more about w5", model="org/name")])
    assert found is not None
    assert found.tokens == 60
    predictor.close()
    assert main(command) == 0
    assert result_of(capsys)["metrics"]["entries_before"] == 200, "it adds to what is there"


def test_show_export_and_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "p"
    assert main(["train", "--dataset", str(dataset(tmp_path)), "--model", "m", "--out", str(folder), "--quiet"]) == 0
    capsys.readouterr()
    assert main(["show", str(folder), "--json"]) == 0
    shown = result_of(capsys)
    assert shown["store"]["entries"] == shown["regression"]["examples"] == 200
    assert shown["store"]["models"] == {"m": 200}
    assert shown["store"]["output_tokens"]["p90"] == 60
    assert main(["show", str(folder)]) == 0
    assert "store entries" in capsys.readouterr().out
    for suffix in (".jsonl", ".csv"):
        out = tmp_path / f"out{suffix}"
        assert main(["export", str(folder), "--out", str(out)]) == 0
        with out.open(newline="") as file:
            rows = [json.loads(line) for line in file] if suffix == ".jsonl" else list(csv.DictReader(file))
        assert len(rows) == 200
        assert {int(row["tokens"]) for row in rows} == {4, 60}
        assert {int(row["turn"]) for row in rows} == {0, 1}
        assert not any(row["prompt"] for row in rows)
    assert main(["clear", str(folder)]) == 0
    assert not folder.exists()
    assert main(["show", str(folder)]) == 2


def test_damage_is_shown_and_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "p"
    main(["train", "--dataset", str(dataset(tmp_path)), "--model", "m", "--out", str(folder), "--quiet"])
    for name in (STORE, REGRESSION):
        (folder / name).write_bytes(b"garbage" * 1000)
    assert main(["show", str(folder), "--json"]) == 1
    assert len(result_of(capsys)["problems"]) == 2
    assert main(["export", str(folder), "--out", str(tmp_path / "out.csv")]) == 2
    assert not (tmp_path / "out.csv").exists()
    assert not list(folder.glob("*damaged*"))


@pytest.mark.parametrize("online", [False, True], ids=["split", "online"])
def test_eval_judges_first_and_later_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str], online: bool) -> None:
    out = tmp_path / "result.json"
    command = ["eval", "--dataset", str(dataset(tmp_path)), "--quiet", "--out", str(out)]
    assert main(command + ["--online"] * online) == 0
    result = result_of(capsys)
    metrics = result["metrics"]
    assert result["config"]["judged"] == (200 if online else 60)
    assert metrics["later_turns/tau"] > 0.3
    assert {f"{part}/{m}" for part in ("all", "first_turns", "later_turns") for m in ("pinball", "coverage")} <= set(
        metrics
    )
    assert json.loads(out.read_text())["metrics"] == metrics


def test_eval_learns_from_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other").mkdir()
    other = dataset(tmp_path / "other", 80)
    command = ["eval", "--dataset", str(dataset(tmp_path, 30)), "--train", str(other), "--first-turns", "--quiet"]
    assert main(command) == 0
    config = result_of(capsys)["config"]
    assert (config["learned"], config["judged"]) == (80, 30)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["train", "--dataset", "missing.jsonl", "--model", "m"], "missing.jsonl"),
        (["train", "--dataset", "ROWS", "--model", " "], "model="),
        (["train", "--dataset", "ROWS", "--model", "m", "--out", "ROWS/below"], "can't be made"),
        (["train", "--dataset", "ROWS", "--model", "m", "--tokenizer", "."], "tokenizer="),
        (["train", "--dataset", "ROWS", "--model", "m", "--dataset-where", "x"], "FIELD=A,B"),
        (["train", "--dataset", "x", "--model", "m", "--capacity", "0"], "--capacity: capacity=0: must be greater"),
        (["eval", "--dataset", "x", "--prompt-window", "mid"], "--prompt-window: prompt_window='mid': must be one of"),
        (["eval", "--dataset", "ROWS", "--test-share", "1"], "test_share"),
        (["show"], "say which"),
        (["show", "nowhere"], "holds no predictor"),
        (["export", "nowhere", "--out", "x.parquet"], ".csv"),
        (["export", "nowhere", "--out", "x.csv"], "there is no store"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = str(dataset(tmp_path, 3))
    assert main([part.replace("ROWS", rows) for part in command]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1


def test_number_of_rows_below_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["train", "--dataset", "x", "--model", "m", "--max-rows", "0"])
    assert "at least 1" in capsys.readouterr().err
