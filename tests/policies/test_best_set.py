"""Best set: the formula worked by hand, seats and blocks, no thrashing, parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.config import ConfigError
from vllm_ext.policies.admission.best_set import BestSet
from vllm_ext.policies.admission.fits_now import FitsNow
from vllm_ext.policies.budget.static import StaticBudget
from vllm_ext.scheduling.plan import AdmissionPlan, BudgetPlan
from vllm_ext.scheduling.views import RequestView


@dataclass
class Step:
    """A step view over plain lists; both are given best rank first, and waiting goes before running by ``rank``."""

    waiting_views: list[RequestView]
    running_views: list[RequestView]
    max_running: int = 2
    num_free_blocks: int = 1000
    token_budget: int = 10_000
    now: float = 0.0
    rank: dict[str, float] = field(default_factory=dict)

    @property
    def num_running(self) -> int:
        return len(self.running_views)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting_views)

    @property
    def num_free_tokens(self) -> int:
        return self.token_budget - self.num_running

    def waiting(self) -> Iterator[RequestView]:
        return iter(self.waiting_views)

    def running_worst_first(self) -> Iterator[RequestView]:
        return reversed(self.running_views)

    def running_best(self) -> RequestView | None:
        return self.running_views[0] if self.running_views else None

    def goes_before(self, first: RequestView, second: RequestView) -> bool:
        return self._rank(first) < self._rank(second)

    def _rank(self, view: RequestView) -> float:
        return self.rank.get(view.req_id, view.predicted_remaining_s)


def waiting(name: str, tokens: int, *, blocks: int = 1, remaining: float | None = None) -> RequestView:
    remaining = tokens * 0.01 if remaining is None else remaining
    return RequestView(
        name,
        0.0,
        10,
        predicted_output_tokens=tokens,
        predicted_remaining_s=remaining,
        waiting_since=0.0,
        num_blocks=blocks,
    )


def running(
    name: str,
    tokens: int,
    remaining: float,
    *,
    price: float = 0.0,
    blocks: int = 5,
    preemptions: int = 0,
    progress: int = 99,
) -> RequestView:
    return RequestView(
        name,
        0.0,
        10,
        predicted_output_tokens=tokens,
        predicted_remaining_s=remaining,
        recompute_s=price,
        restore_s=price,
        stall_s=price,
        num_preemptions=preemptions,
        progress_tokens=progress,
        num_blocks=blocks,
    )


def preempted(policy: BestSet, step: Step) -> tuple[str, ...]:
    plan = policy.plan(step)  # type: ignore[arg-type]
    assert plan == AdmissionPlan(preempt=plan.preempt), "best set neither holds nor caps"
    return plan.preempt


def example(price: float) -> Step:
    """Two seats, two long jobs: t = 1 s until the better one ends; a job of 10 tokens waits.

    gain = 1 / 10 = 0.1
    loss = (1 + c) / 200 + c * 2 * (1/100 + 1/200) / 2 = 0.005 + c * (0.005 + 0.015)
    They are equal at c = 0.095 / 0.02 = 4.75 s.
    """
    return Step([waiting("short", 10)], [running("long", 100, 1.0), running("longer", 200, 2.0, price=price)])


@pytest.mark.parametrize(("price", "victims"), [(0.0, ("longer",)), (4.74, ("longer",)), (4.76, ()), (100.0, ())])
def test_worked_example_preempts_while_the_gain_exceeds_the_loss(price: float, victims: tuple[str, ...]) -> None:
    assert preempted(BestSet(), example(price)) == victims


def test_gain_ratio_asks_for_more() -> None:
    """At c = 0 the gain is 20 times the loss."""
    assert preempted(BestSet(gain_ratio=19.9), example(0.0)) == ("longer",)
    assert preempted(BestSet(gain_ratio=20.1), example(0.0)) == ()


def test_who_outlived_its_estimate_is_spared_where_that_is_asked_for() -> None:
    step = example(0.0)
    step.running_views[1] = step.running_views[1]._replace(num_demotions=1)
    assert preempted(BestSet(), step) == ("longer",)
    assert preempted(BestSet(spare_outlived=True), step) == ("long",), "the next one leaves instead"
    step.running_views[0] = step.running_views[0]._replace(num_demotions=1)
    assert preempted(BestSet(spare_outlived=True), step) == ()


def test_a_free_seat_is_left_to_vllm() -> None:
    assert preempted(BestSet(), replace(example(0.0), max_running=3)) == ()


def test_blocks_are_gathered_from_the_worst_until_they_suffice() -> None:
    """12 blocks needed, 3 free, 5 per victim: two victims of the worst rank.

    gain = 1 / 2; loss = 1/400 + 1/300.
    """
    step = Step(
        [waiting("short", 2, blocks=12)],
        [running("a", 100, 1.0), running("b", 300, 3.0), running("c", 400, 4.0)],
        max_running=10,
        num_free_blocks=3,
    )
    assert preempted(BestSet(), step) == ("c", "b")
    assert preempted(BestSet(max_victims=1), step) == (), "all or nothing"
    assert preempted(BestSet(), replace(step, num_free_blocks=7)) == ("c",)
    assert preempted(BestSet(), replace(step, num_free_blocks=12)) == ()


def test_a_request_that_no_set_of_victims_can_fit_preempts_nobody() -> None:
    step = Step([waiting("huge", 2, blocks=500)], [running("a", 300, 3.0), running("b", 400, 4.0)], num_free_blocks=0)
    assert preempted(BestSet(), step) == ()


def test_a_victim_ranks_after_the_request_it_makes_room_for() -> None:
    step = Step([waiting("w", 50, remaining=5.0)], [running("a", 100, 1.0), running("b", 1000, 4.9)])
    assert preempted(BestSet(), step) == ()


def test_a_victim_of_before_is_spared_until_it_made_progress() -> None:
    step = example(0.0)
    step.running_views[1] = running("longer", 200, 2.0, preemptions=1, progress=15)
    step.rank = {"short": 0.0}
    assert preempted(BestSet(), step) == ("long",), "the next worst one is taken"
    step.running_views[1] = running("longer", 200, 2.0, preemptions=1, progress=16)
    assert preempted(BestSet(), step) == ("longer",)


def test_several_waiting_requests_take_a_victim_each_and_no_victim_twice() -> None:
    step = Step(
        [waiting("s1", 2), waiting("s2", 2), waiting("s3", 2)],
        [running("a", 100, 1.0), running("b", 300, 3.0), running("c", 400, 4.0)],
        max_running=3,
    )
    victims = preempted(BestSet(max_admissions=2), step)
    assert victims == ("c", "b")
    assert len(set(preempted(BestSet(), step))) == len(preempted(BestSet(), step))


def test_the_first_request_that_is_not_worth_it_ends_the_step() -> None:
    step = example(100.0)
    step.waiting_views.append(waiting("shorter", 1))
    assert preempted(BestSet(), step) == ()


@pytest.mark.parametrize(
    "step",
    [
        Step([], [running("a", 100, 1.0)], max_running=1),
        Step([waiting("w", 1)], [], max_running=1),
        Step([], []),
        Step([waiting("w", 1, blocks=9)], [], num_free_blocks=0),
        replace(example(0.0), token_budget=2),
        replace(example(0.0), max_running=0),
    ],
    ids=["nothing waits", "nothing runs", "empty", "no blocks", "decodes take the whole budget", "no seats at all"],
)
def test_nobody_is_preempted_without_need_or_use(step: Step) -> None:
    assert preempted(BestSet(), step) == ()


def test_nobody_is_preempted_for_a_request_that_would_get_no_token() -> None:
    """Two wait; the first one's prompt takes what is left of the budget, so the second has no use for a seat."""
    step = Step([waiting("w", 1), waiting("x", 1)], [running("r", 50, 50.0), running("s", 60, 60.0)])
    both = preempted(BestSet(), step)
    first = preempted(BestSet(), replace(step, token_budget=step.num_running + 1))
    assert len(both) == 2
    assert len(first) == 1


def test_switched_off_it_preempts_nobody() -> None:
    assert preempted(BestSet(preempt=False), example(0.0)) == ()


WAITING = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 8)), max_size=6)
RUNNING = st.lists(st.tuples(st.integers(50, 500), st.integers(1, 8), st.floats(0, 1), st.integers(0, 2)), max_size=6)


def _build(waits: list[tuple[int, int]], runs: list[tuple[int, int, float, int]], seats: int, free: int) -> Step:
    waits, runs = sorted(waits), sorted(runs)
    return Step(
        [waiting(f"w{i}", tokens, blocks=blocks) for i, (tokens, blocks) in enumerate(waits)],
        [
            running(f"r{i}", tokens, tokens * 0.01, blocks=blocks, price=price, preemptions=count, progress=5)
            for i, (tokens, blocks, price, count) in enumerate(runs)
        ],
        max_running=max(seats, len(runs)),
        num_free_blocks=free,
    )


def _admitted(step: Step) -> int:
    """How many of the waiting requests fit in order after the plan."""
    victims = set(preempted(BestSet(max_admissions=10, max_victims=10), step))
    left = [v for v in step.running_views if v.req_id not in victims]
    seats = step.max_running - len(left)
    free = step.num_free_blocks + sum(v.num_blocks for v in step.running_views if v.req_id in victims)
    for count, head in enumerate(step.waiting_views):
        if not (seats >= 1 and free >= head.num_blocks):
            return count
        seats, free = seats - 1, free - head.num_blocks
    return step.num_waiting


@given(waits=WAITING, runs=RUNNING, seats=st.integers(1, 8), free=st.integers(0, 20))
def test_every_preemption_makes_room_that_somebody_takes(
    waits: list[tuple[int, int]], runs: list[tuple[int, int, float, int]], seats: int, free: int
) -> None:
    step = _build(waits, runs, seats, free)
    victims = preempted(BestSet(), step)
    assert len(set(victims)) == len(victims)
    assert set(victims) <= {v.req_id for v in step.running_views}
    if victims:
        assert _admitted(step) > 0


@given(waits=WAITING, runs=RUNNING, seats=st.integers(1, 8), free=st.integers(0, 20), more=st.integers(1, 10))
def test_more_memory_never_admits_less(
    waits: list[tuple[int, int]], runs: list[tuple[int, int, float, int]], seats: int, free: int, more: int
) -> None:
    assert _admitted(_build(waits, runs, seats, free + more)) >= _admitted(_build(waits, runs, seats, free))


def test_the_other_policies_change_nothing() -> None:
    step = example(0.0)
    assert FitsNow().plan(step) == AdmissionPlan()  # type: ignore[arg-type]
    assert StaticBudget().plan(step) == BudgetPlan()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("gain_ratio", 0.0),
        ("gain_ratio", math.nan),
        ("min_progress_tokens", 0),
        ("max_admissions", 0),
        ("max_victims", -1),
    ],
)
def test_a_bad_parameter_is_named(name: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        BestSet(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == f"admission.{name}"
