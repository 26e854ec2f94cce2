"""Baselines that do not read prompts."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_ext.prediction.evaluation.measures import Deciles, score
from vllm_ext.prediction.evaluation.priors import WINDOW, BucketHistory, GlobalHistory, MaxTokens, Oracle, PromptLength
from vllm_ext.prediction.evaluation.rows import Examples, Prompts


def examples(tokens: list[int], lengths: list[int]) -> Examples:
    prompts = Prompts(
        texts=tuple(f"p{i}" for i in range(len(tokens))),
        tokens=np.array(tokens, dtype=np.int64),
        vectors=np.zeros((len(tokens), 0), dtype=np.float32),
    )
    return Examples(prompts=prompts, lengths=np.array(lengths, dtype=np.int64))


def test_global_history_says_median_and_p90_of_the_newest_lengths() -> None:
    prior = GlobalHistory()
    prior.fit(examples([1] * (WINDOW + 50), [5000] * 50 + list(range(1, WINDOW + 1))))
    said = prior.predict(examples([1, 9], [1, 1]).prompts)
    assert said.tokens.tolist() == [500, 500]  # median of 1..1000 is 500.5, halves to even
    assert said.p90.tolist() == [901, 901]


def test_bucket_history_tells_short_prompts_from_long_ones() -> None:
    prior = BucketHistory()
    prior.fit(examples([4, 1000] * 200, [10, 300] * 200))
    said = prior.predict(examples([5, 900], [1, 1]).prompts)
    assert said.tokens.tolist() == pytest.approx([10, 300], rel=0.1)
    assert (said.p90 >= said.tokens).all()


def test_bucket_history_before_anything_finished_says_one() -> None:
    assert BucketHistory().predict(examples([5], [1]).prompts).tokens.tolist() == [1]


def test_prompt_length_finds_a_power_law() -> None:
    tokens = np.arange(10, 400)
    prior = PromptLength()
    prior.fit(examples(tokens.tolist(), (3 * tokens).tolist()))
    said = prior.predict(examples([20, 1000], [1, 1]).prompts)
    assert said.tokens.tolist() == pytest.approx([60, 3000], rel=0.01)


@pytest.mark.parametrize("tokens", [[7, 7, 7, 7], [5, 9]], ids=["one length", "two rows"])
def test_prompt_length_without_a_slope_is_a_constant(tokens: list[int]) -> None:
    prior = PromptLength()
    prior.fit(examples(tokens, [30] * len(tokens)))
    assert prior.predict(examples([1, 100], [1, 1]).prompts).tokens.tolist() == [30, 30]


def test_p90_of_prompt_length_covers_nine_in_ten() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 500, size=4000)
    lengths = np.maximum(1, tokens * np.exp(0.7 * rng.standard_normal(4000))).astype(int)
    prior = PromptLength()
    data = examples(tokens.tolist(), lengths.tolist())
    prior.fit(data)
    assert score(prior.predict(data.prompts), data.lengths, Deciles(data.lengths))["coverage_p90"] == pytest.approx(
        0.9, abs=0.01
    )


def test_max_tokens_is_the_bound_for_all() -> None:
    assert MaxTokens(512).predict(examples([1, 2], [1, 1]).prompts).tokens.tolist() == [512, 512]


def test_oracle_says_what_was_revealed() -> None:
    oracle = Oracle()
    oracle.reveal(np.array([3, 9]))
    assert oracle.predict(examples([1, 2], [1, 1]).prompts).tokens.tolist() == [3, 9]
