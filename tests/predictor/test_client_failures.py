"""The front end's half where the predictor goes, hangs or can't start: it finds out, warns once, and goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from vllm_ext.predictor.client import BUSY_S
from vllm_ext.predictor.messages import Answer, Ping, Status

from .parts import LIMIT_S, QUANTILES, Front, until


def test_questions_are_lost_with_the_predictor_and_the_next_one_is_found_by_itself(
    connected: Front, caplog: pytest.LogCaptureFixture
) -> None:
    connected.ask("a", "b", "c")
    connected.service.ended("c", 0)
    until(lambda: len(connected.there.asked) == 3, "the questions")
    connected.there.say(Answer("a", QUANTILES, "retrieval"))  # its last words
    until(lambda: connected.readable, "its answer")
    connected.lose()
    assert [answer.req_id for answer in connected.answers] == ["a"]
    assert connected.metrics.counted == {"predicted": 1, "lost": 1, "late": 1}
    assert not connected.service.ready
    connected.ask("d")
    assert connected.metrics.outcomes["not-ready"] == 1
    connected.connect()
    connected.ask("e")
    until(lambda: connected.there.asked == ["e"], "the next question alone")
    assert [record.levelno for record in caplog.records if record.levelno > logging.INFO] == [logging.WARNING]
    assert "the length predictor is gone; requests without a prediction are scheduled" in caplog.text


def test_silence_is_a_hang_and_the_process_is_killed(connected: Front, caplog: pytest.LogCaptureFixture) -> None:
    connected.ask("a")
    connected.pass_s(1)  # a ping
    connected.pass_s(LIMIT_S)
    assert connected.process.calls == []
    connected.ask("b")
    connected.pass_s(0.2)
    assert connected.process.calls == ["kill"]
    assert connected.metrics.counted == {"expired": 1, "timeout": 1}
    assert connected.metrics.statuses[-1] is None
    assert "has not answered for 35 s" in caplog.text


def test_a_hang_is_found_out_though_no_question_is_owed(connected: Front) -> None:
    connected.pass_s(1)
    connected.pass_s(LIMIT_S + 1)
    assert connected.process.calls == ["kill"]


def test_what_lies_in_the_socket_of_a_front_end_that_slept_is_read_first(connected: Front) -> None:
    """Offline nobody polls between two batches, which may be hours apart."""
    connected.pass_s(1)
    connected.there.say(Status(ready=True))
    until(lambda: connected.readable, "its status")
    connected.pass_s(10_000)
    connected.pass_s(LIMIT_S)
    assert connected.process.calls == []


def test_pings_are_sent_once_per_second(connected: Front) -> None:
    before = sum(isinstance(message, Ping) for message in connected.there.hear())
    for _ in range(40):
        connected.pass_s(0.25)
        connected.tell(Status(ready=True))
    assert sum(isinstance(message, Ping) for message in connected.there.hear()) - before == 10


@pytest.mark.parametrize(("ready", "what"), [(True, "learning"), (False, "loading its model")])
def test_one_whose_learner_hangs_is_killed_though_it_answers(
    connected: Front, ready: bool, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    connected.tell(Status(ready=ready, busy_s=BUSY_S))
    connected.pass_s(0.2)
    assert connected.process.calls == []
    connected.tell(Status(ready=ready, busy_s=BUSY_S + 1))
    connected.pass_s(0.2)
    assert connected.process.calls == ["kill"]
    assert f"has been at {what} for 300 s" in caplog.text


def test_one_that_loads_its_model_may_be_silent_for_longer(front: Front) -> None:
    """Importing a large library holds Python's interpreter, and the thread that answers waits for it."""
    front.connect(Status())
    front.pass_s(1)
    front.pass_s(BUSY_S)
    assert front.process.calls == []
    front.pass_s(1)
    assert front.process.calls == ["kill"]


def test_one_that_never_listens_is_killed(front: Front) -> None:
    front.pass_s(0)
    front.pass_s(BUSY_S)
    assert front.process.calls == []
    front.pass_s(1)
    assert front.process.calls == ["kill"]


def test_a_front_end_that_does_not_own_the_process_only_connects_anew(make_front: Callable[..., Front]) -> None:
    front = make_front(owner=False).connect()
    front.ask("a")
    front.pass_s(1)
    front.pass_s(LIMIT_S + 1)
    assert front.metrics.counted == {"timeout": 1}
    assert front.process.calls == []
    front.connect()
    front.ask("b")
    until(lambda: front.there.asked == ["b"], "the next question")


def test_a_process_works_when_it_predicted_not_when_it_only_runs(connected: Front) -> None:
    """One that is ready and then crashes over every prompt was once started again after a second for ever."""
    connected.ask(*"abcd")
    connected.tell(Answer("a", source="error"), Answer("b", source="overload"))
    assert connected.process.calls == []
    connected.tell(Answer("c", QUANTILES, "retrieval"), Answer("d", source="unknown"))
    assert connected.process.calls == ["works", "works"]


@pytest.mark.parametrize(("given_up", "what"), [(True, "can't start, see its log"), (False, "ended and was started")])
def test_a_process_that_ends_before_it_is_reached_is_warned_of_once(
    front: Front, caplog: pytest.LogCaptureFixture, given_up: bool, what: str
) -> None:
    front.pass_s(0)
    assert not caplog.records
    front.process.given_up, front.process.starts = given_up, 2
    for _ in range(5):
        front.pass_s(1)
    assert len(caplog.records) == 1
    assert what in caplog.text
    assert front.metrics.started == 2


def test_errors_of_the_predictor_are_warned_of_once(connected: Front, caplog: pytest.LogCaptureFixture) -> None:
    for errors in (0, 1, 2, 3):
        connected.tell(Status(ready=True, errors=errors))
    connected.lose()
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert ["raises errors" in message for message in warnings] == [True]
