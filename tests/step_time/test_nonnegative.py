"""Non-negative least squares against SciPy's, and where it has nothing to go by."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from vllm_ext.step_time.nonnegative import Repeated, minimum


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 40))
def test_it_is_as_good_as_scipys(seed: int, unknowns: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((rows, unknowns)) * 10.0 ** rng.integers(-4, 4, unknowns)
    targets = rng.standard_normal(rows)
    found = minimum(features.T @ features, features.T @ targets)
    best = nnls(features, targets)[1]
    assert (found >= 0).all()
    assert np.linalg.norm(features @ found - targets) == pytest.approx(best, rel=1e-4, abs=1e-6)


def test_a_negative_slope_becomes_none_and_the_rest_is_fitted_without_it() -> None:
    """Targets 3, 2, 1 over x = 0, 1, 2: the best line without a falling slope is their mean."""
    features = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    found = minimum(features.T @ features, features.T @ np.array([3.0, 2.0, 1.0]))
    assert found == pytest.approx([2.0, 0.0])


def test_a_feature_that_is_always_0_gets_0() -> None:
    features = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert minimum(features.T @ features, features.T @ np.array([3.0, 6.0])) == pytest.approx([3.0, 0.0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_input_that_is_not_finite_gives_zeros(bad: float) -> None:
    assert minimum(np.array([[bad, 0.0], [0.0, 1.0]]), np.ones(2)).tolist() == [0.0, 0.0]
    assert minimum(np.eye(2), np.array([bad, 1.0])).tolist() == [0.0, 0.0]


@given(st.integers(0, 10_000))
def test_repeated_for_sums_that_change_it_gives_the_same(seed: int) -> None:
    """Targets that drift from one side of 0 to the other, so that the support changes again and again."""
    rng = np.random.default_rng(seed)
    repeated, gram, moment = Repeated(5), np.eye(5) * 1e-3, np.zeros(5)
    for step in range(60):
        x = rng.standard_normal(5)
        gram, moment = gram * 0.9 + np.outer(x, x), moment * 0.9 + x * math.sin(step / 5)
        assert repeated.minimum(gram, moment) == pytest.approx(minimum(gram, moment), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("gram", [np.zeros((3, 3)), np.ones((3, 3)), np.full((3, 3), math.nan)])
def test_repeated_survives_what_has_no_single_solution(gram: np.ndarray) -> None:
    found = Repeated(3).minimum(gram, gram @ np.ones(3))
    assert np.isfinite(found).all()
    assert (found >= 0).all()
