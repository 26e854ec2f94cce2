"""Bounds on metrics: reading, judging, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.sweep.capacity import Constraint


@pytest.mark.parametrize(
    ("text", "metric", "op", "limit"),
    [
        ("tbt_p99_ms<=100", "tbt_p99_ms", "<=", 100.0),
        ("scheduling_delay_p50_s < 2", "scheduling_delay_p50_s", "<", 2.0),
        (" slo_attainment_fraction>=0.99 ", "slo_attainment_fraction", ">=", 0.99),
        ("tier.top-tier.slo_attainment_fraction > 9e-1", "tier.top-tier.slo_attainment_fraction", ">", 0.9),
    ],
    ids=["tight", "spaces", "around", "tier"],
)
def test_constraints_are_read(text: str, metric: str, op: str, limit: float) -> None:
    assert Constraint.parse(text) == Constraint(metric=metric, op=op, limit=limit)


@pytest.mark.parametrize(
    "text",
    ["", "tbt_p99_ms", "tbt_p99_ms=100", "tbt_p99_ms==100", "<=100", "tbt_p99_ms<=", "tbt_p99_ms<=ten",
     "tbt_p99_ms<=nan", "tbt_p99_ms<inf", "100>tbt_p99_ms", "a<1<2", "tbt p99<1"],
)  # fmt: skip
def test_other_texts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"constraint=.*as in 'tbt_p99_ms<=100'"):
        Constraint.parse(text)


@pytest.mark.parametrize(("op", "below", "at", "above"), [
    ("<", True, False, False), ("<=", True, True, False), (">", False, False, True), (">=", False, True, True),
])  # fmt: skip
def test_bounds_are_judged_at_and_around_the_limit(op: str, below: bool, at: bool, above: bool) -> None:
    constraint = Constraint(metric="x", op=op, limit=2.0)
    assert [constraint.meets({"x": value}) for value in (1.0, 2.0, 3.0)] == [below, at, above]


def test_a_run_in_which_nothing_finished_keeps_to_no_bound_and_a_misspelt_metric_is_an_error() -> None:
    assert not Constraint.parse("tbt_p99_ms<=100").meets({"requests": 0.0})
    with pytest.raises(ValueError, match="ttft_p99_ms"):
        Constraint.parse("ttft_p99_s<1").meets({"requests": 3.0, "ttft_p99_ms": 5.0})


@given(st.sampled_from(("<", "<=", ">", ">=")), st.floats(allow_nan=False, allow_infinity=False, width=16))
def test_what_is_printed_reads_back(op: str, limit: float) -> None:
    constraint = Constraint(metric="ttft_mean_ms", op=op, limit=limit)
    assert Constraint.parse(str(constraint)) == constraint
