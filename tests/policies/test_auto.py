"""The policies of `auto`: remaining time until an objective presses, and who joins past those that do not fit."""

from __future__ import annotations

import math

import pytest

from vllm_ext.config import ConfigError
from vllm_ext.policies.admission.foresight_fit import ForesightFit
from vllm_ext.policies.ordering.pressing import PRESSING, RELEGATED, WILLING, PressingFirst
from vllm_ext.scheduling.plan import AGED, AdmissionPlan
from vllm_ext.scheduling.views import Pace, RequestView
from vllm_ext.slo import Slo

from .pool_step import PoolStep

PACE = Pace(step_s=0.05, longest_step_s=0.1, chunk_tokens=1000.0)


def waiting(
    name: str, prompt: int = 100, *, slo: Slo | None = None, left_s: float = 1.0, **fields: object
) -> RequestView:
    values = {"waiting_since": 100.0, "pace": PACE, "slo": slo or Slo(), "max_tokens": 20, **fields}
    return RequestView(name, 100.0, prompt, predicted_remaining_s=left_s, num_blocks=-(-prompt // 16), **values)


def order(*requests: RequestView, now: float = 100.0) -> list[str]:
    policy = PressingFirst()
    keys = {r.req_id: policy.rank(r, now).key for r in requests}
    return sorted(keys, key=keys.__getitem__)


def test_without_objectives_the_shortest_goes_first() -> None:
    assert order(waiting("long", left_s=9.0), waiting("short", left_s=0.1), waiting("middle", left_s=2.0)) == [
        "short",
        "middle",
        "long",
    ]
    first = waiting("low", left_s=0.1, priority=5)
    assert order(first, waiting("high", left_s=9.0)) == ["high", "low"]


def test_an_objective_counts_once_it_presses_and_no_more_when_it_is_lost() -> None:
    policy = PressingFirst(horizon_s=2.0)
    request = waiting("slo", slo=Slo(ttft_s=10.0), left_s=30.0, prefill_s=0.5)
    early = policy.rank(request, 100.0)
    assert (early.level, early.until) == (WILLING, pytest.approx(107.9))
    pressing = policy.rank(request, early.until)
    assert (pressing.level, pressing.until) == (PRESSING, pytest.approx(109.5))
    lost = policy.rank(request, pressing.until)
    assert lost.level == RELEGATED
    short = waiting("short", left_s=0.01)
    assert pressing.key < policy.rank(short, 108.0).key < lost.key


def test_who_runs_with_an_objective_gives_way_to_nobody_who_waits() -> None:
    policy = PressingFirst()
    runs = waiting("r", slo=Slo(tbt_s=0.5), num_output_tokens=3, num_computed_tokens=103, waiting_since=None)
    pressing = waiting("w", slo=Slo(ttft_s=0.2))
    assert policy.rank(runs, 105.0).key < policy.rank(pressing, 100.0).key
    looser = runs._replace(slo=Slo(tbt_s=5.0))
    assert policy.rank(runs, 105.0).key < policy.rank(looser, 105.0).key, "most time left is the last, and leaves"
    assert policy.rank(runs._replace(missed=True), 105.0).level == RELEGATED


def test_nobody_waits_longer_than_the_age_limit() -> None:
    policy = PressingFirst(age_limit_s=20.0)
    lost = waiting("lost", slo=Slo(ttft_s=0.1), prefill_s=1.0)
    assert policy.rank(lost, 110.0).until == pytest.approx(120.0)
    assert policy.rank(lost, 120.0) == ((float(AGED),), math.inf, AGED)


def pool(*queue: RequestView, blocks: int = 20, **fields: object) -> PoolStep:
    return PoolStep(queue=queue, num_total_blocks=100, num_free_blocks=blocks, token_budget=500, pace=PACE, **fields)


def joins(plan: AdmissionPlan, step: PoolStep) -> list[str]:
    assert plan.max_running is not None
    free = [r.req_id for r in step.queue if r.req_id not in plan.hold]
    return free[: plan.max_running - step.num_running]


def test_one_that_does_not_fit_holds_nobody_up() -> None:
    queue = waiting("a", 100), waiting("large", 400), waiting("b", 60), waiting("c", 200)
    step = pool(*queue, running=(waiting("r", num_computed_tokens=100),))
    assert joins(ForesightFit(reserve=0.0).plan(step), step) == ["a", "b"], "7 + 4 blocks; 25 and 13 are too many"
    step.aged = frozenset({"large"})
    assert joins(ForesightFit(reserve=0.0).plan(step), step) == ["a"], "nobody passes one that waited too long"


def test_what_fits_now_but_not_at_the_peak_stays_out() -> None:
    running = waiting("r", 800, num_computed_tokens=800, num_output_tokens=1, max_tokens=700, waiting_since=None)
    step = pool(
        waiting("w", 100, max_tokens=700), running=(running,), blocks=49, finished=(650,) * 60, max_model_len=4096
    )
    assert joins(ForesightFit(reserve=0.0).plan(step), step) == []
    brief = pool(
        waiting("w", 100, max_tokens=700), running=(running,), blocks=49, finished=(30,) * 60, max_model_len=4096
    )
    assert joins(ForesightFit(reserve=0.0).plan(brief), brief) == ["w"]


def test_alone_a_request_joins_whatever_it_needs() -> None:
    step = pool(waiting("huge", 5000), blocks=20)
    assert joins(ForesightFit().plan(step), step) == ["huge"]
    assert ForesightFit().plan(pool()) == AdmissionPlan()


@pytest.mark.parametrize(
    ("policy", "field", "value"),
    [
        (PressingFirst, "horizon_s", -1.0),
        (PressingFirst, "age_limit_s", 0.0),
        (PressingFirst, "num_levels", 0),
        (ForesightFit, "gain_ratio", 0.0),
        (ForesightFit, "reserve", 1.0),
    ],
)
def test_bad_parameters_are_refused_by_name(policy: type, field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        policy(**{field: value})
