"""When the decoder is trained again, and that a training that fails, hangs or can't begin costs nothing."""

from __future__ import annotations

import itertools
import logging
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.prediction import store_files
from vllm_ext.prediction.folder import STORE
from vllm_ext.prediction.service import refreshing
from vllm_ext.prediction.service.refreshing import FIRST_AT, NOT_BETTER, DecoderRefresh
from vllm_ext.prediction.vector_store import VectorStore

from .parts import DIM, units, until


class Training:
    """Stands for the process of a training."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command, self.options = command, options
        self.returncode: int | None = None
        self.calls: list[str] = []

    def poll(self) -> int | None:
        return self.returncode

    def kill(self) -> None:
        self.calls.append("kill")

    def wait(self) -> int:
        self.calls.append("wait")
        return -9


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[Training]:
    """Those that were started."""
    started = list[Training]()

    def popen(command: list[str], **options: Any) -> Training:
        started.append(Training(command, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


def save_store(folder: Path) -> None:
    """Write a store that is too small to learn from."""
    store = VectorStore(DIM, encoder="enc")
    store.add(units(5), range(1, 6))
    store_files.save(store, folder / STORE)


def trained(
    refresh: DecoderRefresh, trainings: list[Training], inserted: int, trained_on: int, status: int = 0
) -> bool:
    """Whether a training was due then; it ends at once."""
    before = len(trainings)
    refresh.start_if_due(inserted, trained_on)
    if len(trainings) == before:
        return False
    trainings[-1].returncode = status
    assert refresh.finished() == (status == 0)
    return True


def test_a_decoder_is_trained_first_at_two_hundred_entries_then_when_there_is_half_as_much_again(
    tmp_path: Path, trainings: list[Training]
) -> None:
    refresh = DecoderRefresh(tmp_path, seed=0)
    decoder, at = 0, list[int]()
    for inserted in range(0, 80_001, 50):
        if trained(refresh, trainings, inserted, decoder):
            at.append(inserted)
            decoder = inserted
    assert at[:5] == [200, 300, 450, 700, 1050]
    assert {later - earlier for earlier, later in itertools.pairwise(at) if earlier > 20_000} == {10_000}


def test_a_training_that_gave_nothing_is_tried_again_with_more_not_at_every_save(
    tmp_path: Path, trainings: list[Training], caplog: pytest.LogCaptureFixture
) -> None:
    refresh = DecoderRefresh(tmp_path, seed=0)
    at = [n for n in range(150, 1000, 10) if trained(refresh, trainings, n, 0, NOT_BETTER)]
    assert at == [200, 300, 450, 680]
    assert not caplog.records, "too little to learn from is nothing to warn of"


def test_a_decoder_that_was_loaded_counts_as_trained(tmp_path: Path, trainings: list[Training]) -> None:
    refresh = DecoderRefresh(tmp_path, seed=0)
    assert not trained(refresh, trainings, FIRST_AT, 190)
    assert trained(refresh, trainings, FIRST_AT + 100, 190)


def test_one_training_runs_at_a_time_with_the_folder_and_the_seed(tmp_path: Path, trainings: list[Training]) -> None:
    refresh = DecoderRefresh(tmp_path, seed=7)
    for inserted in (200, 400, 4000):
        refresh.start_if_due(inserted, 0)
        assert not refresh.finished()
    (training,) = trainings
    assert training.command[1:] == ["-m", "vllm_ext.prediction.refresh", str(tmp_path), "--seed", "7"]
    assert training.options == {"stdin": subprocess.DEVNULL}, "our input is the line to the front end"


def test_the_end_of_a_training_is_told_once(tmp_path: Path, trainings: list[Training]) -> None:
    refresh = DecoderRefresh(tmp_path, seed=0)
    assert not refresh.finished()
    refresh.start_if_due(200, 0)
    trainings[0].returncode = 0
    assert [refresh.finished() for _ in range(3)] == [True, False, False]


def test_trainings_that_fail_are_warned_of_once(
    tmp_path: Path, trainings: list[Training], caplog: pytest.LogCaptureFixture
) -> None:
    refresh = DecoderRefresh(tmp_path, seed=0)
    for inserted in (200, 1000, 5000):
        assert trained(refresh, trainings, inserted, 0, -9)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "ended with status -9" in record.message


def test_a_training_that_cannot_be_started_is_warned_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def popen(*args: object, **options: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", popen)
    refresh = DecoderRefresh(tmp_path, seed=0)
    for inserted in (200, 1000, 5000):
        refresh.start_if_due(inserted, 0)
        assert not refresh.finished()
    assert len(caplog.records) == 1
    assert "can't be started" in caplog.text


def test_a_training_that_runs_is_stopped(tmp_path: Path, trainings: list[Training]) -> None:
    refresh = DecoderRefresh(tmp_path, seed=0)
    refresh.stop()
    refresh.start_if_due(200, 0)
    refresh.stop()
    refresh.stop()
    assert trainings[0].calls == ["kill", "wait"]
    assert not refresh.finished()


def test_a_real_training_on_too_little_ends_without_a_decoder_and_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """That one writes a decoder is shown where `refresh` itself is tested."""
    save_store(tmp_path)
    refresh = DecoderRefresh(tmp_path, seed=0)
    refresh.start_if_due(FIRST_AT, 0)
    process = refresh._process
    assert process is not None
    until(lambda: process.poll() is not None, "its end")
    assert process.returncode == NOT_BETTER
    assert not refresh.finished()
    assert not caplog.records


def test_a_real_training_is_killed_when_it_is_stopped(tmp_path: Path) -> None:
    save_store(tmp_path)
    refresh = DecoderRefresh(tmp_path, seed=0)
    refresh.start_if_due(FIRST_AT, 0)
    process = refresh._process
    assert process is not None
    refresh.stop()
    assert process.returncode == -signal.SIGKILL


def test_the_status_that_says_no_better_is_the_one_of_the_training() -> None:
    from vllm_ext.prediction import refresh

    assert refresh.NOT_BETTER == refreshing.NOT_BETTER
