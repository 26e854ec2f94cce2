"""The thread beside the one that predicts: loads, tries again where that may help, teaches, and lets go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from vllm_ext.prediction.predictor import FinishedPrompt
from vllm_ext.predictor import learner as module
from vllm_ext.predictor.learner import Learner
from vllm_ext.predictor.messages import Finished
from vllm_ext.predictor.request_batcher import Errors

from .fake_predictors import NoHub, Obedient, OddStatus, Raising
from .parts import noted, prompt, until

Make = Callable[[Callable[..., Any]], Learner]


def finished(number: int, text: str = "hello") -> Finished:
    return Finished(number, FinishedPrompt(prompt(text), number, 1.0))


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Starts threads that learn every 10 ms."""
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)
    started = list[Learner]()

    def begin(factory: Callable[..., Any] = Obedient) -> Learner:
        started.append(Learner(lambda: factory(None, tmp_path), lambda: False, Errors()))
        started[-1].start()
        return started[-1]

    yield begin
    for learner in started:
        learner.end()
        learner.join(10)


def test_what_ended_is_learned_and_acknowledged_and_upkeep_goes_on_without(start: Make, tmp_path: Path) -> None:
    learner = start(Obedient)
    for peer in (b"one", b"two"):
        for number in (1, 2, 3):
            learner.put(peer, finished(number))
    until(lambda: learner.learned == 6, "all of them")
    assert learner.taken == {b"one": 3, b"two": 3}
    until(lambda: noted(tmp_path, "upkeep")[-3:] == [0, 0, 0], "upkeep with nothing to learn")
    assert (learner.entries, learner.examples) == (6, 11)
    assert learner.busy_s() < 1000


def test_free_memory_is_given_back_now_and_then(start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = list[int]()
    monkeypatch.setattr(module, "GIVE_BACK_EVERY", 3)
    monkeypatch.setattr(module.free_memory, "give_back", lambda: turns.append(len(noted(tmp_path, "upkeep"))))
    start(Obedient)
    until(lambda: len(turns) >= 3, "it to be given back three times")
    assert turns[:3] == [1, 4, 7], "first after the model was loaded"


def test_at_the_end_what_came_last_is_learned_before_the_predictor_is_closed(
    start: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY_S", 3600)
    learner = start(Obedient)
    until(lambda: learner.predictor, "the predictor")
    learner.put(b"peer", finished(1))
    learner.end()
    learner.join()
    assert noted(tmp_path, "closed") == [1]


def test_a_hub_that_is_down_at_the_start_is_tried_again_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    learner, waits = Learner(lambda: NoHub(None, tmp_path), lambda: False, Errors()), list[float]()

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        if learner.predictor is not None:
            learner.end()
        return learner.predictor is not None

    monkeypatch.setattr(learner._end, "wait", wait)
    learner.run()
    assert waits == [1, 2, module.EVERY_S]
    assert caplog.text.count("the hub is down") == 1
    assert noted(tmp_path, "closed") == [0]


def test_the_end_does_not_wait_for_a_hub(start: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 3600)
    learner = start(NoHub)
    learner.end()
    learner.join()
    assert learner.predictor is None


def test_what_cannot_be_learned_is_counted_once_logged_and_learning_goes_on(
    start: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = start(Obedient)
    learner.put(b"peer", finished(1, "learn raises"))
    until(lambda: learner.learned == 1, "the first")
    learner.put(b"peer", finished(2))
    until(lambda: noted(tmp_path, "learned"), "the second")
    until(lambda: learner.taken[b"peer"] == 2, "the note of it")
    assert learner._errors.count == 1
    assert "failed in learn" in caplog.text


@pytest.mark.parametrize("kind", [OddStatus, Raising])
def test_one_that_fails_beside_predicting_is_loaded_all_the_same(start: Make, kind: type[Obedient]) -> None:
    learner = start(kind)
    until(lambda: learner._errors.count >= 3, "errors")
    assert learner.predictor is not None
    assert learner.is_alive()


def test_while_it_loads_or_learns_it_is_busy(start: Make) -> None:
    """By that it is found out if it hangs."""
    loaded, learned = threading.Event(), threading.Event()

    class Held(Obedient):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            loaded.wait()

        def learn(self, finished: Sequence[FinishedPrompt]) -> None:
            learned.wait()

    learner = start(Held)
    for event in (loaded, learned):
        until(lambda: learner.busy_s() > 0.05, "it to be busy")
        event.set()
    until(lambda: learner.busy_s() == 0, "it to rest")


def test_a_prediction_that_hangs_keeps_the_process_neither_from_learning_nor_from_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    monkeypatch.setattr(module, "GRACE_S", 0.01)
    ended = list[int]()
    monkeypatch.setattr(module.os, "_exit", ended.append)
    learner = Learner(lambda: Obedient(None, tmp_path), lambda: bool(noted(tmp_path, "upkeep")), Errors())
    learner.put(b"peer", finished(1))
    learner.start()
    learner.join()
    assert ended == [1]
    assert noted(tmp_path, "closed") == [1]
