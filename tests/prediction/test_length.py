"""Output-length prediction: order of sources, bounds, the history's window, quantiles and shrinkage."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.config import PredictionConfig
from vllm_ext.prediction.history import LengthHistory
from vllm_ext.prediction.length import LengthPredictor, LengthQuery, Prediction


def predictor(**options: object) -> LengthPredictor:
    return LengthPredictor.from_config(PredictionConfig(**options))  # type: ignore[arg-type]


def query(prompt: int = 10, max_tokens: int = 1000, osl: int | None = None, tag: str | None = None) -> LengthQuery:
    return LengthQuery(prompt, max_tokens, osl, tag)


def test_the_hint_comes_first_then_history_then_the_prior() -> None:
    p = predictor(prior_tokens=77)
    assert p.predict(query()) == Prediction(77, "prior")
    p.observe(query(), 33)
    assert p.predict(query()) == Prediction(33, "history")
    assert p.predict(query(osl=12)) == Prediction(12, "hint")


def test_the_order_of_sources_is_the_configured_one() -> None:
    p = predictor(sources=("history", "hint"))
    assert p.predict(query(osl=12)) == Prediction(12, "hint"), "the history has nothing to say yet"
    p.observe(query(), 33)
    assert p.predict(query(osl=12)) == Prediction(33, "history")
    assert predictor(sources=()).predict(query(osl=12)).source == "prior"
    only_hint = predictor(sources=("hint",))
    only_hint.observe(query(), 33)
    assert only_hint.predict(query()).source == "prior"


@given(
    prior=st.integers(1, 10**6),
    osl=st.none() | st.integers(1, 10**6),
    max_tokens=st.integers(1, 10**6),
    seen=st.integers(0, 10**6),
)
def test_a_prediction_lies_between_1_and_max_tokens(prior: int, osl: int | None, max_tokens: int, seen: int) -> None:
    p = predictor(prior_tokens=prior)
    if seen:
        p.observe(query(), seen)
    assert 1 <= p.predict(query(max_tokens=max_tokens, osl=osl)).tokens <= max_tokens


def test_a_full_window_forgets_the_oldest() -> None:
    h = LengthHistory(3, 1.0)
    for length in (900, 5, 6):
        h.observe(query(), length)
    assert h.predict(query()) == 900
    h.observe(query(), 7)
    assert h.predict(query()) == 7


def test_a_window_of_one_keeps_the_last() -> None:
    h = LengthHistory(1, 0.5)
    for length in (900, 5, 5, 6):
        h.observe(query(), length)
        assert h.predict(query()) == length


@pytest.mark.parametrize("q", [0.01, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_quantiles_are_numpy_s(q: float, count: int) -> None:
    """One bucket only, so bucket and total agree and the shrinkage has no effect."""
    rng = random.Random(count)
    window = 50
    h = LengthHistory(window, q)
    lengths = [rng.randint(1, 2000) for _ in range(count)]
    for length in lengths:
        h.observe(query(), length)
    assert h.predict(query()) == pytest.approx(float(np.quantile(lengths[-window:], q)), abs=0.51)


def test_a_bucket_is_trusted_with_n_of_n_plus_8() -> None:
    """Prompts of 8-15 tokens end at 100, one of 512-1023 ended at 1000: (1 * 1000 + 8 * 100) / 9 = 200."""
    h = LengthHistory(1000, 0.5)
    for _ in range(8):
        h.observe(query(8), 100)
    h.observe(query(600), 1000)
    assert h.predict(query(1023)) == 200
    assert h.predict(query(15)) == 100
    assert h.predict(query(20)) == 100, "a bucket without examples follows all of them"
    for _ in range(7):
        h.observe(query(600), 1000)
    # 8 of 8 + 8 in the bucket, median of all 16 is 550
    assert h.predict(query(512)) == 775


def test_nothing_is_predicted_before_anything_finished() -> None:
    assert LengthHistory(10, 0.5).predict(query()) is None


def test_a_long_history_stays_bounded() -> None:
    h = LengthHistory(20, 0.5)
    for number in range(3000):
        h.observe(query(1 + number % 5000), number % 97 + 1)
    sizes = [len(h._all), *(len(bucket) for bucket in h._buckets.values())]
    assert max(sizes) == 20
    assert all(len(w._order) == len(w._sorted) for w in (h._all, *h._buckets.values()))
    assert h._all._sorted == sorted(h._all._order)


def test_a_tag_is_trusted_more_the_more_it_was_seen() -> None:
    h = LengthHistory(1000, 0.5)
    for _ in range(100):
        h.observe(query(), 50)
    assert h.predict(query(tag="long")) == 50
    for _ in range(8):
        h.observe(query(tag="long"), 450)
    assert h.predict(query(tag="long")) == 250, "8 observations weigh one half"
    assert h.predict(query(tag="other")) == 50
    assert h.predict(query()) == 50
    for _ in range(40):
        h.observe(query(tag="long"), 450)
    assert h.predict(query(tag="long")) == round(450 * 48 / 56 + 50 * 8 / 56)


def test_only_so_many_tags_are_held() -> None:
    h = LengthHistory(10_000, 0.5)
    for _ in range(2000):
        h.observe(query(), 50)
    for number in range(65):
        for _ in range(8):
            h.observe(query(tag=f"t{number}"), 450)
    untagged = h.predict(query())
    assert h.predict(query(tag="t0")) == untagged, "the first of 65 is forgotten"
    assert h.predict(query(tag="t1")) != untagged
    assert h.predict(query(tag="t64")) != untagged


def test_what_is_left_follows_the_tag_where_enough_of_it_was_as_long() -> None:
    h = LengthHistory(1000, 0.5)
    for _ in range(20):
        h.observe(query(), 100)
    for _ in range(8):
        h.observe(query(tag="a"), 400)
    h.observe(query(tag="b"), 400)
    assert h.beyond(query(tag="a"), 50) == 400
    assert h.beyond(query(tag="b"), 50) == 100, "one observation is too few"
    assert h.beyond(query(tag="a"), 400) is None
    assert h.beyond(query(prompt=5000), 99) == 100
    assert h.beyond(query(), 100) == 400
