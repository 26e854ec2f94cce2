"""The predictor's queue: batches, bounds, and an answer for each question, whatever a predictor says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from vllm_ext.prediction.predictor import Prompt
from vllm_ext.predictor.messages import Answer, Ask
from vllm_ext.predictor.request_batcher import Errors, RequestBatcher, Waiting, answers

from .fake_predictors import GOOD, ODD, Obedient
from .parts import QUANTILES, prompt


def desk(**options: Any) -> RequestBatcher:
    return RequestBatcher(**{"queue_limit": 3, "batch_size": 2, "timeout_s": 1.0, **options})


def ask(on: RequestBatcher, names: str, now: float = 0.0) -> list[Answer | None]:
    return [on.ask(b"peer", Ask(name, prompt()), now) for name in names]


def taken(on: RequestBatcher, now: float = 0.0) -> str:
    return "".join(waiting.ask.req_id for waiting in on.batch(now))


def test_what_waits_is_predicted_in_batches_the_oldest_first() -> None:
    some = desk()
    ask(some, "abc")
    assert [taken(some), taken(some), taken(some)] == ["ab", "c", ""]


def test_what_has_no_room_is_refused() -> None:
    some = desk()
    assert ask(some, "abcd") == [None, None, None, Answer("d", source="overload")]
    taken(some)
    assert ask(some, "d") == [None]


def test_what_waited_for_too_long_is_let_go_and_makes_room() -> None:
    """As while the model is loaded: who asked has given it up."""
    some = desk()
    ask(some, "ab", 0.0)
    ask(some, "c", 0.5)
    assert ask(some, "d", 1.0) == [Answer("d", source="overload")]
    assert ask(some, "d", 1.001) == [None]
    assert taken(some, 1.001) == "cd"


def batch(*texts: str) -> list[Waiting]:
    return [Waiting(b"peer", Ask(text, prompt(text)), 0.0) for text in texts]


def test_each_question_has_its_answer(obedient: Obedient) -> None:
    errors = Errors()
    assert answers(obedient, batch("a", "unknown", "b"), errors) == [
        Answer("a", QUANTILES, "retrieval"), Answer("unknown", source="unknown"), Answer("b", QUANTILES, "retrieval")
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
