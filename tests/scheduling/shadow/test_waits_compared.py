"""Sums, quantiles and the line of the log."""

from __future__ import annotations

import pytest

from vllm_ext.scheduling.shadow.waits_compared import Waits, WaitsCompared


def test_a_quantile_is_exact_to_a_twentieth() -> None:
    waits = Waits()
    for number in range(1, 1001):
        waits.add(number / 10)
    assert waits.quantile(0.99) == pytest.approx(99.0, rel=0.05)
    assert waits.quantile(1.0) == waits.longest_s == 100.0
    assert Waits().quantile(0.99) == 0.0


def test_a_difference_that_nobody_notices_is_none() -> None:
    compared = WaitsCompared()
    for real_s, shadow_s in ((1.0, 1.05), (1.0, 0.5), (1.0, 3.0)):
        compared.add(real_s, shadow_s, 2.0)
    assert compared.outcomes == {"sooner": 1, "same": 1, "later": 1}
    assert (compared.requests, compared.service_s) == (3, 6.0)


def test_the_line_says_who_gains_and_who_pays() -> None:
    compared = WaitsCompared()
    for _ in range(99):
        compared.add(2.0, 1.0, 1.0)
    compared.add(2.0, 11.0, 1.0)
    assert str(compared) == (
        "100 requests, mean wait 2.00 s, it would have been 1.10 s (45% lower); P99 2 s -> 1.03 s, "
        "longest 2 s -> 11 s; 1% of the requests would have waited longer"
    )


def test_where_nobody_waited_no_order_matters() -> None:
    compared = WaitsCompared()
    compared.add(0.02, 0.01, 5.0)
    assert str(compared) == "1 requests, nobody waited: no order would change anything"
