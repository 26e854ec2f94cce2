"""Ratios: which way is better, and what a measure would be at the ends of their intervals."""

from __future__ import annotations

import math

import pytest

from vllm_ext.report.intervals import Points, Ratio, times_better


def test_less_is_better_unless_more_is() -> None:
    assert times_better(2.0, 3.0) == 1.5
    assert times_better(2.0, 3.0, higher=True) == pytest.approx(2 / 3)
    assert times_better(0.0, 0.0) == 1.0
    assert times_better(0.0, 3.0) == math.inf


def test_a_band_holds_the_baseline_and_moves_ours() -> None:
    over = Ratio(2.0, 1.6, 2.5)
    assert over.band(5.0) == pytest.approx((4.0, 6.25)), "of a baseline of 10"
    assert Points(40.0, 30.0, 55.0).band(0.8) == pytest.approx((0.7, 0.95)), "of a share of 0.4"
    assert Points(40.0, 30.0, 70.0).band(0.8)[1] == 1.0, "no share is larger"


@pytest.mark.parametrize("over", [Ratio(2.0, 0.0, math.inf), Ratio(math.nan, 0.0, math.inf)])
def test_an_open_interval_has_no_band(over: Ratio) -> None:
    assert all(map(math.isnan, over.band(5.0)))


def test_what_is_half_as_good_is_twice_as_bad() -> None:
    assert Ratio(0.5, 0.4, 0.8).inverse == Ratio(2.0, 1.25, 2.5)
