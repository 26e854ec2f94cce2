"""Reading recorded rows, and judging a predictor by them: online or apart, each measure against a plain computation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kendalltau

from tests.support.learned_parts import done, made
from vllm_ext.datasets import DatasetError
from vllm_ext.prediction import evaluate
from vllm_ext.prediction.evaluate import History, Said
from vllm_ext.prediction.predictor import FinishedPrompt, Prompt
from vllm_ext.prediction.rows import AS_STATED, Rows, read, token_counter
from vllm_ext.prediction.text import PromptText


def words(text: str) -> int:
    return len(text.split())


def written(folder: Path, rows: list[dict[str, Any]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def rows_of(path: Path, **options: Any) -> Rows:
    return read(path, words, counter="words", model="m", text=PromptText(), **options)


def test_rows_are_what_a_server_would_have_seen(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        [
            {"prompt": "one two three", "output_tokens": 57},
            {"prompt": "four", "output": "an answer of six words here"},
            {"prompt_tokens": 7, "output_tokens": 3},
            {"prompt": "no answer", "output": " "},
        ],
    )
    found = rows_of(path)
    assert [(d.prompt.text, d.prompt.prompt_tokens, d.tokens) for d in found.finished] == [
        ("one two three", 3, 57), ("four", 1, 6),
    ]  # fmt: skip
    assert found.without_text == 2
    assert found.counted_in == {AS_STATED: 1, "words": 1}
    assert {d.prompt.conversation for d in found.finished} == {""}


def test_a_conversations_turns_are_one_after_another(tmp_path: Path) -> None:
    turns = ["first question", "its answer", "second question", "another answer of more words"]
    row = {"conversations": [{"from": ("human", "gpt")[n % 2], "value": v} for n, v in enumerate(turns)]}
    found = rows_of(written(tmp_path, [row, row])).finished
    assert [(d.prompt.turn, d.tokens, d.prompt.prompt_tokens) for d in found[:2]] == [(0, 2, 2), (1, 5, 6)]
    assert found[1].prompt.text.startswith("second question")
    assert "first question" in found[1].prompt.text
    assert "its answer" not in found[1].prompt.text
    assert found[0].prompt.conversation == found[1].prompt.conversation != found[2].prompt.conversation
    assert [d.prompt.turn for d in rows_of(tmp_path / "rows.jsonl", turns=False).finished] == [0, 0]


def test_samples_are_the_same_for_a_seed_and_in_file_order(tmp_path: Path) -> None:
    path = written(tmp_path, [{"prompt": f"p{n}", "output_tokens": n + 1} for n in range(50)])
    one, same, other = ([d.tokens for d in rows_of(path, max_rows=9, seed=s).finished] for s in (1, 1, 2))
    assert one == same == sorted(one)
    assert one != other
    with pytest.raises(ValueError, match="max_rows=0"):
        rows_of(path, max_rows=0)


def test_what_nobody_can_learn_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no row has a prompt's text"):
        rows_of(written(tmp_path, [{"prompt_tokens": 3, "output_tokens": 3}]))
    with pytest.raises(ValueError, match="tokenizer="):
        token_counter(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="can't be read"):
        token_counter(tmp_path)


def test_neither_conversations_nor_equal_prompts_are_divided() -> None:
    rows = [done(f"t{n}", 1, conversation=f"c{n % 10}", turn=n // 10) for n in range(30)]
    rows += [done("Same  text", 2), done("same text", 3), *[done(f"s{n}", 4) for n in range(20)]]
    learned, judged = evaluate.split(rows, 0.3, 0)
    assert len(learned) + len(judged) == len(rows)
    for key in (lambda d: d.prompt.conversation or d.prompt.text.lower().replace("  ", " "),):
        assert not {key(d) for d in learned} & {key(d) for d in judged}
    assert evaluate.split(rows, 0.3, 0) == (learned, judged)
    for share in (0, 1):
        with pytest.raises(ValueError, match="test_share"):
            evaluate.split(rows, share, 0)
    with pytest.raises(ValueError, match="at least 2"):
        evaluate.split(rows[:1], 0.3, 0)


def test_measures_are_what_they_say() -> None:
    rng = np.random.default_rng(0)
    p50, true = rng.integers(1, 500, 80), rng.integers(1, 500, 80)
    said = Said(p50, 2 * p50, true, np.zeros(80, np.int64), np.arange(80) % 4 > 0)
    found = evaluate.scores(said)
    assert found["tau"] == pytest.approx(kendalltau(p50, true).statistic)
    assert found["coverage"] == sum(t <= 2 * p for p, t in zip(p50, true, strict=True)) / 80
    loss = 0.0
    for level, factor in ((0.5, 1), (0.9, 2)):
        missed = [np.log(t / (factor * p)) for p, t in zip(p50, true, strict=True)]
        loss += sum(level * m if m > 0 else (level - 1) * m for m in missed) / 80
    assert found["pinball"] == pytest.approx(loss)
    assert found["relative_error"] == pytest.approx(np.median([abs(p - t) / t for p, t in zip(p50, true, strict=True)]))
    assert found["answered"] == 0.75
    constant = said._replace(p50=np.full(80, 7), p90=np.full(80, 9))
    assert evaluate.scores(constant)["tau"] == 0
    with pytest.raises(ValueError, match="nothing to measure"):
        evaluate.scores(said.where(np.zeros(80, np.bool_)))


class Listening:
    """A predictor that answers nothing and remembers what it is asked and told, in order."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []

    def predict(self, prompts: list[Prompt]) -> list[None]:
        self.heard += [("asked", prompt.text) for prompt in prompts]
        return [None] * len(prompts)

    def learn(self, finished: list[FinishedPrompt]) -> None:
        self.heard += [("told", each.prompt.text) for each in finished]

    def status(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass


def test_apart_a_later_turn_is_asked_when_the_earlier_ones_were_learned_and_single_prompts_never_are() -> None:
    predictor = Listening()
    rows = [done(f"{c}{turn}", 5, conversation=c, turn=turn) for c in "ab" for turn in range(2)] + [done("single", 5)]
    said = evaluate.judge_split(predictor, History(), rows)  # type: ignore[arg-type]
    assert predictor.heard == [
        ("asked", "a0"), ("asked", "b0"), ("asked", "single"), ("told", "a0"), ("told", "b0"),
        ("asked", "a1"), ("asked", "b1"), ("told", "a1"), ("told", "b1"),
    ]  # fmt: skip
    assert said.turns.tolist() == [0, 0, 0, 1, 1]
    assert not said.answered.any()


def test_online_each_is_asked_before_it_is_learned_and_the_history_stands_in() -> None:
    predictor = Listening()
    said = evaluate.judge_online(predictor, History(), [done(t, 40) for t in "abcd"], at_once=2)  # type: ignore[arg-type]
    assert "".join(text for _, text in predictor.heard) == "ababcdcd"
    assert said.p50.tolist() == [1, 1, *[evaluate.LengthDistribution.of([40]).p50] * 2]
    assert said.answered.tolist() == [False, False, True, True]


def test_the_predictor_that_ships_is_judged_better_than_the_history(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for number in range(300):
        kind, low, high = ("name", 3, 9) if number % 2 else ("explain at length", 60, 200)
        rows.append(done(f"{kind} w{rng.integers(40)} {number}", int(rng.integers(low, high))))
    learned, judged = evaluate.split(rows, 0.3, 0)
    predictor, history = made(tmp_path), History()
    evaluate.learn(predictor, learned)
    history.learn(learned)
    ours = evaluate.scores(evaluate.judge_split(predictor, history, judged))
    theirs = evaluate.scores(evaluate.judge_split(Listening(), history, judged))  # type: ignore[arg-type]
    assert ours["tau"] > 0.4 > theirs["tau"]
    assert ours["pinball"] < 0.5 * theirs["pinball"]
    assert 0.8 < ours["coverage"] <= 1
