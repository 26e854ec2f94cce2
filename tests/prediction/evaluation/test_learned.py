"""Our predictors as the service combines them, and the comparison of several."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_ext.prediction.evaluation import compare
from vllm_ext.prediction.evaluation.compare import (
    QUICK_TO_FIT,
    Comparison,
    Setting,
    check_names,
    predictors,
    without_repeated,
)
from vllm_ext.prediction.evaluation.learned import UNKNOWN, Combined, DecoderAlone, Knowledge, Retrieval
from vllm_ext.prediction.evaluation.rows import EvaluationError, Examples

from .made_up import DIM, requests

QUICK = list(QUICK_TO_FIT)


def setting(max_tokens: int = 4096) -> Setting:
    encoder: Any = SimpleNamespace(dim=DIM)
    return Setting(encoder=encoder, max_tokens=max_tokens)


@pytest.fixture(scope="module")
def learned() -> Comparison:
    comparison = Comparison(train=requests(400), predictors=predictors(QUICK, setting()))
    comparison.fit()
    return comparison


def test_what_reads_prompts_ranks_better_than_what_does_not() -> None:
    """Where the prompt's length says nothing."""

    def hidden(requests: Examples) -> Examples:
        tokens = np.full(len(requests), 5)
        return Examples(prompts=compare.replace(requests.prompts, tokens=tokens), lengths=requests.lengths)

    learned = Comparison(train=hidden(requests(400)), predictors=predictors(QUICK, setting()))
    learned.fit()
    tested = hidden(requests(200, seed=1))
    scores = learned.scores(learned.predict(tested), tested)
    for name in ("alise", "shrunk", "retrieval", "decoder"):
        assert scores[name]["tau"] > 0.6, name
        assert 0.8 <= scores[name]["coverage_p90"] <= 0.97, name
    assert scores["history"]["tau"] == scores["bucket-history"]["tau"] == 0
    assert scores["oracle"]["tau"] == pytest.approx(1)
    assert list(scores) == QUICK


def test_predictions_don_t_change_when_the_true_lengths_do(learned: Comparison) -> None:
    """Invariant 1: only the oracle may notice."""
    test = requests(50, seed=2)
    other = Examples(prompts=test.prompts, lengths=test.lengths[::-1].copy())
    before, after = learned.predict(test), learned.predict(other)
    for name in QUICK[:-1]:
        assert before[name].tokens.tolist() == after[name].tokens.tolist()
    assert before["oracle"].tokens.tolist() != after["oracle"].tokens.tolist()


def test_the_same_seed_gives_the_same_predictions() -> None:
    test = requests(30, seed=3)
    runs = []
    for _ in range(2):
        comparison = Comparison(train=requests(120), predictors=predictors(["alise", "shrunk"], setting()))
        comparison.fit()
        runs.append({name: said.tokens.tolist() for name, said in comparison.predict(test).items()})
    assert runs[0] == runs[1]


def test_predictors_of_one_comparison_share_what_was_learned() -> None:
    asked: list[str] = []
    comparison = Comparison(train=requests(120), predictors=predictors(["alise", "decoder"], setting()))
    comparison.fit(asked.append, iter(range(10)).__next__)
    assert asked == ["alise", "decoder"]
    assert comparison.seconds == {"alise": 1, "decoder": 1}
    alise, decoder = comparison.predictors
    assert isinstance(alise, Combined)
    assert isinstance(decoder, DecoderAlone)
    assert alise._knowledge is decoder._knowledge


def test_without_any_history_the_constant_prior_answers() -> None:
    said = Combined("shrunk", Knowledge(DIM)).predict(requests(3).prompts)
    assert said.tokens.tolist() == [UNKNOWN.tokens] * 3
    assert said.p90.tolist() == [UNKNOWN.p90] * 3


def test_retrieval_without_a_similar_prompt_says_the_history() -> None:
    train = requests(100, kinds=1)
    other = requests(1)
    away = np.zeros((1, DIM), dtype=np.float32)
    away[0, DIM - 1] = 1
    knowledge = Knowledge(DIM)
    retrieval = Retrieval(knowledge)
    retrieval.fit(train)
    said = retrieval.predict(compare.replace(other.prompts, vectors=away))
    assert said.tokens.tolist() == [round(float(np.median(train.lengths)))]


def test_a_decoder_that_is_no_better_than_constants_is_left_out() -> None:
    rng = np.random.default_rng(0)
    knowledge = Knowledge(DIM)
    vectors = rng.standard_normal((60, DIM))
    unit = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    taken = knowledge.train_decoder(unit, np.full(60, 9))  # nothing is better than always 9
    assert not taken
    assert knowledge.decoder is None
    assert not knowledge.train_decoder(unit[:5], np.arange(1, 6))


@pytest.mark.parametrize("names", [["alise", "magic"], []], ids=["unknown", "none"])
def test_wrong_names_are_told_with_the_known_ones(names: list[str]) -> None:
    with pytest.raises(EvaluationError, match="must be among alise, shrunk"):
        check_names(names)


def test_tested_prompts_that_were_learned_are_left_out_and_counted() -> None:
    train, test = requests(20), requests(20, seed=1)
    both = Examples(
        prompts=compare.replace(test.prompts, texts=(*test.prompts.texts[:15], *train.prompts.texts[:5])),
        lengths=test.lengths,
    )
    left, known = without_repeated(both, train)
    assert (len(left), known) == (15, 5)
    assert left.lengths.tolist() == test.lengths[:15].tolist()
    with pytest.raises(EvaluationError, match="all 20 tested prompts"):
        without_repeated(train, train)
