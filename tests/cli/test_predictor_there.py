"""`vllm-ext predictor train` where a predictor is, where another process saves, and where Ctrl-C is pressed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_ext.cli.predictor import main
from vllm_ext.prediction import decoder_file, refresh, store_files
from vllm_ext.prediction.folder import DECODER, STORE
from vllm_ext.prediction.vector_store import VectorStore

from .predictor_parts import (
    DIM,
    FAST,
    ROWS,
    FakeEncoder,
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


def test_a_predictor_that_is_there_is_refused_added_to_or_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = trained(tmp_path)
    before = snapshot(folder)
    again = ["train", "--dataset", write_dataset(tmp_path / "b.jsonl", 40, start=500), "--model", "n"]
    again += ["--out", str(folder), "--quiet", *FAST]
    capsys.readouterr()
    assert "holds a predictor already; say --append or --overwrite" in complaint(capsys, again)
    assert "not allowed with" in complaint(capsys, [*again, "--append", "--overwrite"])
    assert snapshot(folder) == before
    assert main([*again, "--append"]) == 0
    entries = entries_of(folder)
    assert entries.models == ("m",) * ROWS + ("n",) * 40
    assert decoder_file.load(folder / DECODER).spec.num_examples == ROWS + 40
    assert result(capsys)["metrics"]["entries_before"] == ROWS
    assert main([*again, "--overwrite"]) == 0
    assert entries_of(folder).models == ("n",) * 40
    assert decoder_file.load(folder / DECODER).spec.num_examples == 40


def test_an_old_decoder_goes_with_overwrite_and_stays_with_append(tmp_path: Path) -> None:
    folder = trained(tmp_path, "p", count=30)
    old = (folder / DECODER).read_bytes()

    def again(flag: str, count: int) -> None:
        data = write_dataset(tmp_path / "b.jsonl", count)
        assert main(["train", "--dataset", data, "--model", "m", "--out", str(folder), "--quiet", *FAST, flag]) == 0

    def no_better(*_: object, **__: object) -> None:
        raise refresh.NoDecoderError("no better than a constant")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refresh, "train_from", no_better)
        again("--append", 5)
        assert (folder / DECODER).read_bytes() == old
        again("--overwrite", 5)
    assert not (folder / DECODER).exists()


def test_another_encoder_is_not_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path)
    before = snapshot(folder)
    capsys.readouterr()
    more = ["train", "--dataset", str(tmp_path / "p.jsonl"), "--model", "m", "--out", str(folder), "--append"]
    for option in (("--encoder", "other"), ("--prompt-tokens", "64"), ("--prompt-window", "head")):
        line = complaint(capsys, [*more, *FAST, "--quiet", *option])
        assert "encoder='fake@0123:head+tail-128': must be" in line
    assert snapshot(folder) == before


def test_texts_that_were_kept_are_forgotten_aloud(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = trained(tmp_path, "p", "--keep-prompts", count=30)
    more = ["train", "--dataset", str(tmp_path / "p.jsonl"), "--model", "m", "--out", str(folder), "--append", *FAST]
    assert main([*more, "--keep-prompts"]) == 0
    assert entries_of(folder).prompts is not None
    capsys.readouterr()
    assert main(more) == 0
    assert "texts of prompts that were kept there are forgotten" in capsys.readouterr().err
    assert entries_of(folder).prompts is None


def test_what_a_server_saved_meanwhile_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained(tmp_path, count=30)
    real = refresh.train_from

    def slow(*arguments: Any, **options: Any) -> Any:
        old = entries_of(folder)
        store = VectorStore(DIM, encoder="fake@0123:head+tail-128")
        store.add(old.vectors, old.lengths, old.models)
        store.add(old.vectors[0], [777], ["served"], [5.0])
        store_files.save(store, folder / STORE)
        return real(*arguments, **options)

    monkeypatch.setattr(refresh, "train_from", slow)
    data = write_dataset(tmp_path / "b.jsonl", 25, start=900)
    assert main(["train", "--dataset", data, "--model", "m", "--out", str(folder), "--append", "--quiet", *FAST]) == 0
    assert entries_of(folder).lengths.tolist().count(777) == 1
    assert len(entries_of(folder)) == 30 + 1 + 25


def interrupted_while_embedding(patch: pytest.MonkeyPatch) -> None:
    def encode(self: FakeEncoder, texts: Sequence[str]) -> NDArray[np.float32]:
        raise KeyboardInterrupt

    patch.setattr(FakeEncoder, "encode", encode)


def interrupted_while_training(patch: pytest.MonkeyPatch) -> None:
    real = refresh.train_from

    def train_from(*arguments: Any, on_epoch: Callable[[Any], None], **options: Any) -> Any:
        def interrupt(_: Any) -> None:
            raise KeyboardInterrupt

        return real(*arguments, on_epoch=interrupt, **options)

    patch.setattr(refresh, "train_from", train_from)


@pytest.mark.parametrize("when", [interrupted_while_embedding, interrupted_while_training])
@pytest.mark.parametrize("there", [False, True], ids=["new folder", "predictor there"])
def test_ctrl_c_leaves_the_folder_as_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool, when: Callable[[pytest.MonkeyPatch], None]
) -> None:
    folder = trained(tmp_path, count=30) if there else tmp_path / "new"
    before = snapshot(folder)
    capsys.readouterr()
    data = write_dataset(tmp_path / "b.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        when(patch)
        arguments = ["train", "--dataset", data, "--model", "m", "--out", str(folder), *FAST]
        assert main([*arguments, *(["--append"] if there else [])]) == 130
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "interrupted; nothing was written" in shown.err
    assert snapshot(folder) == before
    assert folder.exists() == there


def test_ctrl_c_between_the_files_does_not_part_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = decoder_file.save

    def interrupted(*arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        real(*arguments)

    monkeypatch.setattr(decoder_file, "save", interrupted)
    folder = trained(tmp_path)
    assert (len(entries_of(folder)), decoder_file.load(folder / DECODER).spec.num_examples) == (ROWS, ROWS)
