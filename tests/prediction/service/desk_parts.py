"""What the tests of the predictor's desk share."""

from __future__ import annotations

from typing import Any

from vllm_ext.prediction.service.messages import Ask, Told
from vllm_ext.prediction.service.work import Desk

ANN, BOB = 0, 1


def make_desk(*, queue_limit: int = 100, batch_size: int = 4, timeout_s: float = 30.0) -> Desk:
    return Desk(queue_limit=queue_limit, batch_size=batch_size, timeout_s=timeout_s)


def question(req_id: str, text: str = "hello") -> Ask:
    return Ask(req_id, text, 100, "m")


def served(desk: Desk, predictor: Any, now: float = 0.0) -> list[tuple[int, Told]]:
    """Work until the queue is empty; returns all answers in the order in which they are given."""
    answers = list[tuple[int, Told]]()
    while desk.waiting:
        batch, too_late = desk.next_batch(now)
        answers += too_late
        if batch:
            answers += desk.answers(batch, desk.predict(predictor, batch))
    return answers
