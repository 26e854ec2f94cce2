"""The predictor's desk: each question answered once, whatever is predicted, and what is learned and forgotten."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from vllm_ext.prediction.estimate import Estimate
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt
from vllm_ext.prediction.service.messages import Told, pack

from .desk_parts import ANN, BOB, make_desk, question, served
from .fake_predictors import ODD, Obedient, good


def test_questions_are_answered_in_the_order_in_which_they_came(obedient: Obedient) -> None:
    desk = make_desk()
    for i in range(10):
        assert desk.ask(i % 2, question(f"r{i}"), 0.0) is None
    assert served(desk, obedient) == [(i % 2, Told(f"r{i}", 7, 9, "retrieval")) for i in range(10)]
    assert desk.answered == 10


def test_a_batch_is_as_large_as_configured() -> None:
    desk = make_desk(batch_size=4)
    for i in range(9):
        desk.ask(ANN, question(f"r{i}"), 0.0)
    sizes = list[int]()
    while desk.waiting:
        batch, _ = desk.next_batch(0.0)
        sizes.append(len(batch))
    assert sizes == [4, 4, 1]
    assert desk.next_batch(0.0) == ([], [])


def test_a_full_queue_refuses_at_once_and_keeps_what_it_has(obedient: Obedient) -> None:
    desk = make_desk(queue_limit=3)
    refused = [desk.ask(ANN, question(f"r{i}"), 0.0) for i in range(5)]
    assert refused == [None, None, None, Told("r3", source="overload"), Told("r4", source="overload")]
    assert [told.req_id for _, told in served(desk, obedient)] == ["r0", "r1", "r2"]
    assert desk.ask(ANN, question("r5"), 0.0) is None
    assert desk.answered == 3, "a refusal shows nothing of the predictor"


def test_questions_that_waited_too_long_expire_and_take_no_place_in_a_batch() -> None:
    desk = make_desk(batch_size=2, timeout_s=10.0)
    for i in range(4):
        desk.ask(ANN, question(f"old{i}"), 0.0)
    for i in range(2):
        desk.ask(ANN, question(f"new{i}"), 0.5)
    batch, expired = desk.next_batch(10.25)
    assert [waiting.ask.req_id for waiting in batch] == ["new0", "new1"]
    assert expired == [(ANN, Told(f"old{i}", source="expired")) for i in range(4)]
    assert desk.answered == 4


def test_a_question_is_in_time_up_to_its_last_moment() -> None:
    desk = make_desk(timeout_s=10.0)
    desk.ask(ANN, question("a"), 1.0)
    batch, expired = desk.next_batch(11.0)
    assert (len(batch), expired) == (1, [])


@pytest.mark.parametrize("aborted", [True, False])
def test_a_request_that_ended_while_it_waited_is_answered_but_not_predicted(
    obedient: Obedient, tmp_path: Path, aborted: bool
) -> None:
    """It was once left without an answer, and the front end could not tell it from one that hangs."""
    desk = make_desk()
    desk.ask(ANN, question("a", "of a"), 0.0)
    desk.ask(ANN, question("b", "of b"), 0.0)
    if aborted:
        desk.gone(ANN, "a")
    else:
        desk.finished(ANN, "a", 5)
    assert served(desk, obedient) == [(ANN, Told("a", source="ended")), (ANN, Told("b", 7, 9, "retrieval"))]
    assert "of a" not in (tmp_path / "log.jsonl").read_text()


def test_a_request_that_ends_while_it_is_predicted_is_answered_and_learned(obedient: Obedient) -> None:
    desk = make_desk()
    desk.ask(ANN, question("a"), 0.0)
    batch, _ = desk.next_batch(0.0)
    desk.finished(ANN, "a", 5)
    assert desk.answers(batch, desk.predict(obedient, batch)) == [(ANN, Told("a", 7, 9, "retrieval"))]
    assert [done.tokens for done in desk.take_finished()] == [5]


def test_the_same_id_of_two_front_ends_is_two_requests() -> None:
    desk = make_desk()
    desk.ask(ANN, question("a", "of ann"), 0.0)
    desk.ask(BOB, question("a", "of bob"), 0.0)
    desk.gone(BOB, "a")
    desk.finished(ANN, "a", 3)
    assert [done.prompt.text for done in desk.take_finished()] == ["of ann"]


def test_a_front_end_that_hung_up_is_forgotten_with_its_questions(obedient: Obedient) -> None:
    desk = make_desk(batch_size=2)
    for i in range(3):
        desk.ask(ANN, question(f"a{i}"), 0.0)
        desk.ask(BOB, question(f"b{i}"), 0.0)
    batch, _ = desk.next_batch(0.0)
    desk.hung_up(ANN)
    assert desk.waiting == 2
    in_flight = desk.answers(batch, desk.predict(obedient, batch))
    assert [(peer, told.req_id) for peer, told in in_flight] == [(ANN, "a0"), (BOB, "b0")], "whoever sends drops Ann's"
    assert [told.req_id for _, told in served(desk, obedient)] == ["b1", "b2"]
    desk.finished(ANN, "a0", 5)
    assert desk.take_finished() == []


@pytest.mark.parametrize("text", ["raise", *ODD])
def test_what_is_no_prediction_costs_its_batch_the_prediction_and_is_an_error(
    obedient: Obedient, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    desk = make_desk()
    desk.ask(ANN, question("a"), 0.0)
    desk.ask(BOB, question("b", text), 0.0)
    answers = served(desk, obedient)
    assert answers == [(ANN, Told("a", source="error")), (BOB, Told("b", source="error"))]
    assert desk.errors == 1
    desk.ask(ANN, question("c"), 0.0)
    assert served(desk, obedient) == [(ANN, Told("c", 7, 9, "retrieval"))], "the next batch has its own"
    assert len(caplog.records) == 1


def test_errors_are_counted_but_logged_once(obedient: Obedient, caplog: pytest.LogCaptureFixture) -> None:
    desk = make_desk()
    for i in range(3):
        desk.ask(ANN, question(f"r{i}", "raise"), 0.0)
        served(desk, obedient)
    desk.guarded("learn", lambda: obedient.learn([FinishedPrompt(Prompt("learn raises", 1, ""), 1, 0.0)]))
    assert desk.errors == 4
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "failed in predict" in record.message
    assert record.exc_info is not None


def test_no_prediction_is_an_answer(obedient: Obedient) -> None:
    desk = make_desk()
    desk.ask(ANN, question("a", "unknown"), 0.0)
    desk.ask(ANN, question("b"), 0.0)
    assert served(desk, obedient) == [(ANN, Told("a", source="unknown")), (ANN, Told("b", 7, 9, "retrieval"))]
    assert desk.errors == 0


class Fractional(Obedient):
    """Numbers of other types, which a message could not hold."""

    def predict(self, prompts: Sequence[Prompt]) -> list[Estimate | None]:
        return [good(tokens=np.float64(7.9), p90=np.int64(9)) for _ in prompts]


class Named(Obedient):
    def predict(self, prompts: Sequence[Prompt]) -> list[Estimate | None]:
        return [good(source="stars") for _ in prompts]


def test_another_predictor_may_go_by_a_name_of_its_own(tmp_path: Path) -> None:
    desk = make_desk()
    desk.ask(ANN, question("a"), 0.0)
    assert served(desk, Named(None, tmp_path)) == [(ANN, Told("a", 7, 9, "stars"))]


def test_numbers_of_other_types_are_told_as_whole_tokens(tmp_path: Path) -> None:
    desk = make_desk()
    desk.ask(ANN, question("a"), 0.0)
    ((_, told),) = served(desk, Fractional(None, tmp_path))
    assert told == Told("a", 7, 9, "retrieval")
    assert pack(told)


def test_an_answer_can_always_be_sent(obedient: Obedient) -> None:
    """Lengths beyond 64 bits, or a source of broken Unicode, would end the task that sends."""
    desk = make_desk(batch_size=1)
    for i, text in enumerate([*ODD, "raise", "unknown", "hello"]):
        desk.ask(ANN, question(f"r{i}", text), 0.0)
    answers = served(desk, obedient)
    assert len(answers) == len(ODD) + 3
    assert all(pack(told) for _, told in answers)
