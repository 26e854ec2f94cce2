"""Arrival processes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from vllm_ext.simulation import arrivals


def test_same_seed_gives_same_times_and_another_seed_others() -> None:
    first = arrivals.poisson(rate_per_s=2.0, count=50, seed=7)
    assert np.array_equal(first, arrivals.poisson(rate_per_s=2.0, count=50, seed=7))
    assert not np.array_equal(first, arrivals.poisson(rate_per_s=2.0, count=50, seed=8))


def test_twice_the_rate_halves_every_time_so_that_loads_share_random_numbers() -> None:
    slow = arrivals.poisson(rate_per_s=3.0, count=100, seed=1)
    fast = arrivals.poisson(rate_per_s=6.0, count=100, seed=1)
    np.testing.assert_allclose(fast * 2, slow)


def test_gaps_are_exponential_with_the_wanted_mean() -> None:
    gaps = np.diff(arrivals.poisson(rate_per_s=4.0, count=40_000, seed=0))
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() == pytest.approx(0.25, rel=0.03), "standard deviation equals the mean for exponential gaps"


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rate_must_be_positive_and_finite(rate: float) -> None:
    with pytest.raises(ValueError, match="rate_per_s"):
        arrivals.poisson(rate_per_s=rate, count=1, seed=0)


def test_rescaling_keeps_the_burst_and_sets_the_mean_rate() -> None:
    stretched = arrivals.rescaled(np.array([100.0, 100.0, 101.0, 104.0]), rate_per_s=0.5)
    np.testing.assert_allclose(stretched, [0.0, 0.0, 1.5, 6.0])


@pytest.mark.parametrize("times", [[], [1.0], [2.0, 1.0], [3.0, 3.0]], ids=["none", "one", "decreasing", "no-span"])
def test_times_that_cannot_be_rescaled_are_refused(times: list[float]) -> None:
    with pytest.raises(ValueError, match="times_s"):
        arrivals.rescaled(np.array(times), rate_per_s=1.0)


def first(count: int, **kwargs: float) -> np.ndarray:
    return np.array(list(itertools.islice(arrivals.stream(seed=5, **kwargs), count)))


def test_endless_stream_with_cv_one_gives_the_times_of_the_poisson_process() -> None:
    expected = arrivals.poisson(rate_per_s=3.0, count=10_000, seed=5)
    assert np.array_equal(first(10_000, rate_per_s=3.0), expected)


@pytest.mark.parametrize("cv", [0.2, 1.0, 3.0])
def test_gamma_gaps_have_the_wanted_mean_and_coefficient_of_variation(cv: float) -> None:
    gaps = np.diff(first(100_000, rate_per_s=4.0, cv=cv))
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


def test_gamma_streams_of_two_rates_share_random_numbers() -> None:
    np.testing.assert_allclose(first(5000, rate_per_s=3.0, cv=2.0), first(5000, rate_per_s=6.0, cv=2.0) * 2)


@pytest.mark.parametrize(("field", "value"), [("rate_per_s", 0.0), ("cv", 0.0), ("cv", float("nan"))])
def test_stream_refuses_what_is_not_positive_before_it_begins(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        arrivals.stream(**({"rate_per_s": 1.0, "cv": 1.0} | {field: value}), seed=0)
