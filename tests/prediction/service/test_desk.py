"""The predictor's queue: batches at the right time by a clock that is handed in, and one answer for each question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from vllm_ext.prediction.predictor import Prompt
from vllm_ext.prediction.service.desk import Desk, Errors, Waiting, answers
from vllm_ext.prediction.service.messages import Answer, Ask

from .fake_predictors import GOOD, ODD, Obedient
from .parts import LAW, prompt


class Queue:
    """A desk with questions a, b, c ... and a clock in milliseconds."""

    def __init__(self, **options: Any) -> None:
        self.desk = Desk(**{"queue_limit": 10, "batch_size": 4, "timeout_s": 1.0, **options})

    def ask(self, names: str, at_ms: float) -> list[Answer | None]:
        return [self.desk.ask(b"peer", Ask(name, prompt()), at_ms / 1e3) for name in names]

    def due_ms(self, at_ms: float) -> float:
        due = self.desk.due_s(at_ms / 1e3) * 1e3
        return due if due == math.inf else round(due, 6)

    def batch(self, at_ms: float) -> str:
        return "".join(waiting.ask.req_id for waiting in self.desk.batch(at_ms / 1e3))


def test_questions_gather_until_the_oldest_is_50_ms_old() -> None:
    queue = Queue()
    assert queue.due_ms(0) == math.inf
    queue.ask("a", 0)
    queue.ask("b", 20)
    assert (queue.due_ms(20), queue.batch(20)) == (30, "")
    assert queue.batch(49) == ""
    assert (queue.batch(50), queue.due_ms(50)) == ("ab", math.inf)


def test_those_that_came_while_a_batch_was_predicted_are_not_kept_waiting_again() -> None:
    queue = Queue()
    queue.ask("a", 0)
    queue.ask("b", 60)
    assert queue.batch(120) == "ab"
    queue.ask("cd", 130)
    assert queue.due_ms(200) == 0


def test_a_full_batch_is_predicted_at_once_and_the_rest_has_its_own_time() -> None:
    queue = Queue()
    queue.ask("abc", 0)
    assert queue.batch(2) == ""
    queue.ask("def", 3)
    assert queue.batch(3) == "abcd"
    assert (queue.batch(3), queue.due_ms(3)) == ("", 50)
    assert queue.batch(54) == "ef"


def test_what_has_no_room_is_refused() -> None:
    queue = Queue(queue_limit=2)
    assert queue.ask("abc", 0) == [None, None, Answer("c", source="overload")]
    queue.batch(50)
    assert queue.ask("d", 51) == [None]


def test_what_waited_for_too_long_is_let_go_and_makes_room() -> None:
    """As while the model is loaded: who asked has given it up."""
    queue = Queue(timeout_s=1.0, queue_limit=3)
    queue.ask("ab", 0)
    queue.ask("c", 500)
    assert queue.ask("d", 1000) == [Answer("d", source="overload")]
    assert queue.ask("de", 1001) == [None, None]
    assert queue.batch(1001) == "cde"


def batch(*texts: str) -> list[Waiting]:
    return [Waiting(b"peer", Ask(text, prompt(text)), 0.0) for text in texts]


def test_each_question_has_its_answer(obedient: Obedient) -> None:
    errors = Errors()
    assert answers(obedient, batch("a", "unknown", "b"), errors) == [
        Answer("a", LAW, "retrieval"), Answer("unknown", source="unknown"), Answer("b", LAW, "retrieval")
    ]  # fmt: skip
    assert errors.count == 0


@pytest.mark.parametrize("text", [*ODD, "raise"])
def test_a_predictor_that_fails_costs_a_batch_its_predictions_and_no_more(
    obedient: Obedient, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    errors = Errors()
    for _ in range(2):
        assert [each.source for each in answers(obedient, batch("a", text), errors)] == ["error", "error"]
    assert [each.source for each in answers(obedient, batch("a"), errors)] == ["retrieval"]
    assert errors.count == 2
    assert len(caplog.records) == 1
    assert "failed in predict" in caplog.text
    assert caplog.records[0].exc_info


class Short:
    def predict(self, prompts: Sequence[Prompt]) -> list[Any]:
        return [GOOD] * (len(prompts) - 1)


def test_too_few_predictions_are_those_of_nobody() -> None:
    predictor: Any = Short()
    assert [each.source for each in answers(predictor, batch("a", "b"), Errors())] == ["error", "error"]
