"""Strategies and conditional estimates: worked by hand, against their definitions, and their laws."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_ext.prediction import blend, lognormal
from vllm_ext.prediction.blend import STRATEGIES, Alise, Shrunk, Strategy, conditional
from vllm_ext.prediction.estimate import Estimate
from vllm_ext.prediction.lognormal import LogNormal


class Found(NamedTuple):
    lengths: npt.NDArray[Any]
    similarities: npt.NDArray[Any]


def found(*pairs: tuple[int, float]) -> Found:
    """Neighbours as (length, similarity), in the types of the vector store."""
    return Found(np.array([p[0] for p in pairs], np.int64), np.array([p[1] for p in pairs], np.float32))


def decoder(p50: int, p90: int) -> Estimate:
    return Estimate(p50, p90, "decoder")


SIGMA_ONE = decoder(400, 1441)
"""400 * exp(1.2816) = 1441: sigma is 1."""
QUANTILES = st.tuples(st.integers(1, 5000), st.integers(0, 20_000)).map(lambda t: decoder(t[0], t[0] + t[1]))
PAIRS = st.lists(st.tuples(st.integers(1, 10**4), st.floats(-1, 1)), max_size=12)


# ---- both strategies


@pytest.mark.parametrize("name", STRATEGIES)
@given(pairs=PAIRS, decoded=st.none() | QUANTILES, max_tokens=st.integers(1, 10**5), generated=st.integers(0, 10**5))
def test_an_estimate_is_above_what_was_generated(
    name: str, pairs: list[tuple[int, float]], decoded: Estimate | None, max_tokens: int, generated: int
) -> None:
    e = blend.strategy(name).combine(found(*pairs), decoded, max_tokens, generated)
    if e is not None:
        assert generated < e.tokens <= e.p90 <= max(max_tokens, generated + 1)
        assert (e.source == "decoder") == (e.neighbours == 0) == math.isnan(e.similarity)
    assert decoded is None or e is not None


@pytest.mark.parametrize("chosen", [Alise(), Shrunk()], ids=STRATEGIES)
def test_who_knows_nothing_says_nothing(chosen: Strategy) -> None:
    assert chosen.combine(None, None, 100) is None
    assert chosen.combine(found(), None, 100, 5) is None
    assert chosen.combine(found((10, -0.5)), None, 100) is None


@pytest.mark.parametrize("chosen", [Alise(), Shrunk()], ids=STRATEGIES)
def test_without_neighbours_the_decoder_speaks(chosen: Strategy) -> None:
    assert chosen.combine(found(), decoder(40, 90), 1000) == decoder(40, 90)
    assert chosen.combine(None, decoder(40, 90), 64) == decoder(40, 64)


def test_an_unknown_strategy_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"strategy='best': must be one of \['alise', 'shrunk'\]"):
        blend.strategy("best")


# ---- alise


def test_alise_prefers_a_similar_prompt_whatever_the_decoder_says() -> None:
    e = Alise(min_similarity=0.7).combine(found((100, 0.9), (320, 0.75), (9, 0.5)), decoder(2000, 3000), 1000)
    assert e is not None
    assert e[:4] == (200, 320, "retrieval", 2)


def test_alise_falls_back_below_its_threshold() -> None:
    assert Alise(min_similarity=0.7).combine(found((100, 0.69)), decoder(40, 90), 1000) == decoder(40, 90)


@pytest.mark.parametrize(
    ("generated", "tokens"), [(0, 100), (99, 100), (100, 200), (199, 200), (200, 400), (450, 600), (700, 701)]
)
def test_an_outlived_estimate_doubles(generated: int, tokens: int) -> None:
    """At most max_tokens = 600; more only because a token above it was generated already."""
    e = Alise().combine(None, decoder(100, 150), 600, generated)
    assert e is not None
    assert e.tokens == tokens


def test_an_estimate_of_nothing_does_not_double_for_ever() -> None:
    assert Alise().combine(None, Estimate(0, 0, "decoder"), 600, 5)[:2] == (8, 8)  # type: ignore[index]


# ---- shrunk


def test_the_mixture_by_hand() -> None:
    """An identical prompt of 100 tokens weighs 1 and so does the decoder (tau = 1): half the mass lies at 100.

    The median is 100: less than half lies below, and with the neighbour's it is at least half. P90 leaves a tenth,
    which is a fifth of the decoder's half: 400 * exp(0.8416) = 928.
    """
    e = Shrunk(tau=1).combine(found((100, 1.0)), SIGMA_ONE, 10**4)
    assert e is not None
    assert e[:4] == (100, 929, "blend", 1)
    assert e.similarity == 1


def test_neighbours_that_ended_by_now_drop_out() -> None:
    at_100 = Shrunk().combine(found((100, 1.0)), SIGMA_ONE, 10**4, generated=100)
    alone = Shrunk().combine(None, SIGMA_ONE, 10**4, generated=100)
    assert at_100 is not None
    assert alone is not None
    assert at_100[:2] == alone[:2]


def test_many_neighbours_outweigh_the_decoder_and_distant_ones_do_not() -> None:
    near = Shrunk().combine(found(*[(100, 0.99)] * 32), SIGMA_ONE, 10**4)
    far = Shrunk().combine(found(*[(100, 0.02)] * 3), SIGMA_ONE, 10**4)
    assert near is not None
    assert far is not None
    assert near[:2] == (100, 100)
    assert 380 < far.tokens <= 400


def test_without_a_decoder_the_neighbours_speak() -> None:
    e = Shrunk().combine(found((100, 0.9), (110, 0.9), (90, 0.9)), None, 10**4)
    assert e is not None
    assert e.source == "retrieval"
    assert e.tokens == 100
    later = Shrunk().combine(found((100, 0.9), (110, 0.9), (90, 0.9)), None, 10**4, generated=300)
    assert later is not None
    assert 300 < later.tokens < 600


@given(
    pairs=st.lists(st.tuples(st.integers(1, 5000), st.floats(0.01, 1)), min_size=1, max_size=10),
    decoded=QUANTILES,
    q=st.sampled_from([0.1, 0.5, 0.9]),
    generated=st.integers(0, 3000),
    tau=st.floats(0.1, 10),
)
def test_the_mixture_s_quantile_is_one(
    pairs: list[tuple[int, float]], decoded: Estimate, q: float, generated: int, tau: float
) -> None:
    """P(L <= x | L > g) reaches q at x and not before, with the distribution written down plainly."""
    base = LogNormal.through(decoded.tokens, decoded.p90)
    lengths, weights = np.array([p[0] for p in pairs], float), np.array([p[1] for p in pairs])
    x = blend._Mixture(base, lengths, weights, tau).quantile_beyond(q, generated)

    def survival(at: float) -> float:
        return float((weights[lengths > at].sum() + tau * base.survival(at)) / (weights.sum() + tau))

    assume(survival(generated) > 1e-9)
    assert x > generated or math.isclose(x, generated)
    wanted = (1 - q) * survival(generated)
    assert survival(x * (1 + 1e-7)) <= wanted * (1 + 1e-4)
    assert survival(x * (1 - 1e-7)) >= wanted * (1 - 1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"width": 0.0}, "width=0.0"), ({"tau": math.nan}, "tau=nan"), ({"min_similarity": 2.0}, "min_similarity=2.0")],
)
def test_wrong_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shrunk(**options)
    with pytest.raises(ValueError, match="min_similarity=-2"):
        Alise(min_similarity=-2)


# ---- conditional, and the log-normal


def test_what_remains_by_hand() -> None:
    """P50 400, sigma 1. After 400 tokens half is left; its median is the 75 % quantile 400 exp(0.6745) = 785,
    its P90 the 95 % quantile 400 exp(1.6449) = 2072.1, rounded up."""
    assert conditional(SIGMA_ONE, 400)[:2] == (785, 2073)


def test_nothing_changes_before_the_first_token() -> None:
    assert conditional(SIGMA_ONE, 0) == SIGMA_ONE
    assert conditional(decoder(7, 7), 0) == decoder(7, 7)


@given(estimate=QUANTILES, generated=st.lists(st.integers(0, 10**7), min_size=2, max_size=8))
def test_a_conditional_estimate_grows_with_what_was_generated(estimate: Estimate, generated: list[int]) -> None:
    before = (estimate.tokens, estimate.p90)
    for done in sorted(generated):
        e = conditional(estimate, done)
        assert e.tokens > done
        assert before[0] <= e.tokens <= e.p90
        assert before[1] <= e.p90
        before = (e.tokens, e.p90)


def test_the_client_s_bound_holds_and_wrong_counts_are_refused() -> None:
    assert conditional(SIGMA_ONE, 400, 500)[:2] == (500, 500)
    with pytest.raises(ValueError, match="generated=-1"):
        conditional(SIGMA_ONE, -1)


@given(p50=st.integers(1, 10**5), ratio=st.floats(2, 50))
def test_the_log_normal_has_the_quantiles_it_was_drawn_through(p50: int, ratio: float) -> None:
    law = LogNormal.through(p50, p50 * ratio)
    assert law.survival(p50) == pytest.approx(0.5)
    assert law.survival(p50 * ratio) == pytest.approx(0.1)
    assert law.length_at(0.1) == pytest.approx(p50 * ratio)


def test_without_spread_there_is_some() -> None:
    assert LogNormal.through(100, 100).sigma == lognormal.MIN_SIGMA > 0


@given(z=st.floats(-5, 37), q=st.floats(0.01, 0.99))
def test_the_tail_s_expansion_agrees_with_the_exact_one(z: float, q: float) -> None:
    """Beyond 30 the expansion is used; up to 37 the exact probability is a float still."""
    law = LogNormal(5.0, 0.8)
    generated = math.exp(law.mu + law.sigma * z)
    x = law.quantile_beyond(q, generated)
    exact = law.length_at((1 - q) * law.survival(generated))
    assert (x - generated) == pytest.approx(exact - generated, rel=1e-4)
    assert x > generated


def test_far_beyond_every_probability_it_still_answers() -> None:
    law = LogNormal.through(10, 12)
    assert law.survival(10**12) == 0
    assert 10**12 < law.quantile_beyond(0.5, 10**12) < 1.1 * 10**12
