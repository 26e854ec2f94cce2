"""How two servers are compared, and what one must not cost."""

from __future__ import annotations

import math

import pytest

from vllm_ext.report.intervals import Points, Ratio
from vllm_ext.simulation.plan import evidence
from vllm_ext.simulation.plan.candidates import DEFAULT, Candidate
from vllm_ext.simulation.plan.evidence import ATTAINMENT, MEAN, P99, TTFT_P90, Objective


def run(mean: float, *, p99: float = 100.0, ttft: float = 10.0, windows: list[float] | None = None) -> dict[str, float]:
    parts = {f"window_{number}.{MEAN}": value for number, value in enumerate(windows or [])}
    return {MEAN: mean, P99: p99, TTFT_P90: ttft, **parts}


def test_the_interval_is_students_over_the_windows_of_both_runs() -> None:
    """By hand: logs of 2, 4 and 2 have the mean 0.924 and the standard deviation 0.400; t is 4.303 with 2 freedoms."""
    found = evidence.ratio(run(5.0, windows=[1.0, 1.0, 2.0]), run(10.0, windows=[2.0, 4.0, 4.0]), MEAN)
    assert found.value == 2.0
    reach = 4.3027 * 0.40017 / math.sqrt(3)
    assert found.low == pytest.approx(math.exp(0.92420 - reach), rel=1e-4)
    assert found.high == pytest.approx(math.exp(0.92420 + reach), rel=1e-4)


def test_without_windows_nothing_is_sure() -> None:
    found = evidence.ratio(run(5.0), run(10.0), MEAN)
    assert (found.value, found.low, found.high) == (2.0, 0.0, math.inf)


def test_equal_runs_are_equal_for_certain() -> None:
    same = run(5.0, windows=[1.0, 2.0, 3.0])
    assert evidence.ratio(same, same, MEAN) == Ratio(1.0, 1.0, 1.0)


def shares(whole: float, *windows: float) -> dict[str, float]:
    return {ATTAINMENT: whole, **{f"window_{number}.{ATTAINMENT}": value for number, value in enumerate(windows)}}


def test_shares_of_met_objectives_are_compared_by_their_difference() -> None:
    """By hand: differences of 100, 80 and 90 points have the standard deviation 10; t is 4.303 with 2 freedoms.

    The first server meets nothing in two windows of three, where a ratio would be infinite.
    """
    found = evidence.compared(shares(0.95, 1.0, 0.9, 0.9), shares(0.02, 0.0, 0.1, 0.0), ATTAINMENT)
    reach = 4.3027 * 10 / math.sqrt(3)
    assert isinstance(found, Points)
    assert (found.value, found.low, found.high) == pytest.approx((93.0, 90 - reach, 100.0), rel=1e-4)
    assert str(found) == "+93.0 points (+65.2..+100.0)", "no share is more than all"
    assert evidence.compared(shares(0.9), shares(0.6), ATTAINMENT) == Points(pytest.approx(30.0), -100.0, 100.0)
    assert evidence.compared(run(5.0), run(10.0), MEAN) == evidence.ratio(run(5.0), run(10.0), MEAN)


def test_a_score_of_shares_is_in_points_however_few_the_server_as_it_is_meets() -> None:
    base, ours = {1.0: run(10.0) | shares(0.001)}, {1.0: run(10.0) | shares(0.011)}
    objective = Objective(with_slo=True)
    assert objective.score(ours, base) == pytest.approx(0.01)
    assert objective.told(0.01) == "+1.0 points of met objectives, with a tenth for the mean latency, in the search"
    assert Objective(with_slo=False).told(math.log(2)) == "2.00 times as good as the server as it is, in the search"


def test_the_score_is_the_mean_of_logarithms_over_loads_that_are_judged() -> None:
    base = {0.5: run(10.0), 1.0: run(20.0), 1.2: run(1000.0)}
    ours = {0.5: run(8.0), 1.0: run(5.0), 1.2: run(1.0)}
    expected = (math.log(1.25) + math.log(1.5) + math.log(4 / 1.5) / 4) / 2
    assert Objective(with_slo=False).score(ours, base) == pytest.approx(expected)


def test_with_objectives_what_is_met_goes_before_latency() -> None:
    base = {1.0: run(10.0) | {ATTAINMENT: 0.8}}
    quick, right = {1.0: run(2.0) | {ATTAINMENT: 0.6}}, {1.0: run(12.0) | {ATTAINMENT: 0.9}}
    objective = Objective(with_slo=True)
    assert objective.score(right, base) > 0 > objective.score(quick, base)
    faster = {1.0: run(8.0) | {ATTAINMENT: 0.9}}
    assert objective.score(faster, base) > objective.score(right, base)


@pytest.mark.parametrize(
    ("ours", "broken"),
    [
        (run(1.0, p99=104.0), ""),
        (run(1.0, p99=106.0), "P99 end-to-end 1.06 times as long at 0.9 of saturation"),
        (run(1.0, ttft=11.7), ""),
        (run(1.0, ttft=12.0), "P90 TTFT 1.20 times as long at 0.9 of saturation"),
    ],
)
def test_limits_hold_at_loads_that_are_judged(ours: dict[str, float], broken: str) -> None:
    base = {0.9: run(10.0), 1.0: run(10.0), 1.2: run(10.0)}
    objective = Objective(with_slo=False, short_ttft_ms=11.0)
    others = {1.0: run(10.0, ttft=900.0), 1.2: run(10.0, p99=900.0, ttft=900.0)}
    assert objective.broken({0.9: ours, **others}, base) == broken
    assert "at 1 of" in objective.broken({0.9: run(1.0), 1.0: run(1.0, p99=106.0)}, base)
    assert not objective.broken({0.9: run(1.0, p99=106.0, ttft=12.0)}, base, slack=0.05)


def test_a_short_ttft_may_be_longer() -> None:
    base = {0.5: run(10.0, ttft=100.0), 0.9: run(10.0, ttft=3000.0)}
    objective = Objective(with_slo=False)
    assert not objective.broken({0.5: run(9.0, ttft=990.0), 0.9: run(5.0, ttft=3200.0)}, base)
    assert "at 0.5" in objective.broken({0.5: run(9.0, ttft=1010.0), 0.9: run(5.0, ttft=300.0)}, base)
    assert not objective.broken({0.5: run(9.0, ttft=1010.0)}, base, slack=0.05), "a short run is noisy"


def test_who_pays_is_named_with_the_loads() -> None:
    base = {0.5: run(10.0), 1.0: run(10.0)}
    ours = {0.5: run(1.0, ttft=11.0), 1.0: run(1.0, p99=150.0, ttft=20.0)}
    assert evidence.who_pays(ours, base) == [
        "P99 end-to-end is longer: 1.50 times at 1",
        "P90 TTFT is longer: 1.10 times at 0.5, 2.00 times at 1",
    ]


def test_of_those_alike_the_one_that_changes_least_is_best() -> None:
    one, two = Candidate(tokens=256), Candidate(tokens=256, seats=128)
    assert evidence.best({DEFAULT: 0.0, one: 0.195, two: 0.2}) == one
    assert evidence.best({DEFAULT: 0.0, one: 0.15, two: 0.2}) == two
    assert evidence.best({DEFAULT: 0.0, one: 0.005}) == DEFAULT
