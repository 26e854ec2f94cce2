"""Measures: each worked by hand, and their laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from vllm_ext.prediction.evaluation.measures import MEASURES, Deciles, Predicted, bootstrap, score
from vllm_ext.simulation.metrics import BUCKET_TOKENS

LENGTHS = st.lists(st.integers(1, 3000), min_size=2, max_size=60)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def said(tokens: list[int], p90: list[int] | None = None, classes: list[int] | None = None) -> Predicted:
    return Predicted(ints(*tokens), ints(*(p90 or tokens)), None if classes is None else ints(*classes))


def test_every_measure_of_three_requests_worked_by_hand() -> None:
    deciles = Deciles(ints(*range(10, 110, 10)))  # 10, 20, ..., 100: edges 10, 20, ..., 90
    found = score(said([30, 199, 210], [39, 250, 210]), ints(40, 200, 100), deciles)
    # Bins of 200: 0 and 0, 0 and 1, 1 and 0. Tenths: 2 and 3, 9 and 9, 9 and 9.
    assert found["accuracy_200"] == pytest.approx(1 / 3)
    assert found["accuracy_deciles"] == pytest.approx(2 / 3)
    assert found["within_one_decile"] == 1
    assert found["relative_error"] == pytest.approx((10 / 40 + 1 / 200 + 110 / 100) / 3)
    assert found["median_relative_error"] == pytest.approx(0.25)
    assert found["total_error"] == pytest.approx(121 / 340)
    # Pairs: (1, 2) alike, (1, 3) alike, (2, 3) swapped.
    assert found["tau"] == pytest.approx(1 / 3)
    assert found["pair_accuracy"] == pytest.approx(2 / 3)
    assert found["coverage_p90"] == pytest.approx(2 / 3)
    half = (math.log(40 / 30) + math.log(200 / 199) + math.log(210 / 100)) / 2
    ninth = 0.9 * math.log(40 / 39) + 0.1 * math.log(250 / 200) + 0.1 * math.log(210 / 100)
    assert found["pinball"] == pytest.approx((half + ninth) / 3)
    assert found.keys() == MEASURES.keys()


def test_the_classes_a_predictor_names_count_for_exact_accuracy_only() -> None:
    deciles = Deciles(ints(*range(10, 110, 10)))
    found = score(said([30, 30], classes=[3, 0]), ints(40, 30), deciles)
    assert found["accuracy_deciles"] == 0.5
    assert found["within_one_decile"] == 1


def test_equal_predictions_count_half_a_pair() -> None:
    found = score(said([5, 5, 9]), ints(1, 2, 3), Deciles(ints(1, 2, 3)))
    assert found["pair_accuracy"] == pytest.approx((0.5 + 1 + 1) / 3)


def test_a_constant_orders_nothing() -> None:
    found = score(said([7, 7, 7]), ints(1, 2, 3), Deciles(ints(1, 2, 3)))
    assert (found["tau"], found["pair_accuracy"]) == (0.0, 0.5)


def test_tenths_hold_equal_shares_and_an_edge_belongs_below() -> None:
    deciles = Deciles(ints(*range(1, 101)))
    assert np.bincount(deciles.of(np.arange(1, 101))).tolist() == [10] * 10
    assert deciles.of([10, 11, 100, 5000]).tolist() == [0, 1, 9, 9]


def test_bins_are_those_of_the_simulator() -> None:
    from vllm_ext.prediction.evaluation.measures import BIN_TOKENS

    assert BIN_TOKENS == BUCKET_TOKENS


@given(LENGTHS, st.data())
def test_tau_is_kendalls_tau_b(lengths: list[int], data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(1, 3000), min_size=len(lengths), max_size=len(lengths)))
    expected = kendalltau(tokens, lengths).statistic
    found = score(said(tokens), ints(*lengths), Deciles(ints(*lengths)))["tau"]
    assert found == pytest.approx(0.0 if math.isnan(expected) else expected, abs=1e-9)


def test_order_of_many_rows_is_counted_in_pieces() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 500, size=1300)
    tokens = lengths + rng.integers(0, 300, size=1300)
    found = score(Predicted(tokens, tokens), lengths, Deciles(lengths))["tau"]
    assert found == pytest.approx(kendalltau(tokens, lengths).statistic, abs=1e-12)


@given(LENGTHS)
def test_the_truth_is_best_in_every_measure(lengths: list[int]) -> None:
    found = score(said(lengths), ints(*lengths), Deciles(ints(*lengths)))
    errors = ("relative_error", "median_relative_error", "total_error", "pinball")
    assert all(found[name] == 0 for name in errors)
    assert all(found[name] == 1 for name in ("accuracy_200", "accuracy_deciles", "coverage_p90"))
    assert found["tau"] == pytest.approx(1.0 if len(set(lengths)) > 1 else 0.0)


def test_lengths_and_predictions_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="must be as many"):
        score(said([1, 2]), ints(1), Deciles(ints(1)))


def test_bootstrap_tells_a_better_predictor_from_chance() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(10, 500, size=300)
    good, bad = lengths + rng.integers(0, 20, size=300), rng.integers(10, 500, size=300)
    deciles = Deciles(lengths)

    def tau(predicted: Predicted, truth: np.ndarray) -> float:
        return score(predicted, truth, deciles)["tau"]

    gap, error = bootstrap(Predicted(good, good), Predicted(bad, bad), lengths, tau, draws=40)
    assert gap > 10 * error > 0
    same, none = bootstrap(Predicted(good, good), Predicted(good, good), lengths, tau, draws=10)
    assert (same, none) == (0, 0)
