"""Reading of prompts and lengths: what is counted, what is the same prompt, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.datasets import DatasetError
from vllm_ext.prediction.evaluation import rows
from vllm_ext.prediction.evaluation.rows import EvaluationError, LocalTokenizer

WORDS = LocalTokenizer("words", lambda text: len(text.split()))


def write(path: Path, entries: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return path


def test_lengths_are_counted_by_the_tokenizer_and_cut_at_the_bound(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "one two", "output": "a b c d e"}, {"prompt": "x", "output": "a"}])
    data = rows.read(path, WORDS, max_tokens=4)
    by_prompt = dict(zip(data.examples.prompts.texts, data.examples.lengths.tolist(), strict=True))
    assert by_prompt == {"one two": 4, "x": 1}
    assert sorted(data.examples.prompts.tokens.tolist()) == [1, 2]
    assert (data.tokenizer, data.rows, data.repeated) == ("words", 2, 0)


def test_stated_lengths_go_before_counted_ones(tmp_path: Path) -> None:
    stated = {"prompt": "x y", "output": "a b c", "output_tokens": 77, "prompt_tokens": 8}
    data = rows.read(write(tmp_path / "a.jsonl", [stated]), WORDS)
    assert (data.examples.lengths.tolist(), data.examples.prompts.tokens.tolist()) == ([77], [8])
    assert data.tokenizer == rows.RECORDED
    mixed = rows.read(write(tmp_path / "b.jsonl", [stated, {"prompt": "z", "output": "a b"}]), WORDS)
    assert sorted(mixed.examples.lengths.tolist()) == [2, 77]
    assert mixed.tokenizer == "as recorded and words"


def test_first_of_equal_prompts_stays_and_the_others_are_counted(tmp_path: Path) -> None:
    entries = [{"prompt": p, "output": o} for p, o in (("Hi  there", "1"), ("hi there\n", "1 2"), ("bye", "1 2 3"))]
    path = write(tmp_path / "a.jsonl", entries)
    data = rows.read(path, WORDS)
    assert sorted(zip(data.examples.prompts.texts, data.examples.lengths.tolist(), strict=True)) == [
        ("Hi  there", 1),
        ("bye", 3),
    ]
    assert data.repeated == 1
    assert len(rows.read(path, WORDS, keep_repeated=True)) == 3


def test_sample_is_the_same_under_a_seed_and_another_under_another(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "output": "a " * (i + 1)} for i in range(40)])
    first, again, other = (rows.read(path, WORDS, max_rows=10, seed=seed).examples for seed in (1, 1, 2))
    assert first.prompts.texts == again.prompts.texts
    assert first.lengths.tolist() == again.lengths.tolist()
    assert set(first.prompts.texts) != set(other.prompts.texts)
    assert [int(text[1:]) + 1 for text in first.prompts.texts] == first.lengths.tolist()


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"prompt_tokens": 3, "output_tokens": 5}, "has no text of the prompt"),
        ({"prompt": "x", "output": "  "}, "no row has an answer"),
    ],
    ids=["no prompt", "empty answers only"],
)
def test_what_cannot_be_learned_from_is_an_error(tmp_path: Path, entry: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        rows.read(write(tmp_path / "a.jsonl", [entry]), WORDS)


def test_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"none\.jsonl"):
        rows.read(tmp_path / "none.jsonl", WORDS)


def test_filter_keeps_rows_of_a_value(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": p, "output": "a", "model": m} for p, m in (("x", "1"), ("y", "2"))])
    assert rows.read(path, WORDS, where={"model": frozenset({"2"})}).examples.prompts.texts == ("y",)


def test_tested_prompts_that_were_learned_are_found_whatever_their_case_and_blanks() -> None:
    assert rows.not_in(["A  b", "c", "a B ", "d"], ["a b", "D"]).tolist() == [1]


@given(st.integers(2, 300), st.floats(0.01, 0.99), st.integers(0, 5))
def test_split_parts_all_rows_and_leaves_none_empty(count: int, share: float, seed: int) -> None:
    learned, tested = rows.split(count, share, seed)
    assert sorted([*learned.tolist(), *tested.tolist()]) == list(range(count))
    assert len(learned)
    assert len(tested)
    assert abs(len(tested) - share * count) <= 1


@pytest.mark.parametrize(("count", "share"), [(1, 0.5), (10, 0.0), (10, 1.0)])
def test_split_that_cannot_be_is_an_error(count: int, share: float) -> None:
    with pytest.raises(EvaluationError, match=r"at least 2|above 0 and below 1"):
        rows.split(count, share, 0)


def test_local_tokenizer_counts_without_special_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({"[CLS]": 0, "[UNK]": 1, "a": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = LocalTokenizer.load(tmp_path)
    assert (loaded.count("a b a"), loaded.name) == (3, tmp_path.name)


@pytest.mark.parametrize("content", [None, "{not json"], ids=["missing", "damaged"])
def test_tokenizer_that_cannot_be_read_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(EvaluationError, match=r"tokenizer\.json"):
        LocalTokenizer.load(tmp_path)


def test_examples_are_picked_together() -> None:
    prompts = rows.Prompts(texts=("a", "b", "c"), tokens=np.array([1, 2, 3]), vectors=np.eye(3, dtype=np.float32))
    picked = rows.Examples(prompts=prompts, lengths=np.array([10, 20, 30])).take(np.array([2, 0]))
    assert picked.prompts.texts == ("c", "a")
    assert picked.prompts.tokens.tolist() == [3, 1]
    assert picked.prompts.vectors.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert picked.lengths.tolist() == [30, 10]
