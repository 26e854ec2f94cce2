"""The front end's half: each question has one outcome, nobody waits, and what ended is kept until it was learned."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import pytest

from vllm_ext.prediction.predictor import Prompt
from vllm_ext.predictor import client
from vllm_ext.predictor.messages import MAX_BYTES, Answer, Status

from .parts import QUANTILES, Front, prompt, until

Make = Callable[..., Front]


def test_a_prediction_becomes_what_the_scheduler_is_told(connected: Front) -> None:
    connected.ask("a", "b")
    assert connected.service.waiting == 2
    until(lambda: connected.there.asked == ["a", "b"], "the questions")
    connected.clock.now += 0.25
    answer = Answer("b", tuple(range(1, 10)), "blend")
    connected.tell(answer)
    assert connected.answers == [answer]
    assert connected.metrics.counted == {"predicted": 1}
    assert connected.metrics.latencies == pytest.approx([0.3])
    assert connected.service.waiting == 1


@pytest.mark.parametrize("source", ["unknown", "overload", "error"])
def test_a_question_without_a_prediction_is_counted_by_its_reason(connected: Front, source: str) -> None:
    connected.ask("a")
    connected.tell(Answer("a", source=source))
    assert connected.answers == []
    assert connected.metrics.counted == {source: 1}


@pytest.mark.parametrize("quantiles", [(7,) * 8, (0,) * 9, (9, *QUANTILES[1:])])
def test_an_answer_that_is_no_law_is_an_error(connected: Front, quantiles: tuple[int, ...]) -> None:
    connected.ask("a")
    connected.tell(Answer("a", quantiles, "retrieval"))
    assert connected.answers == []
    assert connected.metrics.counted == {"error": 1}


def test_a_request_that_ends_first_is_late_and_its_answer_goes_to_nobody(connected: Front) -> None:
    connected.ask("a", "b")
    connected.service.ended("a", 3)
    connected.service.ended("b", 0, aborted=True)
    connected.tell(
        Answer("a", QUANTILES, "retrieval"), Answer("b", source="unknown"), Answer("nobody's", QUANTILES, "retrieval")
    )
    assert connected.answers == []
    assert connected.metrics.counted == {"late": 2}


def test_a_question_to_nobody_is_not_ready(front: Front) -> None:
    front.ask("a")
    front.pass_s(0.2)
    front.ask("b")
    assert front.metrics.counted == {"not-ready": 2}
    assert not front.service.ready


def test_a_model_that_is_still_loaded_is_asked_but_not_ready(front: Front) -> None:
    front.connect(Status(busy_s=3.0))
    assert not front.service.ready
    assert front.metrics.statuses == []
    front.ask("a")
    until(lambda: front.there.asked, "the question")
    front.tell(Status(ready=True), Answer("a", QUANTILES, "retrieval"))
    assert front.service.ready
    assert front.metrics.counted == {"predicted": 1}


def test_more_questions_than_may_wait_are_refused_here(make_front: Make) -> None:
    front = make_front(queue_limit=3).connect()
    front.ask(*"abcde")
    assert front.metrics.counted == {"overload": 2}
    front.tell(Answer("a", QUANTILES, "retrieval"))
    front.ask("f")
    assert front.metrics.counted == {"overload": 2, "predicted": 1}


@pytest.mark.parametrize("salt", ["\ud800", "x" * MAX_BYTES])
def test_what_no_message_can_hold_is_an_error_and_stops_nothing(connected: Front, salt: str) -> None:
    connected.service.ask("a", Prompt("hello", 5, "m", salt=salt))
    connected.service.ended("a", 3)
    connected.ask("b")
    until(lambda: connected.there.asked == ["b"], "the other question")
    assert connected.metrics.counted == {"error": 1}


def test_malformed_messages_are_ignored_and_counted(connected: Front) -> None:
    connected.ask("a")
    connected.tell(b"", b"\x93\xa6answer", b"garbage", Answer("a", QUANTILES, "retrieval"))
    assert connected.metrics.counted == {"predicted": 1}
    assert connected.metrics.drops["message"] == 3


def test_a_question_waits_for_so_long_and_no_longer_though_the_predictor_lives(connected: Front) -> None:
    """The queue may be long, the model not loaded, or the answer malformed."""
    connected.ask("a")
    for _ in range(29):
        connected.pass_s(1)
        connected.tell(Status(ready=True))
    assert connected.metrics.counted == {}
    connected.pass_s(1)
    connected.tell(Answer("a", QUANTILES, "retrieval"))
    assert connected.metrics.counted == {"expired": 1}
    assert connected.answers == []


# --- batches ----------------------------------------------------------------------------------------------------------


def test_questions_gather_until_the_oldest_is_50_ms_old(connected: Front) -> None:
    for req_id in "ab":
        connected.service.ask(req_id, prompt())
        connected.pass_s(0.02)
    assert connected.service.rest_s() == pytest.approx(0.01)
    connected.tell(Status(ready=True))
    assert connected.there.asked == []
    connected.pass_s(0.011)
    until(lambda: connected.there.asked == ["a", "b"], "both")
    assert connected.service.rest_s() == client.LOOK_S
    connected.service.ask("c", prompt())
    connected.pass_s(0.049)
    connected.tell(Answer("a", QUANTILES, "x"), Answer("b", QUANTILES, "x"))
    assert connected.service.rest_s() == pytest.approx(0.001)
    assert len(connected.there.asked) == 2


def test_a_full_batch_is_sent_at_once_and_the_next_has_its_own_time(make_front: Make) -> None:
    front = make_front(batch_size=2).connect()
    for req_id in "abc":
        front.service.ask(req_id, prompt())
    until(lambda: front.there.asked == ["a", "b"], "a batch")
    front.pass_s(0.049)
    front.tell(Status(ready=True))
    assert front.there.asked == ["a", "b"]
    front.pass_s(0.002)
    until(lambda: front.there.asked == ["a", "b", "c"], "the rest")


def test_a_request_that_ends_before_it_is_asked_for_costs_no_prediction(connected: Front) -> None:
    connected.service.ask("a", prompt())
    connected.service.ended("a", 1)
    connected.ask("b")
    until(lambda: connected.there.asked == ["b"] and connected.there.finished, "the other question, and the end")
    assert connected.metrics.counted == {"late": 1}


def test_a_front_end_that_slept_gives_up_what_it_had_gathered(connected: Front) -> None:
    """Offline, nobody polls between two batches."""
    connected.service.ask("a", prompt())
    connected.pass_s(31)
    assert connected.metrics.counted == {"expired": 1}
    connected.ask("b")
    until(lambda: connected.there.asked == ["b"], "the next question")


def test_nothing_is_to_be_looked_for_where_nothing_is_owed(connected: Front) -> None:
    assert connected.service.rest_s() == math.inf
    connected.ask("a")
    connected.tell(Answer("a", source="unknown"))
    assert connected.service.rest_s() == math.inf


# --- what ended -------------------------------------------------------------------------------------------------------


def test_what_ended_is_told_whole_with_what_was_predicted(connected: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.time, "time", lambda: 1e9)
    connected.ask("a", "b")
    connected.tell(Answer("a", (1, 2, 3, 4, 5, 6, 7, 8, 9), "retrieval"))
    connected.service.ended("a", 12)
    connected.service.ended("b", 5, aborted=True)
    connected.service.ended("never asked", 5)
    until(lambda: len(connected.there.finished) == 2, "both")
    first, second = connected.there.finished
    assert (first.number, first.p50, first.p90) == (1, 4, 7)
    assert first.done == (prompt("text of a"), 12, 1e9, False)
    assert (second.number, second.p50, second.p90) == (2, 0, 0)
    assert second.done == (prompt("text of b"), 5, 1e9, True)


def test_a_request_that_was_aborted_before_its_first_token_teaches_nothing(connected: Front) -> None:
    connected.ask("a", "b")
    connected.service.ended("a", 0, aborted=True)
    connected.service.ended("b", 1, aborted=True)
    until(lambda: connected.there.finished, "what ended")
    assert [message.done.tokens for message in connected.there.finished] == [1]


def test_what_ends_while_nobody_is_there_is_learned_later(front: Front) -> None:
    front.ask("a", "b")
    front.service.ended("a", 3)
    front.connect()
    front.service.ended("b", 4)
    until(lambda: len(front.there.finished) == 2, "both")
    assert [message.done.tokens for message in front.there.finished] == [3, 4]
    assert not +front.metrics.drops


def test_what_was_not_acknowledged_is_sent_to_the_next_predictor(connected: Front) -> None:
    for number in range(1, 5):
        connected.ask(f"r{number}")
        connected.service.ended(f"r{number}", number)
    until(lambda: len(connected.there.finished) == 4, "all")
    connected.tell(Status(ready=True, taken=2))
    connected.lose()
    connected.ask("r5")
    connected.service.ended("r5", 5)
    connected.connect()
    until(lambda: len(connected.there.finished) == 3, "the others")
    assert [message.number for message in connected.there.finished] == [3, 4, 5]
    assert not +connected.metrics.drops


def test_what_two_predictors_took_along_is_not_sent_to_a_third(
    connected: Front, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be what they died of."""
    connected.ask("a", "b", "c")
    connected.service.ended("a", 1)
    until(lambda: connected.there.finished, "it")
    connected.lose()
    connected.connect()
    connected.service.ended("b", 2)
    until(lambda: len(connected.there.finished) == 2, "it again, and the next")
    connected.lose()
    connected.connect()
    connected.service.ended("c", 3)
    until(lambda: len(connected.there.finished) == 2, "what followed")
    assert [message.done.tokens for message in connected.there.finished] == [2, 3]
    assert connected.metrics.drops["finished"] == 1
    assert caplog.text.count("finished requests are not learned") == 1


def test_what_there_is_no_room_for_is_dropped_counted_and_warned_of_once(
    front: Front, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "MOST_KEPT", 3)
    for number in range(5):
        front.ask(f"r{number}")
        front.service.ended(f"r{number}", number + 1)
    assert front.metrics.drops == {"finished": 2}
    assert caplog.text.count("finished requests are not learned") == 1
    front.connect()
    until(lambda: len(front.there.finished) == 3, "the newest")
    assert [message.done.tokens for message in front.there.finished] == [3, 4, 5]


def test_beyond_the_bound_of_requests_the_oldest_are_let_go(connected: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MOST_OPEN", 2)
    connected.ask("a", "b", "c")
    connected.service.ended("a", 3)
    assert connected.metrics.counted == {"late": 1}
    assert connected.metrics.drops == {"message": 0, "finished": 1}


def test_a_socket_that_takes_no_more_loses_nothing_that_ended(
    make_front: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A predictor that stands still: the high-water mark is reached, and what is beyond it waits here."""
    monkeypatch.setattr(client, "MOST_KEPT", 5000)
    front = make_front(queue_limit=1, batch_size=1).connect()
    count = 4000
    for number in range(count):
        front.service.ask(f"r{number}", prompt("x" * 1000))
        front.service.ended(f"r{number}", number + 1)
    assert front.metrics.outcomes["overload"] > count / 4
    assert not +front.metrics.drops
    until(lambda: front.pass_s(0) and len(front.there.finished) == count, "all of them")
    assert [message.done.tokens for message in front.there.finished] == list(range(1, count + 1))


# --- the end, and forks -----------------------------------------------------------------------------------------------


def test_a_closed_client_asks_nothing_and_starts_nothing(connected: Front) -> None:
    connected.ask("a", "b")
    connected.service.ended("b", 3)
    for _ in range(2):
        connected.service.close()
    connected.ask("c")
    connected.service.ended("c", 3)
    connected.clock.now += 10
    assert connected.service.poll() == []
    assert connected.process.calls == ["close"]
    assert not connected.service.ready
    assert connected.metrics.counted == {"late": 1, "lost": 1, "not-ready": 1}
    until(lambda: len(connected.there.finished) == 1, "what ended before")


def test_what_was_never_sent_is_counted_at_the_end(front: Front) -> None:
    front.ask("a")
    front.service.ended("a", 3)
    front.service.close()
    assert front.metrics.drops == {"finished": 1}


def test_a_forked_process_has_a_context_of_its_own_and_ends_nothing_of_its_parents(connected: Front) -> None:
    """A ZeroMQ context that is used across a fork aborts the process or takes the parent's messages."""
    connected.ask("a")
    until(lambda: connected.there.asked == ["a"], "the question")
    child = os.fork()
    if child == 0:
        ended = 1
        try:
            connected.service.ended("a", 3)  # which is the parent's request
            until(lambda: connected.ask("of the child") or connected.service.waiting, "a connection of its own")
            calls = list(connected.process.calls)
            connected.service.close()
            ended = 0 if calls == connected.process.calls == [] else 2
        finally:
            os._exit(ended)
    assert os.waitpid(child, 0)[1] == 0
    connected.tell(Answer("a", QUANTILES, "retrieval"))
    assert connected.metrics.counted == {"predicted": 1}
    connected.ask("b")
    until(lambda: connected.there.asked == ["a", "b"], "the next question")
