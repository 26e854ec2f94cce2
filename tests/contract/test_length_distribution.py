"""The distribution of an output length: against observed lengths, closed forms and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from vllm_ext.contract.length_distribution import CELLS, EDGES, LEVELS, LONGEST, LengthDistribution, Prediction, cells

CELL = 1.26
"""Widest ratio of a cell's bounds: what a quantile may miss by."""
lengths = st.lists(st.integers(1, 20_000), min_size=1, max_size=30)


def geometric(mean: float) -> LengthDistribution:
    upto = np.arange(1, 200_000)
    return LengthDistribution.of(upto, (1 - 1 / mean) ** (upto - 1) / mean)


def test_each_length_is_in_the_cell_that_ends_at_or_above_it() -> None:
    every = np.arange(1, 70_000)
    at = cells(every)
    assert np.all(EDGES[at] < every)
    assert np.all(every <= EDGES[at + 1])
    assert cells(10**7) == cells(LONGEST) == CELLS - 1
    assert 70 <= CELLS <= 90
    assert np.all(EDGES[9:] / EDGES[8:-1] <= CELL)


@given(lengths, st.sampled_from([*LEVELS, 1.0]))
def test_quantiles_are_those_of_what_was_observed(observed: list[int], q: float) -> None:
    true = float(np.quantile(observed, q, method="inverted_cdf"))
    said = LengthDistribution.of(observed).quantile(q)
    assert cells(said) == cells(true)
    if true <= 8:
        assert said == true


@given(lengths, st.integers(0, 30_000))
def test_what_is_beyond_is_beyond(observed: list[int], generated: int) -> None:
    distribution = LengthDistribution.of(observed)
    assert generated < distribution.quantile(0.5, generated) <= distribution.quantile(0.9, generated)
    assert 0 <= distribution.survival(generated) <= 1
    assert distribution.remaining(generated) >= 1
    assert distribution.gittins(generated) > 0


@given(lengths, st.sampled_from(EDGES[:60].tolist()))
def test_what_is_left_is_that_of_those_that_were_longer(observed: list[int], generated: int) -> None:
    distribution = LengthDistribution.of(observed)
    longer = [length for length in observed if length > generated]
    assert distribution.survival(generated) == pytest.approx(len(longer) / len(observed))
    if longer:
        true = float(np.quantile(longer, 0.5, method="inverted_cdf"))
        assert cells(distribution.quantile(0.5, generated)) == cells(true)
        width = np.max(np.diff(EDGES)[cells(longer)])
        assert distribution.remaining(generated) == pytest.approx(np.mean(longer) - generated, abs=width / 2 + 0.01)


def test_nobody_is_longer_than_the_longest() -> None:
    distribution = LengthDistribution.of([5, 7])
    assert (
        distribution.survival(7),
        distribution.quantile(0.5, 7),
        distribution.remaining(7),
        distribution.gittins(7),
    ) == (0, 14, 7, 1 / 7)


@pytest.mark.parametrize("tokens", [1, 2, 77, 4000, 123_456])
def test_a_point_is_exact(tokens: int) -> None:
    distribution = LengthDistribution.point(tokens)
    assert set(distribution.quantiles()) == {tokens}
    assert distribution.remaining(0) == tokens
    assert distribution.moment(-0.5) == pytest.approx(tokens**-0.5)
    assert distribution.gittins(0) == pytest.approx(1 / tokens, rel=1e-6)
    assert distribution.survival(tokens - 1) == 1
    assert distribution.capped(3).p50 == min(tokens, 3)


@pytest.mark.parametrize(("mu", "sigma"), [(5.0, 0.8), (3.0, 1.2), (7.0, 0.4)])
def test_a_log_normal_has_its_quantiles_and_moments(mu: float, sigma: float) -> None:
    distribution = LengthDistribution.lognormal(mu, sigma)
    for level, said in zip(LEVELS, distribution.quantiles(), strict=True):
        true = math.exp(mu + sigma * norm.ppf(level))
        assert said == pytest.approx(true, rel=0.03, abs=1)
    for power in (1, 2, -0.5):
        assert distribution.moment(power) == pytest.approx(math.exp(power * mu + (power * sigma) ** 2 / 2), rel=0.03)


@given(st.lists(st.integers(1, 10**6), min_size=len(LEVELS), max_size=len(LEVELS)).map(sorted))
def test_nine_quantiles_carry_a_law(quantiles: list[int]) -> None:
    distribution = LengthDistribution.through(quantiles)
    assert distribution.quantiles() == tuple(quantiles)
    again = LengthDistribution(distribution.mass, distribution.edges)
    for said, true in zip(again.quantiles(), quantiles, strict=True):
        assert abs(int(cells(said)) - int(cells(true))) <= 1
    most = max(1, quantiles[4])
    assert distribution.capped(most).quantiles() == tuple(min(each, most) for each in quantiles)


def test_a_law_survives_its_message() -> None:
    for distribution in (
        LengthDistribution.lognormal(5, 0.8),
        LengthDistribution.lognormal(3, 1.3).mixed(LengthDistribution.lognormal(6, 0.5), 0.3),
        geometric(40),
    ):
        again = LengthDistribution.through(distribution.quantiles())
        assert again.quantiles() == pytest.approx(distribution.quantiles(), rel=0.05, abs=1)
        assert again.moment(1) == pytest.approx(distribution.moment(1), rel=0.08)
        assert again.moment(-0.5) == pytest.approx(distribution.moment(-0.5), rel=0.05)


@pytest.mark.parametrize(
    "quantiles", [(), (5,) * 8, (0, *(5,) * 8), (9, *(5,) * 8), (*(5,) * 8, math.nan), (*(5,) * 8, math.inf)], ids=str
)
def test_what_are_no_quantiles_is_refused(quantiles: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="quantiles="):
        LengthDistribution.through(quantiles)


@pytest.mark.parametrize("mass", [np.zeros(CELLS), np.ones(3), -np.ones(CELLS), np.full(CELLS, math.nan)], ids=str)
def test_what_is_no_mass_is_refused(mass: np.ndarray) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match="mass="):
        LengthDistribution(mass)


def test_a_mixture_is_a_choice() -> None:
    short, long = LengthDistribution.of([4]), LengthDistribution.of([1000])
    mixed = short.mixed(long, 0.25)
    assert mixed.survival(4) == pytest.approx(0.25)
    assert (mixed.quantile(0.7), mixed.moment(1)) == (4, pytest.approx(0.75 * 4 + 0.25 * long.moment(1)))


@given(lengths, st.integers(1, 30_000))
def test_a_bound_moves_what_is_above_it(observed: list[int], most: int) -> None:
    distribution = LengthDistribution.of(observed)
    capped = distribution.capped(most)
    assert capped.quantile(1.0) <= most
    assert capped.survival(1) == pytest.approx(distribution.survival(1)) or most <= 8
    assert capped.moment(1) <= distribution.moment(1) + 1e-6


def test_who_would_be_longer_ends_at_the_bound() -> None:
    assert LengthDistribution.of([900]).capped(10).quantiles() == (10,) * len(LEVELS)
    half = LengthDistribution.of([3] * 6 + [900] * 4).capped(10)
    assert (half.p50, half.p90, half.quantile(0.5, 3), half.survival(10)) == (3, 10, 10, 0)


def test_the_gittins_index_of_no_memory_never_changes() -> None:
    """A geometric length of mean m ends with the next token with probability 1 / m, whatever was generated."""
    distribution = geometric(50)
    assert [distribution.gittins(g) for g in (0, 10, 60, 100)] == pytest.approx([1 / 50] * 4, rel=0.1)


def test_the_gittins_index_is_the_best_place_to_stop_at() -> None:
    """Two points: 4 with 0.6, 1000 with 0.4. To 4: 0.6 / 4; to the end: 1 / (0.6 * 4 + 0.4 * 1000)."""
    distribution = LengthDistribution.of([4] * 6 + [1000] * 4)
    assert distribution.gittins(0) == pytest.approx(0.6 / 4, rel=0.02)
    assert distribution.gittins(4) == pytest.approx(1 / 940, rel=0.1), "the rest is long, and counts from here"


def test_a_prediction_says_its_law() -> None:
    said = Prediction(LengthDistribution.of([5, 5, 5, 5, 5, 5, 5, 8, 8, 8]), "history")
    assert (said.tokens, said.p90, said.neighbours) == (5, 8, 0)
    assert math.isnan(said.similarity)
