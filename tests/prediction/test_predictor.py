"""The predictor that ships, with an encoder of words: what it says after what it learned, and what it never does."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.support.learned_parts import WordEncoder, ask, done, made
from vllm_ext.contract.length_distribution import Prediction
from vllm_ext.prediction import neighbours
from vllm_ext.prediction.folder import REGRESSION, STORE
from vllm_ext.prediction.learned import BLEND, REGRESSED, RETRIEVAL, LearnedPredictor
from vllm_ext.prediction.predictor import FinishedPrompt


def one(predictor: LearnedPredictor, text: str, max_tokens: int = 10**6, **prompt: object) -> Prediction | None:
    (found,) = predictor.predict([ask(text, max_tokens, **prompt)])  # type: ignore[arg-type]
    return found


def said(predictor: LearnedPredictor, text: str, max_tokens: int = 10**6, **prompt: object) -> Prediction:
    found = one(predictor, text, max_tokens, **prompt)
    assert found is not None
    return found


def rows(count: int, seed: int = 0) -> list[FinishedPrompt]:
    """Questions in few words are answered in 3 tokens, stories in about 90."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(count):
        word = f"w{rng.integers(200)}"
        if number % 2:
            made.append(done(f"in one word where is {word}", 3))
        else:
            made.append(done(f"write a long story about {word}", int(rng.integers(80, 100))))
    return made


def test_an_empty_one_has_nothing_to_say(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    assert predictor.predict([]) == []
    assert one(predictor, "hello") is None
    assert predictor.status() == {"entries": 0, "examples": 0}


def test_few_lengths_stay_exact(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    predictor.learn([done(f"in one word where is {w}", 3) for w in "abcdefghij"])
    predictor.learn([done(f"write a long story about {w}", 90) for w in "abcdefghij"])
    short, long = said(predictor, "in one word where is z"), said(predictor, "write a long story about z")
    assert (short.tokens, long.tokens) == (3, 90)
    assert (short.source, short.neighbours) == (RETRIEVAL, 10)
    assert short.similarity == pytest.approx(0.8, abs=0.2)
    assert said(predictor, "write a long story about z", 40).p90 == 40


@pytest.mark.parametrize(("others", "times"), [(0, 1), (500, 10)])
def test_the_length_of_an_identical_prompt_is_exact(tmp_path: Path, others: int, times: int) -> None:
    predictor = made(tmp_path)
    predictor.learn([*rows(others), *[done("exactly this", 117)] * times])
    assert said(predictor, "exactly this").tokens == 117


def test_each_law_is_bounded(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    predictor.learn(rows(300))
    for text in ("in one word where is w3", "nothing like it", ""):
        for bound in (1, 2, 50, 10**6):
            found = said(predictor, text, bound)
            assert 1 <= found.tokens <= found.p90 <= bound


def test_with_a_regression_what_resembles_nothing_is_answered_by_it(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    predictor.learn(rows(400))
    assert predictor.status() == {"entries": 400, "examples": 400}
    assert said(predictor, "in one word where is w3").source == BLEND
    assert said(predictor, "in one word where is w3", model="other").source == REGRESSED
    short, long = (
        said(predictor, "in one word where is q", salt="x"),
        said(predictor, "write a story about q", salt="x"),
    )
    assert short.source == long.source == REGRESSED
    assert short.tokens < 10 < long.tokens


def test_salts_and_conversations_never_cross(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    predictor.learn([done("a secret question", 77, salt="ann", conversation="c") for _ in range(20)])
    assert said(predictor, "a secret question", salt="ann").tokens == 77
    assert one(predictor, "a secret question", salt="bob") is None
    assert one(predictor, "a secret question") is None
    predictor.learn(rows(400))
    alone = said(predictor, "go on", salt="bob")
    assert said(predictor, "go on", salt="bob", conversation="c").distribution == alone.distribution


def test_a_conversations_last_answers_are_looked_at(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    rng = np.random.default_rng(0)
    for turn in range(6):
        predictor.learn([
            done(f"go on {rng.integers(10**6)}", 10 if c % 2 else 300, conversation=f"c{c}", turn=turn)
            for c in range(80)
        ])  # fmt: skip
    predictor.fit()
    for _ in range(3):
        predictor.learn([done("x", 10, conversation="short"), done("y", 300, conversation="long")])
    short, long = (said(predictor, "go on 5", conversation=c, turn=6, model="n") for c in ("short", "long"))
    assert short.tokens < 40 < 120 < long.tokens
    again = made(tmp_path)
    assert said(again, "go on 5", conversation="short", turn=6, model="n").distribution == short.distribution, (
        "kept over a restart"
    )


def test_aborted_requests_are_no_neighbours(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    predictor.learn([done("the question", 5, aborted=True), done("the question", 80)])
    found = said(predictor, "the question")
    assert (found.tokens, found.neighbours) == (80, 1)
    assert predictor.status()["entries"] == 1


def test_the_same_data_give_the_same_law_also_after_a_restart(tmp_path: Path) -> None:
    texts = ["in one word where is w3", "write a long story about w999", "else"]
    distributions = []
    for name in ("a", "b"):
        predictor = made(tmp_path / name)
        predictor.learn(rows(500))
        distributions.append(
            [found.distribution for found in predictor.predict([ask(text) for text in texts]) if found]
        )
        predictor.close()
    again = made(tmp_path / "a")
    distributions.append([found.distribution for found in again.predict([ask(text) for text in texts]) if found])
    assert distributions[0] == distributions[1] == distributions[2]
    assert again.status() == {"entries": 500, "examples": 500}


def test_it_is_fitted_again_when_there_is_a_fifth_more_and_not_at_each_start(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    fitted = []
    for _ in range(40):
        predictor.learn(rows(10))
        fitted.append(predictor.status()["examples"])
    steps = sorted(set(fitted))
    assert steps[:4] == [0, 70, 90, 110]
    assert all(later >= 1.2 * earlier for earlier, later in pairwise(steps))
    predictor.close()
    written = (tmp_path / REGRESSION).stat().st_mtime_ns
    made(tmp_path)
    assert (tmp_path / REGRESSION).stat().st_mtime_ns == written


def test_two_servers_learn_from_each_other(tmp_path: Path) -> None:
    one_, other = made(tmp_path), made(tmp_path)
    one_.learn([done("who knows this", 12)])
    other.learn([done("and who knows that", 60)])
    one_.learn([])
    assert said(one_, "and who knows that").tokens == 60
    assert said(other, "who knows this").tokens == 12
    assert one_.status() == other.status() == {"entries": 2, "examples": 0}


def test_a_full_tail_is_built_into_an_index_and_old_entries_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "TAIL", 64)
    predictor = made(tmp_path, capacity=150)
    for number in range(40):
        predictor.learn([done(f"unlike x{number} y{i}", 1 + number) for i in range(10)])
    (view,) = predictor._neighbours._views.values()
    assert view.index is not None
    assert said(predictor, "unlike x39 y3").tokens > 35
    assert predictor.status()["entries"] < 150 + 150


def test_an_entry_is_embedded_once_and_what_was_never_asked_for_a_batch_at_a_time(tmp_path: Path) -> None:
    encoder = WordEncoder()
    predictor = made(tmp_path, encoder, batch_size=4)
    predictor.predict([ask("asked")])
    predictor.learn([done("asked", 3)])
    assert encoder.encoded == ["asked"]
    predictor.learn([done(f"never {n}", 3) for n in range(16)])
    assert encoder.encoded[1:] == [f"never {n}" for n in (0, 4, 8, 12)]
    assert predictor.status()["entries"] == 5


def test_another_encoders_files_are_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = made(tmp_path)
    old.learn(rows(300))
    old.close()
    new = made(tmp_path, WordEncoder("other"))
    assert new.status() == {"entries": 0, "examples": 0}
    new.close()
    assert not caplog.records
    assert made(tmp_path).status()["entries"] == 300
    assert not list(tmp_path.glob("*damaged*"))


def test_a_damaged_regression_is_set_aside_and_fitted_again(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    predictor.learn(rows(300))
    predictor.close()
    (tmp_path / REGRESSION).write_bytes(b"no such thing")
    assert made(tmp_path).status() == {"entries": 300, "examples": 300}
    assert (tmp_path / f"{REGRESSION}.damaged-1").read_bytes() == b"no such thing"


def test_a_store_that_is_damaged_while_serving_costs_no_prediction(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    predictor.learn([done("known before", 7)])
    for file in tmp_path.iterdir():
        file.unlink()
    (tmp_path / STORE).write_bytes(b"garbage" * 1000)
    predictor.learn([])
    predictor.learn([done("known after", 9)])
    assert said(predictor, "known after").tokens == 9
    assert (tmp_path / f"{STORE}.damaged-1").exists()


def test_what_is_deleted_is_forgotten(tmp_path: Path) -> None:
    predictor = made(tmp_path)
    predictor.learn([done("known before", 7)])
    for file in tmp_path.iterdir():
        file.unlink()
    predictor.learn([])
    assert one(predictor, "known before") is None
