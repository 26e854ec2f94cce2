"""`vllm-ext predictor train`: what it writes and says, and what a wrong flag leaves alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.extent import HANG_S
from vllm_ext.cli.predictor import main
from vllm_ext.prediction import decoder_file, encoder, store_files
from vllm_ext.prediction.folder import DECODER, STORE, default_folder

from .predictor_parts import (
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


def test_train_writes_a_folder_and_says_what_it_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_dataset(tmp_path / "data.jsonl")
    out = tmp_path / "deep" / "p"
    assert main(["train", "--dataset", data, "--model", "org/m", "--out", str(out), "--seed", "3", *FAST]) == 0
    shown = capsys.readouterr()
    got = json.loads(shown.out.splitlines()[-1])
    entries, metadata = store_files.read(out / STORE)
    decoder = decoder_file.load(out / DECODER, encoder="fake@0123:head+tail-128")
    assert metadata["encoder"] == got["config"]["encoder"] == "fake@0123:head+tail-128", "as the service embeds"
    assert (len(entries), set(entries.models), set(entries.times_s.tolist())) == (ROWS, {"org/m"}, {0.0})
    assert entries.lengths.tolist() == [36 + 3 * (n % 19 - 9) for n in range(ROWS)]
    assert decoder.spec.num_examples == ROWS
    assert (got["name"], got["seed"], got["workload"]["rows"]) == ("predictor_train", 3, ROWS)
    assert got["config"]["lengths_counted_in"] == {"word pieces of the encoder": ROWS}
    metrics = got["metrics"]
    assert (metrics["rows"], metrics["duplicate_prompts"], metrics["entries"]) == (ROWS, 0, ROWS)
    assert metrics["skill"] == decoder.spec.skill > 0.05
    assert 1 <= metrics["best_epoch"] <= metrics["epochs"] <= 6
    assert metrics["validation_loss_nats"] < metrics["constant_loss_nats"]
    assert metrics["held_out_rows"] == 18
    assert 0 < metrics["embed_s"] + metrics["train_s"] <= metrics["total_s"]
    assert str(tmp_path) not in shown.out
    assert "give --tokenizer" in shown.err
    assert f"written to {out}" in shown.err


def test_train_by_default_goes_into_the_models_folder_in_the_cache(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data.jsonl")
    assert main(["train", "--dataset", data, "--model", "org/m", "--quiet", *FAST]) == 0
    assert default_folder("org/m").is_relative_to(tmp_path / "cache")
    assert len(entries_of(default_folder("org/m"))) == ROWS


def test_equal_commands_write_equal_bytes(tmp_path: Path) -> None:
    one, two = (trained(tmp_path, name) for name in ("one", "two"))
    for folder, other in ((one, two), (two, one)):
        assert entries_of(folder).vectors.tobytes() == entries_of(other).vectors.tobytes()
    assert (one / DECODER).read_bytes() == (two / DECODER).read_bytes()
    assert (one / DECODER).read_bytes() != (trained(tmp_path, "three", "--seed", "1") / DECODER).read_bytes()


def test_quiet_prints_the_result_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path)
    shown = capsys.readouterr()
    assert shown.err == ""
    assert len(shown.out.splitlines()) == 1


def test_rows_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path, "p", "--dataset-where", "kind=1,7", "--max-rows", "50")
    assert len(entries_of(folder)) == 50
    got = result(capsys)
    assert (got["metrics"]["rows"], got["workload"]["rows"]) == (50, ROWS / 2)


def test_lengths_of_the_dataset_go_before_any_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "mood 1 seed 1", "output": "a b", "output_tokens": 9}\n')
    assert main(["train", "--dataset", str(data), "--model", "m", "--out", str(tmp_path / "p"), *FAST]) == 0
    shown = capsys.readouterr()
    assert entries_of(tmp_path / "p").lengths.tolist() == [9]
    assert json.loads(shown.out)["config"]["lengths_counted_in"] == {"tokens as the dataset states them": 1}
    assert "give --tokenizer" not in shown.err


def test_a_tokenizer_is_named_in_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    (tmp_path / "served").mkdir()
    Tokenizer(WordLevel({"?": 0}, unk_token="?")).save(str(tmp_path / "served" / "tokenizer.json"))
    folder = trained(tmp_path, "p", "--tokenizer", str(tmp_path / "served"), count=3)
    assert result(capsys)["config"]["lengths_counted_in"] == {"tokens of served": 3}
    assert set(entries_of(folder).lengths.tolist()) == {1}, "a tokenizer for which every text is one unknown word"


def test_prompts_are_not_stored_unless_asked(tmp_path: Path) -> None:
    private, keeping = trained(tmp_path, "private"), trained(tmp_path, "keeping", "--keep-prompts")
    assert not any(SECRET.encode() in raw for raw in snapshot(private).values())
    prompts = entries_of(keeping).prompts
    assert prompts is not None
    assert prompts[5] == f"{SECRET} mood -4 seed 5"


def test_too_few_rows_give_a_store_without_a_decoder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path, count=7)
    assert len(entries_of(folder)) == 7
    assert not (folder / DECODER).exists()
    assert "7 entries of 7 different prompts: a decoder needs 20" in result(capsys)["config"]["decoder"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--dataset", "none.jsonl"), "none.jsonl"),
        (("--dataset-format", "cvs"), "dataset format 'cvs': must be one of"),
        (("--dataset-where", "kind"), "--dataset-where kind: must be FIELD=A,B"),
        (("--dataset-where", "colour=red"), "colour"),
        (("--max-rows", "0"), "--max-rows: '0': must be a whole number of at least 1"),
        (("--prompt-tokens", "7"), "at least 8"),
        (("--hidden", "a"), "--hidden"),
        (("--tokenizer", "nowhere"), "tokenizer='nowhere'"),
        (("--out", "in_the_way/p"), "can't be made or written"),
        (("--model", " "), "model=' '"),
        (("--modell", "x"), "--modell"),
    ],
)
def test_a_wrong_flag_of_train_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: Sequence[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in_the_way").write_text("a file")
    given = {"--dataset": write_dataset(Path("data.jsonl")), "--model": "m", flags[0]: flags[1]}
    line = complaint(capsys, ["train", *(part for pair in given.items() for part in pair)])
    assert line.startswith("vllm-ext predictor")
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.jsonl", "in_the_way"]


def test_a_missing_package_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("the prompt encoder needs x: `pip install x`")

    monkeypatch.setattr(encoder, "Encoder", missing)
    line = complaint(capsys, ["train", "--dataset", write_dataset(tmp_path / "a.jsonl"), "--model", "m"])
    assert "pip install x" in line


def test_the_real_encoder_end_to_end(tmp_path: Path) -> None:
    """In a process of its own: the encoder sets the threads of the whole process."""
    data = write_dataset(tmp_path / "data.jsonl", 24)
    command = [sys.executable, "-m", "vllm_ext.cli.main", "predictor", "train", "--dataset", data, "--model", "m"]
    command += ["--out", str(tmp_path / "p"), "--quiet", *FAST]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    got = json.loads(done.stdout)
    assert got["config"]["encoder"].startswith("all-MiniLM-L6-v2@")
    assert (got["metrics"]["entries"], entries_of(tmp_path / "p").vectors.shape) == (24, (24, 384))
