"""The front end's half: asks without waiting, and counts what came of each question once."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext.prediction.service.client import LateHint
from vllm_ext.prediction.service.messages import Ask, Finished, Gone, Status, Told

from .parts import Front


def test_a_prediction_becomes_a_hint(connected: Front) -> None:
    connected.ask("a")
    assert connected.there.heard() == [Ask("a", "text of a", 50, "m", 4)]
    assert connected.service.waiting == 1
    connected.there.say(Told("a", 7, 9, "retrieval"))
    assert connected.pass_s(0.25) == [LateHint("a", 7, 9, "retrieval")]
    assert connected.service.poll() == []
    assert connected.metrics.counted == {"predicted": 1}
    assert connected.metrics.latencies == [0.25]
    assert connected.service.waiting == 0


@pytest.mark.parametrize("source", ["unknown", "expired", "overload", "error"])
def test_an_answer_without_a_prediction_is_counted_by_its_reason_and_hints_nothing(
    connected: Front, source: str
) -> None:
    connected.ask("a")
    connected.there.say(Told("a", source=source))
    assert connected.service.poll() == []
    assert connected.metrics.counted == {source: 1}
    assert connected.metrics.latencies == []
    assert connected.service.waiting == 0


@pytest.mark.parametrize(("tokens", "p90"), [(0, 9), (-1, 9), (9, 7), (5, 0)])
def test_a_hint_is_never_made_of_what_is_no_length(connected: Front, tokens: int, p90: int) -> None:
    connected.ask("a")
    connected.there.say(Told("a", tokens, p90, "retrieval"))
    assert connected.service.poll() == []
    assert sum(connected.metrics.counted.values()) == 1


def test_a_second_answer_and_one_to_a_question_never_asked_are_nothing(connected: Front) -> None:
    connected.ask("a")
    told = Told("a", 7, 9, "retrieval")
    connected.there.say(told, told, Told("stranger", 7, 9, "retrieval"))
    assert len(connected.service.poll()) == 1
    assert connected.metrics.counted == {"predicted": 1}


def test_a_request_that_ends_before_its_prediction_is_counted_as_late_and_is_learned(connected: Front) -> None:
    connected.ask("a", "b")
    connected.service.finished("a", 12)
    connected.service.gone("b")
    assert connected.there.heard()[2:] == [Finished("a", 12), Gone("b")]
    assert connected.metrics.counted == {"late": 2}
    connected.there.say(Told("a", 7, 9, "retrieval"), Told("b", source="ended"))
    assert connected.service.poll() == []
    assert connected.metrics.counted == {"late": 2}
    connected.service.gone("a")
    assert connected.metrics.counted == {"late": 2}


def test_the_end_of_a_predicted_request_is_told_and_counts_nothing_more(connected: Front) -> None:
    connected.ask("a")
    connected.there.say(Told("a", 7, 9, "retrieval"))
    connected.service.poll()
    connected.service.finished("a", 8)
    assert connected.there.heard()[-1] == Finished("a", 8)
    assert connected.metrics.counted == {"predicted": 1}


def test_without_a_predictor_questions_are_counted_as_not_ready(front: Front) -> None:
    front.ask("a", "b")
    front.service.finished("a", 5)
    assert front.service.poll() == []
    assert front.metrics.counted == {"not-ready": 2}
    assert not front.service.ready


def test_what_is_asked_while_the_model_is_loaded_waits_for_it(front: Front) -> None:
    worker = front.listen()
    front.ask("a")
    front.pass_s(100)
    assert front.service.waiting == 1
    worker.say(Status(), Told("a", 7, 9, "retrieval"))
    assert front.pass_s(100) == [LateHint("a", 7, 9, "retrieval")]
    assert front.metrics.counted == {"predicted": 1}
    assert "kill" not in front.calls


def test_more_questions_than_the_limit_are_counted_as_overload_and_room_comes_back(short: Path) -> None:
    front = Front(short, queue_limit=3)
    worker = front.listen()
    front.service.poll()
    front.ask(*"abcde")
    assert front.metrics.counted == {"overload": 2}
    assert len(worker.heard()) == 3
    worker.say(Told("b", 7, 9, "retrieval"))
    front.service.poll()
    front.ask("f")
    assert [question.req_id for question in worker.heard()] == ["f"]
    assert front.metrics.counted == {"overload": 2, "predicted": 1}


def test_questions_whose_requests_ended_still_count_towards_the_limit(short: Path) -> None:
    """They wait in the predictor's queue until it comes to them."""
    front = Front(short, queue_limit=2)
    worker = front.listen()
    front.service.poll()
    front.ask("a", "b")
    front.service.gone("a")
    front.ask("c")
    assert front.metrics.counted == {"late": 1, "overload": 1}
    worker.say(Told("a", source="ended"))
    front.service.poll()
    front.ask("d")
    assert front.service.waiting == 2


def test_a_socket_that_takes_no_more_is_overload_as_well(short: Path) -> None:
    front = Front(short, queue_limit=1000)
    worker = front.listen()
    front.service.poll()
    front.service.ask("a", "x" * 500_000, 1, "m")
    for i in range(1010):
        front.service.finished(f"f{i}", 1)  # kept for later, but not without a bound
    front.ask("b")
    assert front.metrics.counted == {"overload": 1}
    heard = list[str]()
    for _ in range(100):
        heard += [question.req_id for question in worker.heard()]
        front.service.poll()
    assert heard == ["a", *(f"f{i}" for i in range(999))]


def test_a_question_that_no_frame_can_hold_is_an_error_and_the_next_one_is_asked(connected: Front) -> None:
    connected.service.ask("a", "\ud800", 1, "m")
    connected.service.ask("b", "x" * (1 << 20), 1, "m")
    connected.service.finished("\ud800", 3)
    connected.ask("c")
    assert connected.metrics.counted == {"error": 2}
    assert [question.req_id for question in connected.there.heard()] == ["c"]
    assert connected.service.ready
