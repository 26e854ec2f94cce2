"""The verdict of `vllm-ext plan`, from tables of made-up metrics."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from vllm_ext.simulation.plan import ATTAINMENT, BASELINE, LATENCY, Candidate, Objective, decide

DEFAULT = Candidate(name=BASELINE, system="upstream-fcfs")
OURS = Candidate(name="alise", system="alise", flags=("--scheduler-cls", "alise"))
OTHER = Candidate(name="tuned", system="upstream-fcfs")
LOADS = (0.5, 1.0, 2.0)
NO_SLO = Objective(with_slo=False)
SLO = Objective(with_slo=True, min_attainment=0.9)


def table(metric: str, **values: tuple[float, float, float]) -> dict[tuple[str, float], Mapping[str, float]]:
    names = {"default": BASELINE}
    return {
        (names.get(name, name), load): {metric: value}
        for name, row in values.items()
        for load, value in zip(LOADS, row, strict=True)
    }


def test_lower_latency_wins_and_the_loads_without_gain_are_named() -> None:
    measured = table(LATENCY, default=(40, 50, 400), alise=(40, 45, 100))
    verdict = decide(measured, [DEFAULT, OURS], LOADS, NO_SLO)
    assert verdict.choice is OURS
    assert verdict.helps_at == (1.0, 2.0)
    assert verdict.nothing_helps_at == (0.5,)
    assert "+10 % less mean normalised latency at your load" in verdict.reason
    assert "+75 %" in verdict.reason


def test_defaults_stay_when_nothing_is_worthwhile() -> None:
    measured = table(LATENCY, default=(40, 50, 60), alise=(39, 49, 58))
    verdict = decide(measured, [DEFAULT, OURS], LOADS, NO_SLO)
    assert verdict.choice is DEFAULT
    assert verdict.helps_at == ()
    assert verdict.nothing_helps_at == LOADS


def test_gain_under_overload_does_not_excuse_a_loss_at_the_users_own_load() -> None:
    measured = table(LATENCY, default=(40, 50, 400), alise=(40, 60, 100))
    assert decide(measured, [DEFAULT, OURS], LOADS, NO_SLO).choice is DEFAULT


def test_with_slos_the_candidate_that_carries_the_highest_load_wins() -> None:
    measured = table(ATTAINMENT, default=(1.0, 0.95, 0.2), alise=(1.0, 0.97, 0.5), tuned=(1.0, 0.94, 0.91))
    verdict = decide(measured, [DEFAULT, OURS, OTHER], LOADS, SLO)
    assert verdict.choice is OTHER
    assert verdict.carried_load == {BASELINE: 1.0, "alise": 1.0, "tuned": 2.0}
    assert "SLOs hold up to 2 times your load (1 with the defaults)" in verdict.reason


def test_load_counts_as_carried_only_if_all_lighter_ones_are() -> None:
    measured = table(ATTAINMENT, default=(0.5, 1.0, 1.0), alise=(1.0, 0.9, 0.89))
    verdict = decide(measured, [DEFAULT, OURS], LOADS, Objective(with_slo=True, min_attainment=0.9))
    assert verdict.carried_load == {BASELINE: 0.0, "alise": 1.0}


def test_first_of_equal_candidates_is_chosen_so_that_the_order_is_a_preference() -> None:
    measured = table(LATENCY, default=(40, 50, 400), alise=(40, 40, 100), tuned=(40, 40, 100))
    assert decide(measured, [DEFAULT, OURS, OTHER], LOADS, NO_SLO).choice is OURS
    assert decide(measured, [DEFAULT, OTHER, OURS], LOADS, NO_SLO).choice is OTHER


def test_table_without_the_baseline_is_refused() -> None:
    with pytest.raises(ValueError, match="'vLLM default' must be among them"):
        decide({}, [OURS], LOADS, NO_SLO)
