"""Output-length prediction: order of sources, bounds, the history's window and the shares of a distribution."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.config import PredictionConfig
from vllm_ext.contract import Origin
from vllm_ext.contract.length_distribution import LengthDistribution, Prediction
from vllm_ext.prediction.history import LengthHistory
from vllm_ext.prediction.length import LengthPredictor
from vllm_ext.prediction.query import LengthQuery


def predictor(**options: object) -> LengthPredictor:
    return LengthPredictor.from_config(PredictionConfig(**options))  # type: ignore[arg-type]


def query(prompt: int = 10, max_tokens: int = 1000, osl: int | None = None, tag: str | None = None) -> LengthQuery:
    return LengthQuery(prompt, max_tokens, osl, tag, Origin(tag or ""))


def resting_on(source: str) -> Prediction:
    return Prediction(LengthDistribution.point(1), source)


def said(predictor: LengthPredictor, asked: LengthQuery) -> tuple[int, str]:
    found = predictor.predict(asked)
    return found.tokens, found.source


def distribution(history: LengthHistory, asked: LengthQuery) -> LengthDistribution:
    found = history.predict(asked)
    assert found is not None
    return found


def test_the_hint_comes_first_then_history_then_the_prior() -> None:
    p = predictor(prior_tokens=77, hints="believed")
    assert said(p, query()) == (pytest.approx(77, abs=1), "prior")
    p.observe(query(), 7)
    assert said(p, query()) == (7, "history")
    assert said(p, query(osl=12)) == (12, "hint")


def test_the_order_of_sources_is_the_configured_one() -> None:
    p = predictor(sources=("history", "hint"), hints="believed")
    assert said(p, query(osl=12)) == (12, "hint"), "the history has nothing to say yet"
    p.observe(query(), 7)
    assert said(p, query(osl=12)) == (7, "history")
    assert predictor(sources=()).predict(query(osl=12)).source == "prior"
    only_hint = predictor(sources=("hint",))
    only_hint.observe(query(), 7)
    assert only_hint.predict(query()).source == "prior"


def test_nothing_is_preferred_to_the_oracle() -> None:
    p = predictor(sources=("retrieval", "history"))
    assert p.prefers("retrieval", resting_on("history"))
    assert p.prefers("retrieval", resting_on("prior"))
    assert not p.prefers("retrieval", resting_on("oracle"))
    assert not p.prefers("hint", resting_on("history")), "it is no source here"


def test_a_hint_is_believed_by_half_before_anybody_was_right() -> None:
    p = predictor(sources=("hint", "history"))
    for _ in range(50):
        p.observe(query(), 100)
    found = p.predict(query(osl=800, max_tokens=1000)).distribution
    assert found.survival(150) == pytest.approx(0.5)


def test_what_is_weighed_with_a_hint_may_come_later() -> None:
    p = predictor(sources=("hint", "retrieval", "history"))
    early = p.predict(query(osl=800))
    assert p.prefers("retrieval", early)
    late = p.with_hint(query(osl=800), LengthDistribution.point(20), "retrieval")
    assert late.source == "hint"
    assert late.distribution.survival(30) == pytest.approx(0.5)
    assert not p.prefers("retrieval", late)
    believing = predictor(hints="believed", sources=("hint", "retrieval", "history"))
    assert not believing.prefers("retrieval", believing.predict(query(osl=8)))


def test_a_hint_beyond_the_bound_is_one_of_the_bound() -> None:
    p = predictor(sources=("hint", "history"))
    for _ in range(300):
        p.observe(query(osl=5000, max_tokens=40, tag="long"), 40)
    assert p.predict(query(osl=5000, max_tokens=40, tag="long")).tokens == 40
    assert p.hints is not None
    assert p.hints.weight(Origin("long")) > 0.9


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
    found = p.predict(query(max_tokens=max_tokens, osl=osl))
    assert 1 <= found.tokens <= found.p90 <= max_tokens
    assert found.distribution.capped(max_tokens).quantiles() == found.distribution.quantiles()


def test_a_full_window_forgets_the_oldest() -> None:
    h = LengthHistory(3)
    for length in (900, 5, 6):
        h.observe(query(), length)
    assert distribution(h, query()).survival(100) == pytest.approx(1 / 3)
    h.observe(query(), 7)
    assert distribution(h, query()).survival(7) == 0


def test_a_window_of_one_keeps_the_last() -> None:
    h = LengthHistory(1)
    for length in (900, 5, 5, 6):
        h.observe(query(), length)
        assert distribution(h, query()).quantiles() == LengthDistribution.of([length]).quantiles()


def test_a_bucket_has_a_share_of_n_of_n_plus_8() -> None:
    """Prompts of 8-15 tokens end at 100, one of 512-1023 ended at 1000."""
    h = LengthHistory(1000)
    for _ in range(8):
        h.observe(query(8), 100)
    h.observe(query(600), 1000)
    assert distribution(h, query(1023)).survival(200) == pytest.approx(1 / 9 + 8 / 9 * 1 / 9)
    assert distribution(h, query(15)).survival(200) == pytest.approx(0.5 * 1 / 9)
    assert distribution(h, query(20)).survival(200) == pytest.approx(1 / 9), (
        "a bucket without examples follows all of them"
    )


def test_nothing_is_predicted_before_anything_finished() -> None:
    assert LengthHistory(10).predict(query()) is None


def test_a_long_history_stays_bounded() -> None:
    h = LengthHistory(20)
    for number in range(3000):
        h.observe(query(1 + number % 5000), number % 97 + 1)
    for kind in (h._all, *h._buckets.values()):
        assert len(kind) == 20 or len(h._buckets) > 1
        assert kind._counts.sum() == len(kind) <= 20
        assert kind._counts.min() >= 0


def test_a_tag_has_a_greater_share_the_more_it_was_seen() -> None:
    h = LengthHistory(1000)
    for _ in range(100):
        h.observe(query(), 50)
    assert distribution(h, query(tag="long")).survival(100) == 0
    for _ in range(8):
        h.observe(query(tag="long"), 450)
    others = distribution(h, query()).survival(100)
    assert distribution(h, query(tag="other")).survival(100) == others
    assert distribution(h, query(tag="long")).survival(100) == pytest.approx(0.5 + 0.5 * others), (
        "8 observations weigh one half"
    )
    for _ in range(40):
        h.observe(query(tag="long"), 450)
    assert distribution(h, query(tag="long")).survival(100) > 48 / 56


def test_only_so_many_tags_are_held() -> None:
    h = LengthHistory(10_000)
    for _ in range(2000):
        h.observe(query(), 50)
    for number in range(65):
        for _ in range(8):
            h.observe(query(tag=f"t{number}"), 450)
    untagged = distribution(h, query()).survival(100)
    assert distribution(h, query(tag="t0")).survival(100) == untagged, "the first of 65 is forgotten"
    assert distribution(h, query(tag="t1")).survival(100) > untagged
    assert distribution(h, query(tag="t64")).survival(100) > untagged


def test_the_prior_is_as_wide_as_chats_are() -> None:
    found = predictor(prior_tokens=200).predict(query(max_tokens=10**6))
    assert found.p90 == pytest.approx(200 * math.exp(1.2816), rel=0.05)


@pytest.mark.parametrize(
    "sources", [("history", "retrieval"), ("retrieval", "history")], ids=["history first", "retrieval first"]
)
def test_the_source_that_was_nearer_is_believed_whatever_the_order(sources: tuple[str, ...]) -> None:
    p = predictor(sources=sources)
    rng = random.Random(0)
    for _ in range(300):
        length = rng.choice([10, 500])
        said = p.answers_for(query(), "retrieval", LengthDistribution.point(length))
        p.observe(query(), length, said)
    assert p.prefers("retrieval", resting_on("history"))
    for _ in range(1500):
        said = p.answers_for(query(), "retrieval", LengthDistribution.point(900))
        p.observe(query(), 10, said)
    assert not p.prefers("retrieval", resting_on("history"))
    assert p.prefers("retrieval", resting_on("prior"))
    assert not p.prefers("retrieval", resting_on("oracle"))


def test_answers_are_judged_within_the_clients_bound() -> None:
    p = predictor(sources=("retrieval", "history"))
    p.observe(query(), 300)
    found = p.answers_for(query(max_tokens=100), "retrieval", LengthDistribution.point(900))
    assert found == {"retrieval": (100, 100), "history": (100, 100)}
    found = p.answers_for(query(), "retrieval", LengthDistribution.point(900))
    assert found["retrieval"] == pytest.approx((900, 900), rel=0.2)
