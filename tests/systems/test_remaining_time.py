"""Remaining-time levels: the queue of a request by hand, aging, demotion, parameters."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.contract import AGED, RequestView
from vllm_ext.contract.aging import AGED_RANK, ages_at, outlived_at
from vllm_ext.systems.alise import RemainingTimeLevels
from vllm_ext.systems.upstream import Arrival

POLICY = RemainingTimeLevels(num_levels=4, base_level_s=0.5, age_limit_s=10.0)


def view(remaining: float = 0.1, *, name: str = "r", arrival: float = 0.0, **fields: Any) -> RequestView:
    return RequestView(name, arrival, 10, predicted_remaining_s=remaining, **fields)


def order(views: list[RequestView], now: float, policy: RemainingTimeLevels = POLICY) -> list[str]:
    ranked = sorted(views, key=lambda v: (*policy.rank(v, now).key, v.arrival_time, v.req_id))
    return [v.req_id for v in ranked]


@pytest.mark.parametrize(
    ("remaining", "level"),
    [(0.0, 0), (0.499, 0), (0.5, 1), (0.999, 1), (1.0, 2), (1.999, 2), (2.0, 3), (3.999, 3), (4.0, 3), (1e9, 3)],
)
def test_queues_double_in_width_and_the_last_takes_the_rest(remaining: float, level: int) -> None:
    assert POLICY.level(view(remaining)) == level
    assert POLICY.rank(view(remaining), 0.0).level == level


def test_an_endless_job_belongs_to_the_last_queue() -> None:
    assert POLICY.level(view(math.inf)) == 3
    tiny = RemainingTimeLevels(base_level_s=5e-324)
    assert tiny.level(view(1e9)) == 5


def test_inside_a_queue_the_shorter_goes_first_and_between_queues_the_higher() -> None:
    views = [view(3.0, name="d"), view(0.4, name="b"), view(0.1, name="a"), view(0.6, name="c")]
    assert order(views, 0.0) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("demotions", "level"), [(0, 0), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_a_job_that_outlived_k_estimates_is_never_above_queue_k(demotions: int, level: int) -> None:
    assert POLICY.level(view(0.1, num_demotions=demotions)) == level
    assert POLICY.level(view(2.0, num_demotions=demotions)) == 3


def test_each_age_limit_of_waiting_promotes_by_one_queue() -> None:
    waiting = view(2.5, waiting_since=100.0)
    ranks = [POLICY.rank(waiting, now) for now in (100, 109.9, 110, 120, 130, 139)]
    assert [(r.level, r.until_s) for r in ranks] == [(3, 110), (3, 110), (2, 120), (1, 130), (0, 140), (0, 140)]
    assert {r.older_only_s for r in ranks} == {140}, "known from the start"
    aged = POLICY.rank(waiting, 140)
    assert (aged.level, aged.until_s, aged.until_tokens, aged.older_only_s) == (AGED, math.inf, math.inf, -math.inf)


def test_waits_add_up_over_preemptions_and_promotions_are_kept_while_running() -> None:
    running = view(2.5, waited_s=25.0)
    assert POLICY.rank(running, 500.0).level == 1
    assert POLICY.rank(running, 500.0).until_s == math.inf, "a running request does not age"
    assert POLICY.rank(running, 500.0).older_only_s == math.inf
    again = view(2.5, waited_s=25.0, waiting_since=500.0)
    rank = POLICY.rank(again, 500.0)
    assert (rank.level, rank.until_s, rank.older_only_s) == (1, 505.0, 515.0)
    assert POLICY.rank(again, 505.0).level == 0


def test_aged_requests_go_first_in_order_of_arrival_whatever_their_length() -> None:
    views = [
        view(0.01, name="short", arrival=95.0, waiting_since=95.0),
        view(9.0, name="aged2", arrival=20.0, waiting_since=20.0),
        view(0.1, name="aged1", arrival=10.0, waiting_since=10.0),
    ]
    assert order(views, 100.0) == ["aged1", "aged2", "short"]


@given(
    remaining=st.floats(0, 1e6),
    demotions=st.integers(0, 20),
    levels=st.integers(1, 8),
    age_limit=st.floats(0.01, 100),
    waited=st.floats(0, 50),
)
def test_past_the_documented_bound_nobody_younger_goes_first(
    remaining: float, demotions: int, levels: int, age_limit: float, waited: float
) -> None:
    policy = RemainingTimeLevels(num_levels=levels, age_limit_s=age_limit)
    old = view(remaining, name="old", waiting_since=waited, num_demotions=demotions)
    now = levels * age_limit * (1 + 1e-9) + 1e-9
    old = old._replace(waiting_since=now, waited_s=now)
    young = view(0.0, name="young", arrival=now, waiting_since=now)
    assert order([young, old], now, policy) == ["old", "young"]


@given(
    waiting_since=st.floats(0, 1e7),
    waited=st.floats(0, 1e4),
    age_limit=st.floats(0.001, 1e3),
    after=st.floats(0, 1e3),
)
def test_a_rank_holds_until_the_moment_it_names(
    waiting_since: float, waited: float, age_limit: float, after: float
) -> None:
    policy = RemainingTimeLevels(age_limit_s=age_limit)
    waiting = view(1e9, waiting_since=waiting_since, waited_s=waited)
    now = waiting_since + after
    rank = policy.rank(waiting, now)
    if rank.until_s == math.inf:
        return
    before = now + (rank.until_s - now) * 0.999
    if rank.until_s - now > 1e-6:  # closer than a clock can tell
        assert policy.rank(waiting, before).key == rank.key
    later = policy.rank(waiting, rank.until_s + 1e-6 * max(1.0, rank.until_s))
    assert later.level < rank.level


def test_shuffled_requests_get_the_same_order() -> None:
    rng = random.Random(1)
    views = [
        view(rng.choice((0.1, 0.7, 5.0)), name=f"r{i}", arrival=float(i % 3), waiting_since=rng.uniform(0, 50))
        for i in range(30)
    ]
    expected = order(views, 50.0)
    for _ in range(5):
        rng.shuffle(views)
        assert order(views, 50.0) == expected


def test_arrival_leaves_everything_to_the_ties() -> None:
    assert Arrival().rank(view(5.0), 1.0) == Arrival().rank(view(0.1), 2.0)
    assert Arrival().rank(view(), 0.0).until_s == math.inf


@pytest.mark.parametrize(
    ("fields", "until"),
    [
        ({}, 30),  # of 3 s a third is above 2 s, where queue 2 begins: a third of 60 tokens
        ({"remaining": 2.0}, 11),  # at the boundary: the next token is on its other side
        ({"remaining": 9.0}, 10 + 60 * 7 / 9),  # the last queue has a lower end all the same
        ({"remaining": 0.4}, 70),  # in the first queue only the estimate is left to outlive
        ({"remaining": 3.0, "num_demotions": 3}, 70),  # no higher queue for it
        ({"remaining": 0.4, "max_tokens": 70}, math.inf),  # an estimate at the client's bound can't be outlived
        ({"remaining": math.inf}, 70),
        ({"num_output_tokens": 70}, 70),  # outlived now
        ({"num_output_tokens": 0}, 1),  # while its prompt is computed, what it has left falls without a token
    ],
)
def test_a_running_request_is_ranked_again_where_it_rises_or_outlives_its_estimate(
    fields: dict[str, Any], until: float
) -> None:
    """It has generated 10 of 70 tokens, with 3 s to go."""
    values = {"remaining": 3.0, "num_output_tokens": 10, "predicted_output_tokens": 70, "max_tokens": 100, **fields}
    assert POLICY.rises_at(view(**values)) == pytest.approx(until)
    assert POLICY.rank(view(**values), 0.0).until_tokens == pytest.approx(until)


@given(left=st.integers(1, 400), token_s=st.floats(1e-3, 0.2), demotions=st.integers(0, 3))
def test_up_to_that_length_it_stays_in_its_queue(left: int, token_s: float, demotions: int) -> None:
    def at(generated: int) -> RequestView:
        return view(
            (left - generated) * token_s, num_output_tokens=generated, predicted_output_tokens=left, max_tokens=1000,
            num_demotions=demotions,
        )  # fmt: skip

    generated = 1
    while generated < left:
        until = POLICY.rises_at(at(generated))
        assert until >= generated + 1 or until == left, "no earlier than at the next token"
        reached = min(math.ceil(until), left)
        assert {POLICY.level(at(n)) for n in range(generated, reached - 1)} <= {POLICY.level(at(generated))}
        generated = reached


def test_what_ages_and_what_is_outlived() -> None:
    waits, runs = view(waiting_since=100.0, waited_s=3.0), view(num_output_tokens=5, predicted_output_tokens=8)
    assert (ages_at(waits, 10.0), ages_at(runs, 10.0)) == (107.0, math.inf)
    assert (outlived_at(waits), outlived_at(runs), outlived_at(runs._replace(max_tokens=9))) == (1.0, math.inf, 8.0)
    assert AGED_RANK.key < POLICY.rank(view(0.0), 0.0).key
