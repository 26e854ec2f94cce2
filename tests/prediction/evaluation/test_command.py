"""`vllm-ext predictor eval` on made-up files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vllm_ext.cli.predictor_eval import main


@pytest.fixture(autouse=True)
def _encoder_settings() -> Iterator[None]:
    """An encoder sets both for the process: put back what was there."""
    threads, parallelism = torch.get_num_threads(), os.environ.get("TOKENIZERS_PARALLELISM")
    yield
    torch.set_num_threads(threads)
    if parallelism is None:
        os.environ.pop("TOKENIZERS_PARALLELISM", None)
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = parallelism


def write(path: Path, *, count: int, start: int = 0) -> Path:
    kinds = (("say hello to", 2), ("list fruits for", 20), ("write a long story about", 200))
    rows = []
    for number in range(start, start + count):
        prompt, length = kinds[number % 3]
        rows.append(
            {"prompt": f"{prompt} guest {number}", "output": "word " * (length + number % 5), "kind": number % 2}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_one_file_is_split_and_ours_ranks_better_than_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    path = write(tmp_path / "mine.jsonl", count=120)
    assert main(["--dataset", str(path), "--out", str(out), "--curve", "--quiet"]) == 0
    printed = capsys.readouterr()
    result = json.loads(printed.out.splitlines()[-1])
    assert result == json.loads(out.read_text(encoding="utf-8"))
    assert result["metrics"]["shrunk.tau"] > 0.5
    assert result["baselines"]["history"]["tau"] == 0
    assert result["baselines"]["oracle"]["relative_error_fraction"] == 0
    assert "alise.after_0.tau" in result["metrics"]
    assert result["config"]["same_rows"] is True
    assert result["config"]["tokenizer"].startswith("all-MiniLM-L6-v2@")
    assert result["config"]["train"]["used"] + result["config"]["test"]["used"] == 120
    assert str(tmp_path) not in printed.out
    assert "learned from 84 requests of mine.jsonl, tested on 36 of mine.jsonl" in printed.err


def test_prompts_of_the_other_file_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write(tmp_path / "train.jsonl", count=60)
    test = write(tmp_path / "test.jsonl", count=60, start=40)  # prompts 40 to 59 are in both
    arguments = ["--dataset", str(test), "--train", str(train), "--predictors", "history,oracle"]
    assert main([*arguments, "--quiet"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["config"]["tested_prompts_known"] == 20
    assert result["config"]["test"]["used"] == 40
    assert main([*arguments, "--quiet", "--keep-repeated", "--dataset-where", "kind=1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["config"]["tested_prompts_known"] == 0
    assert result["config"]["test"]["used"] == 30
    assert result["config"]["test"]["where"] == ["kind=1"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--predictors", "magic"], "predictors='magic': must be among alise"),
        (["--dataset-where", "kind"], "--dataset-where kind: must be FIELD=V1,V2"),
        (["--prompt-window", "middle"], "window='middle': must be one of"),
        (["--tokenizer", "nowhere"], "must be a folder with a tokenizer.json"),
        (["--max-rows", "0"], "must be a whole number of at least 1"),
        (["--test-share", "1"], "test_share=1.0: must be above 0 and below 1"),
        (["--train", "nowhere.jsonl"], "nowhere.jsonl: cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    path = write(tmp_path / "mine.jsonl", count=30)
    try:
        status = main(["--dataset", str(path), *arguments])
    except SystemExit as exit_:  # argparse
        status = int(str(exit_.code))
    printed = capsys.readouterr()
    assert status == 2
    assert problem in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_files_of_different_tokens_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stated = tmp_path / "stated.jsonl"
    stated.write_text(json.dumps({"prompt": "a", "output_tokens": 5}) + "\n", encoding="utf-8")
    path = write(tmp_path / "mine.jsonl", count=30)
    assert main(["--dataset", str(path), "--train", str(stated)]) == 2
    assert "must be the same" in capsys.readouterr().err
