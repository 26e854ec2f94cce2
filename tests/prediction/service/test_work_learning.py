"""The predictor's desk: what it hands on to be learned, what it forgets, and how it says the predictor is."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ext.prediction.predictor import Prompt
from vllm_ext.prediction.service import work
from vllm_ext.prediction.service.messages import Told, pack

from .desk_parts import ANN, make_desk, question, served
from .fake_predictors import Obedient, OddStatus, RaisingStatus


def test_what_finished_is_taken_once(obedient: Obedient) -> None:
    desk = make_desk()
    desk.ask(ANN, question("a", "text"), 0.0)
    served(desk, obedient)
    desk.finished(ANN, "a", 12)
    desk.finished(ANN, "a", 13)
    ((prompt, tokens, time_s, _),) = desk.take_finished()
    assert (prompt, tokens) == (Prompt("text", 100, "m"), 12)
    assert time_s > 1e9
    assert desk.take_finished() == []
    assert desk.learned == 1


@pytest.mark.parametrize("tokens", [0, -3])
def test_a_request_without_output_teaches_nothing(tokens: int) -> None:
    desk = make_desk()
    desk.ask(ANN, question("a"), 0.0)
    desk.finished(ANN, "a", tokens)
    assert desk.take_finished() == []


def test_aborted_refused_and_unknown_requests_teach_nothing() -> None:
    desk = make_desk(queue_limit=1)
    desk.ask(ANN, question("aborted"), 0.0)
    desk.ask(ANN, question("refused"), 0.0)
    desk.gone(ANN, "aborted")
    for req_id in ("aborted", "refused", "unknown"):
        desk.finished(ANN, req_id, 5)
        desk.gone(ANN, req_id)
    assert desk.take_finished() == []


def test_predictions_are_judged_when_their_requests_finish(obedient: Obedient) -> None:
    desk = make_desk()
    for i, (text, true) in enumerate([("hello", 7), ("hello", 14), ("unknown", 5), ("hello", 9)]):
        desk.ask(ANN, question(f"r{i}", text), 0.0)
        served(desk, obedient)
        desk.finished(ANN, f"r{i}", true)
    status = desk.status(obedient)
    assert status.judged == 3, "where nothing was predicted, there is nothing to judge"
    assert status.coverage == pytest.approx(2 / 3)
    assert status.relative_error == pytest.approx(2 / 9)


def test_what_never_ends_is_forgotten_oldest_first(monkeypatch: pytest.MonkeyPatch, obedient: Obedient) -> None:
    monkeypatch.setattr(work, "_REMEMBERED", 3)
    desk = make_desk(queue_limit=2)
    for i in range(5):
        desk.ask(ANN, question(f"r{i}"), 0.0)
        served(desk, obedient)
    for i in range(5):
        desk.finished(ANN, f"r{i}", i + 1)
    assert [done.tokens for done in desk.take_finished()] == [3, 4, 5]


def test_what_waits_is_never_forgotten(monkeypatch: pytest.MonkeyPatch, obedient: Obedient) -> None:
    """With a long queue, questions were once forgotten in it, and never answered."""
    monkeypatch.setattr(work, "_REMEMBERED", 3)
    desk = make_desk(queue_limit=10)
    for i in range(10):
        desk.ask(ANN, question(f"r{i}"), 0.0)
    assert served(desk, obedient) == [(ANN, Told(f"r{i}", 7, 9, "retrieval")) for i in range(10)]


def test_what_finished_is_bounded_while_nobody_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "_REMEMBERED", 3)
    desk = make_desk()
    for i in range(5):
        desk.ask(ANN, question(f"r{i}"), 0.0)
        desk.finished(ANN, f"r{i}", i + 1)
    assert [done.tokens for done in desk.take_finished()] == [3, 4, 5]


# --- status -----------------------------------------------------------------------------------------------------------


def test_the_status_says_how_it_goes(obedient: Obedient) -> None:
    desk = make_desk(queue_limit=3, batch_size=1)
    for i, text in enumerate(["hello", "raise", "hello"]):
        desk.ask(ANN, question(f"r{i}", text), 0.0)
    for _ in range(2):
        batch, _ = desk.next_batch(0.0)
        desk.answers(batch, desk.predict(obedient, batch))
    desk.finished(ANN, "r0", 5)
    obedient.learn(desk.take_finished())
    status = desk.status(obedient)
    assert (status.entries, status.learned, status.decoder_examples) == (1, 1, 11)
    assert (status.waiting, status.answered, status.errors) == (1, 2, 1)


@pytest.mark.parametrize("kind", [OddStatus, RaisingStatus])
def test_a_predictor_that_cannot_say_how_it_is_has_a_status_all_the_same(tmp_path: Path, kind: type[Obedient]) -> None:
    """What it said was once taken as it was, and the task that learns, saves and reports ended without a word."""
    desk = make_desk()
    status = desk.status(kind(None, tmp_path))
    assert (status.entries, status.decoder_examples, desk.errors) == (0, 0, 1)
    assert pack(status)
