"""The quality of recent predictions: worked by hand, and against the definition pair by pair."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.predictor.quality import Quality

lengths = st.integers(1, 6)


def judged(*rows: tuple[int, int, int]) -> Quality:
    quality = Quality()
    for row in rows:
        quality.add(*row)
    return quality


def tau_by_definition(pairs: list[tuple[int, int]]) -> float:
    """Kendall's tau-b: (concordant - discordant) / sqrt(pairs untied in x * pairs untied in y)."""
    score = untied_x = untied_y = 0
    for i, (x, y) in enumerate(pairs):
        for other_x, other_y in pairs[:i]:
            signs = [(a > b) - (a < b) for a, b in ((x, other_x), (y, other_y))]
            score += signs[0] * signs[1]
            untied_x += signs[0] != 0
            untied_y += signs[1] != 0
    return score / math.sqrt(untied_x * untied_y) if untied_x * untied_y else 0.0


def test_before_anything_is_judged_all_is_zero() -> None:
    quality = Quality()
    assert (len(quality), quality.coverage(), quality.relative_error(), quality.tau()) == (0, 0.0, 0.0, 0.0)


def test_one_example_by_hand() -> None:
    quality = judged((10, 20, 10), (30, 40, 20), (5, 8, 20), (100, 110, 50))
    assert len(quality) == 4
    assert quality.coverage() == 3 / 4, "of the third, 20 tokens came where 8 were the bound"
    assert quality.relative_error() == pytest.approx((0.5 + 0.75) / 2), "median of 0, 0.5, 0.75 and 1"
    # Of the six pairs, four are in order, that of the first and the third is not, and (30, 5) is tied in truth.
    assert quality.tau() == pytest.approx((4 - 1) / math.sqrt(6 * 5))


def test_a_length_at_its_bound_is_covered() -> None:
    assert judged((10, 20, 20)).coverage() == 1.0
    assert judged((10, 20, 21)).coverage() == 0.0


@pytest.mark.parametrize(
    ("rows", "tau"),
    [
        ([(1, 9, 10), (2, 9, 20), (3, 9, 30)], 1.0),
        ([(3, 9, 10), (2, 9, 20), (1, 9, 30)], -1.0),
        ([(7, 9, 10), (7, 9, 20), (7, 9, 30)], 0.0),
        ([(1, 9, 10), (2, 9, 10)], 0.0),
        ([(1, 9, 10)], 0.0),
    ],
    ids=["same order", "reversed", "constant prediction", "constant truth", "a single one"],
)
def test_tau_at_its_ends(rows: list[tuple[int, int, int]], tau: float) -> None:
    assert judged(*rows).tau() == pytest.approx(tau)


@given(st.lists(st.tuples(lengths, lengths), max_size=30))
def test_tau_is_the_one_of_the_definition(pairs: list[tuple[int, int]]) -> None:
    quality = judged(*((predicted, predicted + 3, true) for predicted, true in pairs))
    assert quality.tau() == pytest.approx(tau_by_definition(pairs))


def test_only_recent_predictions_count() -> None:
    quality = Quality()
    for _ in range(500):
        quality.add(1, 1, 100)
    assert quality.coverage() == 0.0
    for i in range(500):
        quality.add(10 + i, 1000 + i, 10 + i)
    assert (len(quality), quality.coverage(), quality.relative_error(), quality.tau()) == (500, 1.0, 0.0, 1.0)


def test_tau_looks_at_the_last_two_hundred() -> None:
    quality = Quality()
    for i in range(200):
        quality.add(1000 - i, 2000, 1 + i)
    assert quality.tau() == pytest.approx(-1.0)
    for i in range(200):
        quality.add(1 + i, 2000, 1 + i)
    assert quality.tau() == pytest.approx(1.0)
