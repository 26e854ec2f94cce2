"""Bisection for the highest rate that meets constraints."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from vllm_ext.simulation.sweep.capacity import Capacity, CapacitySpec, Found, Metrics, expected_runs, search


def at(rate: float) -> Generator[float, Metrics, Metrics]:
    return (yield rate)


def found(settings: CapacitySpec, latency: Callable[[float], float], start: float = 1.0) -> Capacity:
    """Search the highest rate with a latency of at most 1."""
    rates = search(settings, start, lambda metrics: [] if metrics["latency"] <= 1 else ["latency<=1"], at)
    rate = next(rates)
    while True:
        try:
            rate = rates.send({"latency": latency(rate)})
        except StopIteration as stop:
            result: Capacity = stop.value
            return result


def tried(capacity: Capacity) -> list[float]:
    return [trial.rate_per_s for trial in capacity.trials]


def test_rate_doubles_to_a_bracket_which_is_then_halved() -> None:
    """Capacity 5: 1, 2, 4 hold, 8 does not; then sqrt(4 * 8), and so on on a logarithmic scale."""
    capacity = found(CapacitySpec(tolerance=0.1), lambda rate: rate / 5)
    assert tried(capacity) == [1.0, 2.0, 4.0, 8.0, 5.65685, 4.75683, 5.18736]
    assert capacity.found is Found.BRACKET
    assert (capacity.rate_per_s, capacity.upper and capacity.upper.rate_per_s) == (4.75683, 5.18736)
    assert capacity.lower is not None
    assert capacity.lower.metrics == {"latency": 4.75683 / 5}
    assert capacity.upper is not None
    assert capacity.upper.violated == ("latency<=1",)


def test_rate_shrinks_from_a_start_that_is_too_high_and_that_of_the_settings_wins() -> None:
    capacity = found(CapacitySpec(tolerance=0.5, start_per_s=30.0), lambda rate: rate / 5, start=1.0)
    assert tried(capacity) == [30.0, 15.0, 7.5, 3.75, 5.3033]
    assert capacity.rate_per_s == 3.75


@given(
    true=st.floats(0.02, 900), start=st.floats(0.001, 5000), tolerance=st.floats(0.002, 0.5), growth=st.floats(1.2, 10)
)
def test_bracket_holds_the_capacity_of_a_monotone_function(
    true: float, start: float, tolerance: float, growth: float
) -> None:
    settings = CapacitySpec(tolerance=tolerance, growth=growth)
    capacity = found(settings, lambda rate: rate / true, start)
    assert capacity.lower is not None
    assert capacity.upper is not None
    assert capacity.lower.rate_per_s <= true < capacity.upper.rate_per_s
    assert capacity.upper.rate_per_s <= capacity.lower.rate_per_s * (1 + tolerance)
    assert len(set(tried(capacity))) == len(capacity.trials)
    assert capacity.met_above == ()


def test_never_met_says_so_with_the_lowest_rate_as_the_upper_end() -> None:
    capacity = found(CapacitySpec(min_per_s=0.3), lambda rate: 2.0)
    assert (capacity.found, capacity.rate_per_s, capacity.lower) == (Found.NEVER_MET, None, None)
    assert tried(capacity) == [1.0, 0.5, 0.3]
    assert capacity.upper is not None
    assert capacity.upper.rate_per_s == 0.3


def test_always_met_says_so_with_the_highest_rate() -> None:
    capacity = found(CapacitySpec(max_per_s=5.0), lambda rate: 0.5)
    assert (capacity.found, capacity.rate_per_s, capacity.upper) == (Found.ALWAYS_MET, 5.0, None)
    assert tried(capacity) == [1.0, 2.0, 4.0, 5.0]


def noisy(rate: float) -> float:
    """Rises through 1 at 5, with waves: above 1 near 4.7, below it again near 5.3."""
    return rate / 5 + 0.1 * math.sin(rate * 10)


def test_noisy_bracket_is_still_one_where_the_answer_changes() -> None:
    capacity = found(CapacitySpec(tolerance=0.02, probes=3), noisy)
    assert len(set(tried(capacity))) == len(tried(capacity))
    assert capacity.lower is not None
    assert capacity.upper is not None
    assert noisy(capacity.lower.rate_per_s) <= 1 < noisy(capacity.upper.rate_per_s)
    assert 4.4 < capacity.lower.rate_per_s < capacity.upper.rate_per_s < 5.6


def test_probes_find_rates_above_the_bracket_that_meet_the_constraints_again() -> None:
    """Held up to 5 and from 6 to 7: bisection ends at 5, a probe sees 6 and more."""

    def broken(rate: float) -> float:
        return 0.5 if rate <= 5 or 6 <= rate <= 7 else 1.5

    silent = found(CapacitySpec(), broken)
    probed = found(CapacitySpec(probes=5), broken)
    assert probed.rate_per_s == silent.rate_per_s
    assert silent.met_above == ()
    assert probed.met_above
    assert all(6 <= rate <= 7 for rate in probed.met_above)


def test_expected_runs_are_about_those_of_a_search_that_starts_near() -> None:
    settings = CapacitySpec(tolerance=0.05)
    capacity = found(settings, lambda rate: rate / 5, start=4.0)
    assert len(capacity.trials) == expected_runs(settings)


def test_limits_out_of_order_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"min_per_s=2\.0: must be below max_per_s=1\.0"):
        CapacitySpec(min_per_s=2.0, max_per_s=1.0)


def test_error_of_a_constraint_ends_the_search() -> None:
    def unknown(metrics: Metrics) -> list[str]:
        raise ValueError("no such metric")

    rates = search(CapacitySpec(), 1.0, unknown, at)
    next(rates)
    with pytest.raises(ValueError, match="no such metric"):
        rates.send({})
