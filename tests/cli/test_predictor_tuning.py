"""`vllm-ext predictor train --tune-encoder`: what it writes is what the service, `inspect` and `merge` read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.prediction.tiny_transformer import one_thread, write
from vllm_ext.cli import predictor_train
from vllm_ext.cli.predictor import main
from vllm_ext.config_prediction import PredictorConfig
from vllm_ext.prediction import store_files
from vllm_ext.prediction.folder import DECODER, STORE
from vllm_ext.prediction.service.predictor import Prompt, RetrievalPredictor
from vllm_ext.prediction.tuned_encoder import ENCODER, NOTE
from vllm_ext.prediction.tuning_options import TuningOptions

from .predictor_parts import FAST, complaint, entries_of, result, snapshot

SHORT, LONG = 4, 80


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """One thread, and rates that random weights of two layers need."""
    fast = partial(TuningOptions, learning_rate=3e-3, head_learning_rate=1e-2)
    with one_thread(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(predictor_train, "TuningOptions", fast)
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("models") / "tiny")


def write_dataset(path: Path, count: int = 160, start: int = 0) -> str:
    """The first word says how long the answer is."""
    rows = [
        {"prompt": f"{'name' if n % 2 else 'explain'} thing number {n}", "output_tokens": SHORT if n % 2 else LONG}
        for n in range(start, start + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def train(folder: Path, data: str, *options: str) -> list[str]:
    common = ["--model", "m", "--out", str(folder), "--quiet", "--prompt-tokens", "32", *FAST]
    return ["train", "--dataset", data, *common, *options]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, tiny: str) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    data = write_dataset(folder / "data.jsonl")
    arguments = train(folder / "p", data, "--encoder", tiny, "--tune-encoder", "--tune-epochs", "12")
    assert main(arguments) == 0
    return folder / "p"


def copy_of(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to


def test_a_server_that_names_no_encoder_uses_it(tuned: Path) -> None:
    predictor = RetrievalPredictor(PredictorConfig(prompt_tokens=32, refresh_decoder=False), tuned)
    assert predictor.status() == {"entries": 160, "decoder_examples": 160}
    short, long = predictor.predict([Prompt("name thing number 9000", 500, "m"), Prompt("explain thing 1", 500, "m")])
    assert short is not None
    assert long is not None
    assert short.tokens < 0.5 * long.tokens
    assert {path.name for path in tuned.iterdir()} == {STORE, DECODER, ENCODER}, "nothing was set aside or left"
    assert (tuned / ENCODER).stat().st_mode & 0o077 == 0, "its owner's only"


def test_a_damaged_encoder_is_set_aside_with_what_was_learned_by_it(
    tuned: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_of(tuned, tmp_path / "p")
    (folder / ENCODER / NOTE).write_text("?")
    predictor = RetrievalPredictor(PredictorConfig(prompt_tokens=32, refresh_decoder=False), folder)
    assert predictor.status() == {"entries": 0, "decoder_examples": 0}
    assert predictor.predict([Prompt("name thing number 1", 500, "m")]) == [None]
    names = {path.name for path in folder.iterdir()}
    assert {f"{name}.damaged-1" for name in (ENCODER, STORE, DECODER)} <= names
    assert "tuned encoder not used" in caplog.text


def test_the_report_says_how_it_was_tuned(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tuned)]) == 0
    shown = capsys.readouterr().out
    assert "1 of 2 layers of tiny@" in shown
    assert "136 prompts" in shown
    assert main(["inspect", str(tuned), "--json"]) == 0
    got = result(capsys)
    assert got["tuned"]["layers"] == 1
    assert got["store"]["encoder"].startswith(f"{ENCODER}@")
    assert got["store"]["encoder"] == got["decoder"]["spec"]["encoder"]


def test_inspect_finds_a_damaged_one(tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copy_of(tuned, tmp_path / "p")
    (folder / ENCODER / "config.json").write_text("{}")
    before = snapshot(folder)
    assert main(["inspect", str(folder)]) == 1
    assert "config.json: damaged" in capsys.readouterr().err
    assert snapshot(folder) == before


def test_append_uses_it_and_overwrite_forgets_it(
    tuned: Path, tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(tuned, tmp_path / "p")
    more = write_dataset(tmp_path / "more.jsonl", 40, start=500)
    assert main(train(folder, more, "--append")) == 0
    assert len(entries_of(folder)) == 200
    assert snapshot(folder / ENCODER) == snapshot(tuned / ENCODER)
    capsys.readouterr()
    assert "to add to it" in complaint(capsys, train(folder, more, "--append", "--encoder", tiny))
    assert main(train(folder, more, "--overwrite", "--encoder", tiny)) == 0
    assert not (folder / ENCODER).exists()
    assert store_files.read(folder / STORE)[1]["encoder"].startswith("tiny@")


def test_the_result_says_what_was_tuned_and_the_same_command_tunes_the_same(
    tuned: Path, tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "data.jsonl")
    capsys.readouterr()
    assert main(train(tmp_path / "p", data, "--encoder", tiny, "--tune-encoder", "--tune-epochs", "12")) == 0
    got = result(capsys)
    assert got["config"]["tuned_encoder"]["num_validation"] == got["metrics"]["held_out_rows"] == 24
    assert got["metrics"]["encoder_layers"] == 1
    assert got["metrics"]["encoder_skill"] > 0.3
    assert got["metrics"]["tune_s"] > 0
    assert snapshot(tmp_path / "p" / ENCODER) == snapshot(tuned / ENCODER), "equal commands write equal bytes"


def test_merge_takes_the_encoder_along(tuned: Path, tmp_path: Path) -> None:
    other = copy_of(tuned, tmp_path / "other")
    more = write_dataset(tmp_path / "more.jsonl", 30, start=900)
    assert main(train(other, more, "--append")) == 0
    both = tmp_path / "both"
    assert main(["merge", str(tuned), str(other), "--out", str(both), "--quiet", *FAST]) == 0
    assert len(entries_of(both)) == 190
    assert snapshot(both / ENCODER) == snapshot(tuned / ENCODER)
    predictor = RetrievalPredictor(PredictorConfig(prompt_tokens=32, refresh_decoder=False), both)
    assert predictor.status()["entries"] == 190


def test_a_damaged_encoder_stops_merge_and_append_and_is_left_alone(
    tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(tuned, tmp_path / "p")
    (folder / ENCODER / "config.json").write_text("{}")
    before = snapshot(folder)
    more = write_dataset(tmp_path / "more.jsonl", 30, start=900)
    capsys.readouterr()
    assert "config.json: damaged" in complaint(capsys, train(folder, more, "--append"))
    merge = ["merge", str(folder), str(tuned), "--out", str(tmp_path / "both"), "--quiet", *FAST]
    assert "config.json: damaged" in complaint(capsys, merge)
    assert snapshot(folder) == before
    assert not (tmp_path / "both").exists()


def test_an_error_after_the_tuning_leaves_nothing(
    tmp_path: Path, tiny: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        assert len(list((tmp_path / "p").iterdir())) == 1, "the new encoder is there, under another name"
        raise OSError("no space left")

    monkeypatch.setattr(predictor_train, "_filled", full)
    data = write_dataset(tmp_path / "data.jsonl")
    capsys.readouterr()
    arguments = train(tmp_path / "p", data, "--encoder", tiny, "--tune-encoder", "--tune-epochs", "12")
    assert "no space left" in complaint(capsys, arguments)
    assert not (tmp_path / "p").exists()


def test_too_few_prompts_leave_the_encoder_as_it_is(
    tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_dataset(tmp_path / "few.jsonl", 60)
    arguments = [a for a in train(tmp_path / "p", data, "--encoder", tiny, "--tune-encoder") if a != "--quiet"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert "the encoder was not tuned: 60 different prompts" in shown.err
    assert "60 different prompts" in json.loads(shown.out.splitlines()[-1])["config"]["tuned_encoder"]
    assert not (tmp_path / "p" / ENCODER).exists()
    assert store_files.read(tmp_path / "p" / STORE)[1]["encoder"].startswith("tiny@")


def test_what_makes_no_sense_is_one_line(tuned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_dataset(tmp_path / "data.jsonl", 60)
    capsys.readouterr()
    assert "say --overwrite" in complaint(capsys, train(tuned, data, "--append", "--tune-encoder"))
    assert "needs --tune-encoder" in complaint(capsys, train(tmp_path / "p", data, "--tune-layers", "1"))
    assert not (tmp_path / "p").exists()


def test_layers_that_are_not_there_leave_nothing(tmp_path: Path, tiny: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_dataset(tmp_path / "data.jsonl")
    capsys.readouterr()
    arguments = train(tmp_path / "p", data, "--encoder", tiny, "--tune-encoder", "--tune-layers", "3")
    assert "layers=3: must be 1 to 2" in complaint(capsys, arguments)
    assert not (tmp_path / "p").exists()
