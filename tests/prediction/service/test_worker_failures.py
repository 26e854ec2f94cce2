"""The predictor's process where its predictor hangs, crashes, fails beside predicting, or can't be made at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from vllm_ext.prediction.service.messages import Failed, Finished
from vllm_ext.prediction.service.worker_options import CANNOT_START

from .parts import until
from .worker_parts import WorkerProcess

Start = Callable[..., WorkerProcess]


def factory(name: str) -> str:
    return f"fake_predictors:{name}"


@pytest.mark.parametrize("kind", ["OddStatus", "RaisingStatus"])
def test_a_predictor_that_cannot_say_how_it_is_predicts_and_learns_all_the_same(start: Start, kind: str) -> None:
    worker = start(factory=factory(kind))
    front = worker.connect().ready()
    front.ask("a")
    assert front.answer_to("a").source == "retrieval"
    front.send(Finished("a", 3))
    until(lambda: worker.noted("learned"), "what finished to be learned")
    until(lambda: front.status and front.status.errors > 1 and front.status.learned == 1, "further statuses")
    worker.end_input()
    assert worker.ended() == 0
    assert worker.noted("saved") == [1]


def test_what_cannot_be_learned_or_saved_is_counted_and_predictions_go_on(start: Start) -> None:
    worker = start(factory=factory("RaisingSave"), patch="worker._SAVE_S = 0.01")
    front = worker.connect().ready()
    front.ask("a", "learn raises")
    front.answer_to("a")
    front.send(Finished("a", 3))
    until(lambda: front.status and front.status.errors >= 2, "the errors to be counted")
    front.ask("b")
    assert front.answer_to("b").source == "retrieval"
    worker.end_input()
    assert worker.ended() == 0
    assert worker.log.count("Traceback") == 1


def test_learning_that_hangs_stops_no_prediction_and_not_the_end(start: Start) -> None:
    worker = start(patch="worker._LAST_S = 0.2")
    front = worker.connect().ready()
    front.ask("a", "learn hangs")
    front.answer_to("a")
    front.send(Finished("a", 3))
    until(lambda: front.status and front.status.judged == 0, "a status")
    for i in range(10):
        front.ask(f"r{i}")
        assert front.answer_to(f"r{i}").source == "retrieval"
        front.send(Finished(f"r{i}", 3))
    worker.end_input()
    assert worker.ended() == 0


def test_a_prediction_that_hangs_does_not_keep_the_process_from_saving_and_ending(start: Start) -> None:
    worker = start(batch_size=1)
    front = worker.connect().ready()
    front.ask("a")
    front.answer_to("a")
    front.send(Finished("a", 3))
    front.ask("b", "hang")
    until(lambda: len(worker.noted("asked")) == 2, "it to hang")
    worker.end_input()
    assert worker.ended() == 0
    assert worker.noted("saved") == [1]


@pytest.mark.parametrize(("text", "status"), [("exit", 3), ("kill", -9)])
def test_a_predictor_that_takes_its_process_along_breaks_the_connection(start: Start, text: str, status: int) -> None:
    worker = start()
    front = worker.connect().ready()
    front.ask("a", text)
    assert worker.ended() == status
    until(front.broken, "the end of the connection")
    assert front.told == [], "whose question it was counts it"


def test_a_predictor_that_ends_the_interpreter_ends_the_process(start: Start) -> None:
    worker = start()
    front = worker.connect().ready()
    front.ask("a", "sys.exit")
    assert worker.ended() != 0


def test_a_broken_task_ends_the_process_after_saving_so_that_it_is_started_again(start: Start) -> None:
    """With the task that predicts gone, the process once went on, and answered nothing any more."""
    worker = start(patch="work.Desk.answers = lambda *args: 1 / 0")
    front = worker.connect().ready()
    front.ask("a")
    assert worker.ended() == 1
    assert "ZeroDivisionError" in worker.log
    assert worker.noted("saved") == [0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing_package", "ModuleNotFoundError: No module named 'sentence_transformers'"),
        ("wrong_option", "ValueError: model='?xxx"),
        ("no_such_name", "AttributeError: module 'fake_predictors' has no attribute 'no_such_name'"),
    ],
)
def test_a_predictor_that_cannot_be_made_is_told_to_the_front_end_and_given_up(
    start: Start, name: str, reason: str
) -> None:
    worker = start(factory=factory(name))
    front = worker.connect()
    assert worker.ended() == CANNOT_START
    (failed,) = front.listen()
    assert isinstance(failed, Failed)
    assert failed.reason.startswith(reason)
    assert len(failed.reason) <= 2000
    assert "can't start" not in worker.log, "the front end tells it"


def test_a_module_that_is_not_there_is_told_as_well(start: Start) -> None:
    worker = start(factory="no_such_module:Predictor")
    front = worker.connect()
    assert worker.ended() == CANNOT_START
    assert front.listen() == [Failed("ModuleNotFoundError: No module named 'no_such_module'")]


def test_why_it_cannot_start_is_logged_where_no_front_end_comes(start: Start) -> None:
    worker = start(factory=factory("missing_package"), patch="worker._LISTENER_S = 0.1")
    assert worker.ended() == CANNOT_START
    assert worker.log.count("can't start: ModuleNotFoundError: No module named 'sentence_transformers'") == 1


def test_a_start_that_fails_for_another_reason_may_be_tried_again(start: Start) -> None:
    worker = start(factory=factory("CrashingStart"))
    assert worker.ended() == 1
    assert "RuntimeError: this time" in worker.log


def test_a_place_where_no_socket_can_be_is_a_reason_to_give_up(start: Start) -> None:
    """As a path too long for one, with a TMPDIR that is deep: it was once started again for ever."""
    worker = start(name="n" * 200)
    assert worker.ended() == CANNOT_START
    assert worker.log.count("can't listen") == 1
    assert "Traceback" not in worker.log
