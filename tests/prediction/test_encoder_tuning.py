"""Tuning of the encoder for output lengths, and the folder it is kept in, on a random transformer of two layers."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vllm_ext.prediction import encoder_tuning, tuned_encoder
from vllm_ext.prediction.encoder import Encoder
from vllm_ext.prediction.encoder_tuning import NothingLearnedError, TunedModel
from vllm_ext.prediction.fine_tuning import TuningError
from vllm_ext.prediction.tuned_encoder import ENCODER, NOTE
from vllm_ext.prediction.tuning_options import TuningOptions

from .evaluation.made_up import requests
from .tiny_transformer import LAYERS, one_thread, write

FAST = TuningOptions(epochs=20, patience=20, learning_rate=3e-3, head_learning_rate=1e-2)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def encoder(tiny: str) -> Encoder:
    return Encoder(tiny, max_tokens=32)


def tune(encoder: Encoder, tiny: str, count: int = 240, **options: Any) -> TunedModel:
    examples = requests(count)
    return encoder_tuning.tune(
        encoder, examples.prompts.texts, examples.lengths, model=tiny, **{"options": FAST, **options}
    )


@pytest.fixture(scope="module")
def tuned(encoder: Encoder, tiny: str) -> TunedModel:
    return tune(encoder, tiny)


def folder_with(tuned: TunedModel, folder: Path) -> Path:
    tuned_encoder.install(tuned_encoder.write(tuned, folder), folder)
    return folder


# --- tuning -----------------------------------------------------------------------------------------------------------


def test_it_learns_from_half_of_the_layers(tuned: TunedModel, encoder: Encoder) -> None:
    report = tuned.report
    assert (report.layers, report.of_layers, report.base) == (1, LAYERS, encoder.name)
    assert (report.num_train, report.num_validation) == (204, 36)
    assert 1 <= report.best_epoch <= report.epochs <= 20
    assert report.skill == pytest.approx(1 - report.validation_loss / report.constant_loss)
    assert report.skill > 0.3, "the first word tells the length"


def test_what_is_written_embeds_as_it_was_tuned(tuned: TunedModel, encoder: Encoder, tmp_path: Path) -> None:
    folder = folder_with(tuned, tmp_path / "p")
    found = Encoder(tuned_encoder.usable(folder), max_tokens=32)
    assert found.name.startswith(f"{ENCODER}@")
    examples = requests(60, seed=7)
    vectors = found.encode(examples.prompts.texts)
    kinds = np.array([text.split()[0] for text in examples.prompts.texts])

    def nearest_is_of_its_kind(of: Any) -> float:
        similarity = of @ of.T - 2 * np.eye(len(of))
        return float((kinds[similarity.argmax(axis=1)] == kinds).mean())

    untuned = encoder.encode(examples.prompts.texts)
    assert nearest_is_of_its_kind(vectors) > max(0.9, nearest_is_of_its_kind(untuned) - 0.05)
    within = np.mean([(vectors[i] @ vectors[j]) for i in range(60) for j in range(i) if kinds[i] == kinds[j]])
    between = np.mean([(vectors[i] @ vectors[j]) for i in range(60) for j in range(i) if kinds[i] != kinds[j]])
    assert within > between + 0.2


def test_equal_prompts_are_on_one_side(encoder: Encoder, tiny: str) -> None:
    examples = requests(120)
    texts = examples.prompts.texts * 2
    lengths = np.concatenate((examples.lengths, examples.lengths + 1))
    found = encoder_tuning.tune(encoder, texts, lengths, model=tiny, options=FAST)
    assert (found.report.num_train, found.report.num_validation) == (204, 36), "18 of 120 prompts, twice"


def test_the_same_seed_writes_the_same_bytes_and_leaves_torch_alone(
    encoder: Encoder, tiny: str, tuned: TunedModel, tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    again = folder_with(tune(encoder, tiny), tmp_path / "again")
    assert torch.equal(state, torch.random.get_rng_state())
    first = folder_with(tuned, tmp_path / "first")
    files = [path for path in sorted((first / ENCODER).rglob("*")) if path.is_file()]
    assert len(files) > 4
    for path in files:
        assert (again / path.relative_to(first)).read_bytes() == path.read_bytes()


def test_progress_is_told_in_updates(encoder: Encoder, tiny: str) -> None:
    told: list[tuple[int, int, float]] = []
    with contextlib.suppress(NothingLearnedError):  # one epoch is little
        tune(encoder, tiny, options=TuningOptions(epochs=1), on_update=lambda *args: told.append(args))
    assert [done for done, _, _ in told] == list(range(1, 14))  # 204 prompts, 16 at a time
    assert {most for _, most, _ in told} == {13}


def test_too_few_prompts_and_lengths_that_say_nothing_are_told_apart_from_mistakes(encoder: Encoder, tiny: str) -> None:
    with pytest.raises(NothingLearnedError, match=r"99 different prompts.*at least 100"):
        tune(encoder, tiny, 99)
    examples = requests(200)
    noise = np.random.default_rng(1).permutation(examples.lengths)
    with pytest.raises(NothingLearnedError, match="no better than a constant on 30 others"):
        encoder_tuning.tune(
            encoder,
            examples.prompts.texts,
            noise,
            model=tiny,
            options=TuningOptions(epochs=1, learning_rate=1e-6, head_learning_rate=1e-6),
        )


@pytest.mark.parametrize("layers", [0, LAYERS + 1])
def test_layers_that_are_not_there_are_an_error(encoder: Encoder, tiny: str, layers: int) -> None:
    with pytest.raises(TuningError, match=f"^layers={layers}: must be 1 to {LAYERS}") as raised:
        tune(encoder, tiny, layers=layers)
    assert not isinstance(raised.value, NothingLearnedError)


def test_the_default_model_has_a_name() -> None:
    assert encoder_tuning.layers_of(None) == encoder_tuning.layers_of("all-MiniLM-L6-v2") == 6
    assert encoder_tuning.half_of("all-MiniLM-L6-v2") == 3
    with pytest.raises(TuningError, match="no such folder"):
        encoder_tuning.layers_of("./missing")


def test_a_folder_without_a_model_is_an_error(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="cannot be read as a transformer"):
        tune(encoder, str(tmp_path))


# --- the folder -------------------------------------------------------------------------------------------------------


def test_a_folder_says_how_its_encoder_was_made(tuned: TunedModel, tmp_path: Path) -> None:
    folder = folder_with(tuned, tmp_path)
    assert tuned_encoder.read(folder) == tuned.report
    assert json.loads((folder / ENCODER / NOTE).read_text())["report"] == asdict(tuned.report)
    assert [path.name for path in folder.iterdir()] == [ENCODER], "nothing else is left"


def test_none_is_none(tmp_path: Path) -> None:
    assert tuned_encoder.usable(tmp_path) is None
    assert tuned_encoder.usable(tmp_path / "missing") is None
    with pytest.raises(FileNotFoundError):
        tuned_encoder.read(tmp_path)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def other_format(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": "vllm-ext tuned encoder 0"}))


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda place: flip(place / "model.safetensors"), "model.safetensors"),
        (lambda place: (place / "model.safetensors").unlink(), "model.safetensors"),
        (lambda place: (place / "stranger.txt").write_text("?"), "stranger.txt"),
        (lambda place: (place / NOTE).write_text("{"), NOTE),
        (lambda place: (place / NOTE).unlink(), NOTE),
        (lambda place: other_format(place / NOTE), NOTE),
    ],
)
def test_a_damaged_one_is_reported_and_set_aside(
    tuned: TunedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any, named: str
) -> None:
    folder = folder_with(tuned, tmp_path)
    (folder / f"{ENCODER}.damaged-1").mkdir()
    damage(folder / ENCODER)
    with pytest.raises(ValueError, match=named):
        tuned_encoder.read(folder)
    with caplog.at_level(logging.WARNING, logger=tuned_encoder.__name__):
        assert tuned_encoder.usable(folder) is None
    (message,) = caplog.messages
    assert named in message
    assert f"set aside as {ENCODER}.damaged-2; using the default" in message
    assert tuned_encoder.usable(folder) is None
    assert len(caplog.messages) == 1


def test_install_replaces_and_removes(tuned: TunedModel, tmp_path: Path) -> None:
    folder = folder_with(tuned, tmp_path / "p")
    (folder / ENCODER / "old").write_text("")
    folder_with(tuned, folder)
    assert not (folder / ENCODER / "old").exists()
    copied = tuned_encoder.copy(folder, tmp_path / "q")
    tuned_encoder.install(copied, tmp_path / "q")
    assert tuned_encoder.read(tmp_path / "q") == tuned.report
    assert Encoder(tuned_encoder.usable(tmp_path / "q")).name == Encoder(tuned_encoder.usable(folder)).name
    tuned_encoder.install(None, folder)
    assert list(folder.iterdir()) == []
    tuned_encoder.install(None, folder)


def test_what_is_not_installed_is_discarded_at_once_or_after_an_hour(tuned: TunedModel, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("")
    for folder in (tmp_path, tmp_path / "new"):
        tuned_encoder.discard(tuned_encoder.write(tuned, folder))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    (tmp_path / "mine").unlink()
    killed = tuned_encoder.write(tuned, tmp_path).parent
    young = tuned_encoder.write(tuned, tmp_path).parent
    hours_ago = time.time() - 7200
    os.utime(killed, (hours_ago, hours_ago))
    folder_with(tuned, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {ENCODER, young.name}


def test_a_failed_write_leaves_nothing(tuned: TunedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(place: Path) -> dict[str, str]:
        raise OSError("no space left")

    monkeypatch.setattr(tuned_encoder, "_checksums", full)
    with pytest.raises(OSError, match="no space left"):
        tuned_encoder.write(tuned, tmp_path / "p")
    assert not (tmp_path / "p").exists()
