"""The front end's half where the predictor goes, hangs or can't start: it finds out, warns once, and goes on."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from vllm_ext.prediction.service.messages import Failed, Status, Told

from .parts import LIMIT_S, Front


def test_questions_are_lost_with_the_connection_and_the_next_one_is_made_by_itself(
    connected: Front, caplog: pytest.LogCaptureFixture
) -> None:
    connected.ask("a", "b", "c")
    connected.service.gone("c")
    assert len(connected.there.heard()) == 4
    connected.there.say(Told("a", 7, 9, "retrieval"))
    connected.there.hang_up()
    assert [hint.req_id for hint in connected.service.poll()] == ["a"]
    connected.stop_listening()
    connected.pass_s(0.2)
    assert connected.metrics.counted == {"predicted": 1, "lost": 1, "late": 1}
    assert not connected.service.ready
    assert connected.metrics.statuses[-1] is None
    connected.ask("d")
    assert connected.metrics.outcomes["not-ready"] == 1
    connected.listen()
    connected.pass_s(1)
    connected.ask("e")
    assert [question.req_id for question in connected.there.heard()] == ["e"]
    assert len(caplog.records) == 1
    assert "the length predictor hung up; requests without a prediction" in caplog.text


def test_a_question_to_a_predictor_that_just_went_is_lost_and_closes_nothing(connected: Front) -> None:
    """Closed by `ask`, the descriptor's number went to the next client while the event loop still watched it."""
    link = connected.service.link
    assert link is not None
    connected.there.say(Failed("no faiss"))
    connected.there.hang_up()
    connected.ask("a", "b")
    connected.service.finished("a", 3)
    assert connected.metrics.counted == {"lost": 2}
    assert connected.service.link is link
    assert link.fileno() >= 0
    connected.stop_listening()
    for _ in range(2):
        connected.service.poll()
    assert not connected.service.ready
    assert link.fileno() == -1
    assert connected.metrics.counted == {"lost": 2}


def test_why_a_predictor_cannot_start_is_told_once(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    worker = front.listen()
    front.service.poll()
    front.ask("a")
    worker.say(Failed("ModuleNotFoundError: No module named 'faiss'"))
    worker.close()
    front.ask("b")  # before the last words were read
    for _ in range(5):
        front.pass_s(1)
        assert front.process is not None
        front.process.given_up = True
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "can't start: ModuleNotFoundError: No module named 'faiss'" in record.message
    assert sum(front.metrics.counted.values()) == 2


@pytest.mark.parametrize("given_up", [True, False])
def test_a_process_that_ends_before_it_is_reached_is_warned_of_once(
    front: Front, caplog: pytest.LogCaptureFixture, given_up: bool
) -> None:
    assert front.process is not None
    front.service.poll()
    assert not caplog.records
    front.process.given_up, front.process.starts = given_up, 2
    for _ in range(5):
        front.pass_s(1)
    assert len(caplog.records) == 1
    assert ("can't start" if given_up else "ended") in caplog.text
    assert front.metrics.started == 2


def test_errors_of_the_predictor_are_warned_of_once(connected: Front, caplog: pytest.LogCaptureFixture) -> None:
    for errors in (0, 1, 2, 3):
        connected.there.say(Status(errors=errors))
        connected.service.poll()
    connected.there.hang_up()
    connected.service.poll()
    assert ["raises errors" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("garbage", [b"\x05\0\0\0hello", b"\xff\xff\xff\xff", b"\x08\0\0\0\x92\xa4told\xa1\xff"])
def test_garbage_from_the_socket_is_a_connection_lost(connected: Front, garbage: bytes) -> None:
    connected.ask("a")
    connected.there.connection.sendall(garbage)
    for _ in range(2):
        connected.service.poll()
    assert connected.metrics.counted == {"lost": 1}


def test_a_predictor_that_owes_an_answer_for_too_long_is_killed(
    connected: Front, caplog: pytest.LogCaptureFixture
) -> None:
    connected.ask("a")
    connected.pass_s(LIMIT_S)
    assert connected.calls == []
    connected.ask("b")
    connected.pass_s(0.1)
    assert connected.calls == ["kill"]
    assert connected.metrics.counted == {"timeout": 2}
    assert "has not answered for 35 s" in caplog.text


def test_one_that_says_how_it_is_but_predicts_nothing_is_killed(connected: Front) -> None:
    """The process tells its status from another thread than the one that hangs; each once counted as a sign of life."""
    connected.ask("a")
    for second in range(LIMIT_S + 1):
        connected.there.say(Status(entries=3, waiting=second))
        connected.pass_s(1)
    assert connected.calls == ["kill"]
    assert connected.metrics.counted == {"timeout": 1}


def test_one_that_hangs_is_found_out_by_requests_that_end_soon(connected: Front) -> None:
    """Requests that ended were once owed nothing: with none that lasts, a predictor could hang for ever."""
    for i in range(LIMIT_S):
        connected.ask(f"r{i}")
        connected.pass_s(1)
        connected.service.finished(f"r{i}", 3)
    connected.pass_s(1)
    assert connected.calls == ["kill"]
    assert connected.metrics.counted == {"late": LIMIT_S}


def test_one_that_only_refuses_is_killed(connected: Front) -> None:
    """Its event loop refuses what its queue has no room for; its predictor may hang all the same."""
    connected.ask("a")
    for i in range(LIMIT_S + 1):
        connected.ask(f"r{i}")
        connected.there.say(Told(f"r{i}", source="overload"))
        connected.pass_s(1)
    assert connected.calls == ["kill"]
    assert connected.metrics.counted == {"overload": LIMIT_S + 1, "timeout": 1}


def test_one_that_is_slow_is_waited_for(connected: Front) -> None:
    connected.ask(*(f"r{i}" for i in range(10)))
    for i in range(10):
        connected.pass_s(LIMIT_S - 1)
        connected.there.say(Told(f"r{i}", 7, 9, "retrieval"))
        assert len(connected.service.poll()) == 1
    assert "kill" not in connected.calls
    assert connected.metrics.counted == {"predicted": 10}


def test_one_that_answers_others_is_waited_for(connected: Front) -> None:
    """Several front ends share it; each hears of the others' answers by the status."""
    connected.ask("a")
    for second in range(3 * LIMIT_S):
        connected.there.say(Status(answered=second // 20))
        connected.pass_s(1)
    assert "kill" not in connected.calls
    assert connected.service.waiting == 1


def test_one_that_owes_nothing_may_be_silent(connected: Front) -> None:
    connected.ask("a")
    connected.there.say(Told("a", source="unknown"))
    for _ in range(3):
        connected.pass_s(1000)
    assert "kill" not in connected.calls
    connected.ask("b")
    connected.pass_s(LIMIT_S)
    assert "kill" not in connected.calls


def test_answers_that_lie_in_the_socket_of_a_front_end_that_slept_are_read_first(connected: Front) -> None:
    connected.ask("a")
    connected.there.say(Told("a", 7, 9, "retrieval"))
    assert len(connected.pass_s(1000)) == 1
    assert "kill" not in connected.calls


def test_one_that_loads_its_model_has_longer_but_not_for_ever(front: Front) -> None:
    front.listen()
    front.service.poll()
    front.ask("a")
    front.pass_s(300)
    assert front.calls == []
    front.pass_s(1)
    assert front.calls == ["kill"]
    assert front.metrics.counted == {"timeout": 1}


def test_what_waited_for_the_model_is_given_its_time_when_it_is_loaded(front: Front) -> None:
    worker = front.listen()
    front.service.poll()
    front.ask("a")
    front.pass_s(200)
    worker.say(Status())
    front.pass_s(1)
    front.pass_s(LIMIT_S - 1)
    assert front.calls == []
    front.pass_s(2)
    assert front.calls == ["kill"]


def test_a_front_end_that_does_not_own_the_process_only_connects_anew(short: Path) -> None:
    front = Front(short, owner=False)
    first = front.listen()
    front.service.poll()
    first.say(Status())
    front.service.poll()
    front.ask("a")
    front.pass_s(LIMIT_S + 1)
    assert front.metrics.counted == {"timeout": 1}
    assert front.service.link is not None, "it tries again at once; the owner sees to the process"
    front.service.close()
    first.close()


def test_a_process_works_when_it_predicted_not_when_it_only_runs(connected: Front) -> None:
    """One that is ready and then crashes over every prompt was once started again after a second for ever."""
    worker = connected.there
    connected.ask(*"abcdef")
    worker.say(Status(answered=3), Told("a", source="error"), Told("b", source="expired"), Told("c", source="overload"))
    worker.say(Told("d", source="ended"))
    connected.service.poll()
    assert connected.calls == []
    worker.say(Told("e", 7, 9, "retrieval"))
    connected.service.poll()
    assert connected.calls == ["works"]
    worker.say(Told("f", source="unknown"))
    connected.service.poll()
    assert connected.calls == ["works", "works"]


def test_connecting_is_tried_ten_times_per_second_at_most(front: Front) -> None:
    for _ in range(100):
        front.ask("a")
        front.pass_s(0.01)
    assert front.process is not None
    assert 9 <= front.process.calls.count("ensure") <= 11


def test_a_closed_service_asks_nothing_and_starts_nothing(connected: Front) -> None:
    """A question after the end once started the process again, for nobody."""
    connected.ask("a")
    assert connected.process is not None
    before = connected.process.calls.count("ensure")
    for _ in range(2):
        connected.service.close()
    connected.clock.now += 10
    connected.ask("b")
    connected.service.finished("a", 3)
    assert connected.service.poll() == []
    assert connected.process.calls.count("ensure") == before
    assert connected.calls == ["close", "close"]
    assert connected.service.link is None
    assert not connected.service.ready
    assert connected.metrics.counted == {"late": 1, "not-ready": 1}
