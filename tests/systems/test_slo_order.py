"""Orders by objectives and by service: remaining time to the SLO, and skip-join queues."""

from __future__ import annotations

import math
from typing import Any

import pytest

from vllm_ext.contract import AGED, RequestView, StepStats
from vllm_ext.contract.objective import Slo
from vllm_ext.contract.slack import READING_TBT_S, slack, ttft_s
from vllm_ext.systems.accelgen import RELEGATED, SloSlack
from vllm_ext.systems.baselines import SkipJoin

STEP_STATS = StepStats(step_s=0.04, longest_step_s=0.05, chunk_tokens=500.0, preemption_s=0.01)


def waiting(name: str = "w", *, arrived: float = 100.0, prompt: int = 400, **fields: Any) -> RequestView:
    return RequestView(name, arrived, prompt, **{"waiting_since": arrived, "step_stats": STEP_STATS, **fields})


def test_remaining_time_is_objective_less_wait_less_execution() -> None:
    """1200 prompt tokens in chunks of 500 are 3 steps of 50 ms: T_r = 2 - 0.5 - 0.15."""
    request = waiting(prompt=1200, slo=Slo(ttft_s=2.0))
    assert slack(request, 100.5).start_by - 100.5 == pytest.approx(1.35)
    assert slack(request, 101.0).start_by == slack(request, 100.5).start_by, "it stands still while the request waits"


def test_a_decode_that_returns_has_not_waited() -> None:
    """T_r = 0.2 - 0 - 0.05, whenever it is asked for; one that was preempted waits from then on."""
    running = waiting(slo=Slo(tbt_s=0.2), num_output_tokens=3, num_computed_tokens=402, waiting_since=None)
    for now in (101.0, 107.0):
        assert slack(running, now).start_by - now == pytest.approx(0.15)
    preempted = running._replace(waiting_since=110.0, num_computed_tokens=0)
    assert slack(preempted, 110.1).start_by == pytest.approx(110.0 + 0.2 - 0.05)


def test_a_job_spreads_its_slack_over_its_steps_and_carries_what_is_left() -> None:
    """1 chunk, 9 tokens: T_e = 0.05 + 9 * (0.05 + 0.01) = 0.59, so (10.59 - 0.59) / 10 = 1 s may be lost per step."""
    job = waiting(slo=Slo(e2e_s=10.59), predicted_output_tokens=9)
    assert slack(job, 100.0).start_by == pytest.approx(101.0)
    # After its chunk and 4 tokens it may have lost 5 s in all; at 100.3 it has lost nothing, at 103 s 2.7 s.
    later = job._replace(num_computed_tokens=404, num_output_tokens=4, waiting_since=None)
    assert slack(later, 100.3).start_by - 100.3 == pytest.approx(6.0, abs=0.01)
    assert slack(later, 103.0).start_by - 103.0 == pytest.approx(3.3, abs=0.01)


def test_who_names_no_objective_is_read_at_reading_speed() -> None:
    request = waiting(num_output_tokens=1, num_computed_tokens=400, waiting_since=None)
    assert slack(request, 100.0).start_by - 100.0 == pytest.approx(READING_TBT_S - 0.05)
    assert ttft_s(waiting(prompt_s=0.01)) == 1.0
    assert ttft_s(waiting(prompt=512, prompt_s=2.0)) == 10.0
    assert ttft_s(waiting(prompt=400, prompt_s=2.0)) == pytest.approx(10.0 * 512 / 400), "by bucket, not by token"


def test_only_objectives_that_were_named_are_lost() -> None:
    old = waiting(arrived=0.0, slo=Slo(tbt_s=0.2), prefill_s=0.5, waiting_since=100.0)
    assert slack(old, 100.0).start_by < 100.0
    assert slack(old, 100.0).lost_at == math.inf, "nobody named a TTFT"
    preempted = old._replace(slo=Slo(ttft_s=1.0), num_output_tokens=3)
    assert slack(preempted, 100.0).lost_at == math.inf, "nobody named a TBT"
    assert slack(preempted._replace(missed=True), 100.0).lost_at == -math.inf


def test_order_is_by_time_left_and_ends_with_those_who_run() -> None:
    order = SloSlack()
    tight = waiting("tight", arrived=101.0, slo=Slo(ttft_s=0.5))
    loose = waiting("loose", arrived=100.0, slo=Slo(ttft_s=5.0))
    long = waiting("long", arrived=100.0, prompt=5000, slo=Slo(ttft_s=5.0))
    keys = {r.req_id: order.rank(r, 101.0).key for r in (tight, loose, long)}
    assert sorted(keys, key=keys.__getitem__) == ["tight", "long", "loose"]
    run = [
        waiting(name, slo=Slo(tbt_s=tbt), num_output_tokens=2, num_computed_tokens=401, waiting_since=None)
        for name, tbt in (("slow", 1.0), ("fast", 0.1))
    ]
    assert order.rank(run[1], 105.0).key < order.rank(run[0], 103.0).key, "the loosest leaves first, whenever asked"


def test_a_lost_request_goes_last_when_it_is_lost() -> None:
    """1 s less the 0.2 s of its prompt and a mean step of 0.04 s."""
    order = SloSlack(press_steps=0)
    request = waiting(slo=Slo(ttft_s=1.0), prefill_s=0.2)
    rank = order.rank(request, 100.1)
    assert rank.until_s == pytest.approx(100.76, abs=1e-6)
    assert SloSlack(lost_steps=0, press_steps=0).rank(request, 100.1).until_s == pytest.approx(100.8, abs=1e-6)
    lost = order.rank(request, rank.until_s)
    assert (lost.level, lost.key > rank.key) == (RELEGATED, True)
    assert order.rank(waiting(arrived=200.0, slo=Slo(ttft_s=60.0)), 200.0).key < lost.key
    kept = SloSlack(relegate=False).rank(request, 105.0)
    assert kept.level != RELEGATED


def test_a_request_presses_some_long_steps_before_it_must_run_and_no_more_when_it_is_lost() -> None:
    order, request = SloSlack(press_steps=4.0), waiting(slo=Slo(ttft_s=1.0), prefill_s=0.2)
    early = order.rank(request, 100.1)
    assert not early.presses
    pressing = order.rank(request, early.until_s)
    assert pressing.presses
    assert pressing.key == early.key, "the order is that of the time left all along"
    assert not order.rank(request, pressing.until_s).presses
    assert SloSlack(press_steps=8.0).rank(request, 100.1).until_s < early.until_s


def test_who_begins_to_answer_is_asked_again_once() -> None:
    """Its first token ends one objective and begins another; from then on the time left hardly moves."""
    order, runs = SloSlack(), waiting(slo=Slo(ttft_s=1.0, tbt_s=0.2))._replace(waiting_since=None)
    assert order.rank(runs, 100.0).until_tokens == 1
    assert order.rank(runs._replace(num_output_tokens=1, num_computed_tokens=400), 100.0).until_tokens == math.inf


def test_who_has_waited_long_has_a_share_of_admissions_and_is_not_pushed_out_again() -> None:
    order = SloSlack(age_limit_s=10.0)
    assert order.age_limit == (10.0, 0.1)
    lost = waiting(slo=Slo(ttft_s=1.0))
    assert order.rank(lost, 109.0) == order.rank(lost, 111.0), "the scheduler gives turns; ranks stay"
    runs = lost._replace(waiting_since=None, waited_s=10.0)
    aged = order.rank(runs, 110.0)
    assert (aged.level, aged.until_s, aged.until_tokens, aged.older_only_s) == (AGED, math.inf, math.inf, -math.inf)
    assert aged.key < order.rank(waiting(arrived=110.0, slo=Slo(ttft_s=0.01)), 110.0).key
    assert order.rank(runs._replace(waited_s=9.0), 110.0).level == 1


@pytest.mark.parametrize(
    ("prompt_s", "tokens", "level"),
    [
        (0.05, 0, 0),  # fits the first quantum of 0.1 s
        (0.15, 0, 1),  # skips the first queue
        (5.00, 0, 3),  # no quantum is long enough: the last queue
        (0.05, 1, 0),  # 0.05 + 0.04 served
        (0.05, 2, 1),  # 0.13: the first quantum is used up
        (0.15, 1, 1),  # 0.19 of 0.2
        (0.15, 2, 2),
        (0.05, 6, 1),  # 0.29 < 0.1 + 0.2
        (0.05, 7, 2),
        (0.05, 99, 3),
    ],
)
def test_a_request_joins_where_its_prefill_fits_and_sinks_by_its_quanta(
    prompt_s: float, tokens: int, level: int
) -> None:
    request = waiting(prompt_s=prompt_s, num_output_tokens=tokens)
    assert SkipJoin(num_levels=4).level(request) == level


def test_who_waited_too_long_goes_first() -> None:
    order = SkipJoin(starve_limit_s=5.0)
    request = waiting(prompt_s=9.0)
    young, aged = order.rank(request, 104.0), order.rank(request, 105.0)
    assert (young.until_s, young.older_only_s) == (105.0, 105.0)
    assert aged.key < order.rank(waiting(arrived=105.0), 105.0).key
    assert (aged.level, aged.until_tokens, aged.older_only_s) == (AGED, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("prompt_s", "tokens", "until"),
    [
        (0.05, 0, 1.25),  # 50 ms are left of the first quantum, and a token takes 40
        (0.05, 1, 2),  # 10 ms: no earlier than at the next token
        (0.15, 0, 1.25),
        (0.05, 2, 2 + 0.17 / 0.04),  # of the second quantum, 0.2 s, 30 ms are used
        (5.00, 0, math.inf),  # the last queue has no end
    ],
)
def test_a_running_request_is_ranked_again_when_its_quantum_is_used_up(
    prompt_s: float, tokens: int, until: float
) -> None:
    order, request = SkipJoin(num_levels=4), waiting(prompt_s=prompt_s, num_output_tokens=tokens)
    rank = order.rank(request._replace(waiting_since=None), 100.0)
    assert (rank.until_s, rank.older_only_s) == (math.inf, math.inf)
    assert rank.until_tokens == pytest.approx(until)
    if until < math.inf:
        sunk = [order.level(request._replace(num_output_tokens=n)) for n in (math.ceil(until) - 1, math.ceil(until))]
        assert sunk == [rank.level, rank.level + 1]
