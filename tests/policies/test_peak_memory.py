"""Past-Future's peak memory: the equations by hand, the draws, and what admission makes of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.config import ConfigError
from vllm_ext.policies.admission.peak import Peak
from vllm_ext.policies.admission.peak_memory import Forecast, PeakMemory
from vllm_ext.policies.admission.reserve_maximum import ReserveMaximum
from vllm_ext.policies.admission.watermark import Watermark
from vllm_ext.scheduling.plan import AdmissionPlan
from vllm_ext.scheduling.views import RequestView

from .pool_step import PoolStep, admits

REQUESTS = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 200)), max_size=12)


def by_simulation(requests: list[tuple[int, int]]) -> int:
    """Let everybody generate a token per step until all have ended; return the most that was held."""
    peak, step = 0, 0
    while any(left > step for _, left in requests):
        step += 1  # a request holds its last token until its step is over
        peak = max(peak, sum(held + step for held, left in requests if left >= step))
    return peak


@given(REQUESTS)
def test_the_peak_is_what_a_simulation_finds(requests: list[tuple[int, int]]) -> None:
    held, left = [h for h, _ in requests], [r for _, r in requests]
    assert Peak(held, left).tokens == by_simulation(requests)


@given(REQUESTS, st.integers(1, 200), st.integers(1, 200))
def test_one_more_is_as_if_it_had_been_there(requests: list[tuple[int, int]], tokens: int, remaining: int) -> None:
    peak = Peak([h for h, _ in requests], [r for _, r in requests])
    together = by_simulation([*requests, (tokens, remaining)])
    assert peak.with_one_more(tokens, remaining) == pytest.approx(together)
    peak.add(tokens, remaining)
    assert peak.tokens == pytest.approx(together)
    assert peak.with_one_more(3, 5) == pytest.approx(by_simulation([*requests, (tokens, remaining), (3, 5)]))


def test_what_is_shared_counts_once_and_less_as_sharers_end() -> None:
    """Three requests of 10 tokens share 6: 18 held instead of 30. One that ends takes 4, its part of 6 stays."""
    peak = Peak([10, 10, 10], [1, 2, 3], extra=-12)
    # Ends of the third, the second, the first: 3*10 - 12 + 3, 2*10 - 6 + 4, 10 + 3.
    assert peak.tokens == 21
    assert Peak([10], [1], extra=-12).tokens == 11
    assert Peak([10], [1], extra=5).tokens == 16, "what others hold stays"


def running(*rows: tuple[int, int, int]) -> tuple[RequestView, ...]:
    """From (prompt, generated, predicted output)."""
    return tuple(
        RequestView(f"r{i}", float(i), p, g, p + g, max_tokens=100, predicted_output_tokens=n)
        for i, (p, g, n) in enumerate(rows)
    )


def worked(after: int) -> PoolStep:
    """The situation of the paper's Figures 5 and 6, ``after`` steps on: 21 tokens, two running, one in the queue.

    The figures' numbers are not in the text. These have its outcome: admitted at once the peak is 22, one step later
    21, and only after two steps, when the first has ended, do the maximum lengths fit.
    """
    rows = [(3, 1 + after, 3), (5, 2 + after, 6)]
    batch = running(*(row for row in rows if row[1] < row[2]))
    held = sum(r.num_tokens for r in batch)
    queued = RequestView("q", 9.0, 5, max_tokens=3, predicted_output_tokens=3, waiting_since=9.0, num_blocks=5)
    return PoolStep(
        block_size=1,
        num_total_blocks=21,
        num_free_blocks=21 - held,
        running=batch,
        bounds=tuple(r.num_prompt_tokens + r.predicted_output_tokens for r in batch),
        queue=(queued,),
    )


def test_the_papers_example_of_21_tokens() -> None:
    policy = PeakMemory(forecast="predicted", reserve=0.0)
    assert [admits(policy.plan(worked(t)), worked(t)) for t in range(3)] == [0, 1, 1]
    aggressive = Watermark(watermark=1.0)
    assert admits(aggressive.plan(worked(0)), worked(0)) == 1, "and a request is evicted two steps later"
    conservative = ReserveMaximum(whole_prompts=False)
    assert [admits(conservative.plan(worked(t)), worked(t)) for t in range(3)] == [0, 0, 1]


def waiting(count: int, prompt: int = 10, bound: int = 90) -> tuple[RequestView, ...]:
    return tuple(RequestView(f"w{i}", float(i), prompt, max_tokens=bound, waiting_since=float(i)) for i in range(count))


def test_before_history_everybody_is_as_long_as_allowed() -> None:
    step = PoolStep(block_size=1, num_total_blocks=250, num_free_blocks=250, queue=waiting(5))
    assert admits(PeakMemory(reserve=0.0).plan(step), step) == 2


def test_history_lets_more_in_and_outlived_history_less() -> None:
    step = PoolStep(block_size=1, num_total_blocks=250, num_free_blocks=250, queue=waiting(8), finished=(20,) * 100)
    assert admits(PeakMemory(reserve=0.0).plan(step), step) == 8
    old = running((10, 40, 1))
    step = PoolStep(
        block_size=1, num_total_blocks=250, num_free_blocks=200, running=old, queue=waiting(8), finished=(20,) * 100
    )
    # It has outlived all history: 80 tokens are expected. At its end it holds 90; seven others of 30 end before.
    assert admits(PeakMemory(reserve=0.0).plan(step), step) == 6


@pytest.mark.parametrize("reserve", [0.03, 0.05, 0.10])
def test_the_reserve_stays_free(reserve: float) -> None:
    step = PoolStep(
        block_size=1, num_total_blocks=3000, num_free_blocks=3000, queue=waiting(100), finished=(20,) * 100,
        max_running=200,
    )  # fmt: skip
    assert admits(PeakMemory(reserve=reserve, max_admissions=200).plan(step), step) == int((1 - reserve) * 3000) // 30


def test_a_shared_prefix_costs_nothing() -> None:
    queue = waiting(4, prompt=64)
    alone = PoolStep(num_total_blocks=9, num_free_blocks=9, queue=queue, finished=(16,) * 100)
    shared = PoolStep(num_total_blocks=9, num_free_blocks=9, queue=queue, finished=(16,) * 100, shared_blocks=4)
    policy = PeakMemory(reserve=0.0)
    assert admits(policy.plan(alone), alone) == 1
    assert admits(policy.plan(shared), shared) == 4


@given(
    history=st.lists(st.integers(1, 300), max_size=60),
    rows=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), max_size=6),
    free=st.integers(0, 800),
    more=st.integers(0, 400),
    stratify=st.booleans(),
)
def test_more_memory_never_admits_less(
    history: list[int], rows: list[tuple[int, int]], free: int, more: int, stratify: bool
) -> None:
    batch = tuple(RequestView(f"r{i}", float(i), p, g, p + g, max_tokens=300) for i, (p, g) in enumerate(rows))
    held = sum(r.num_tokens for r in batch)
    policy = PeakMemory(stratify=stratify)

    def admitted(unused: int) -> int:
        step = PoolStep(
            block_size=1, num_total_blocks=held + unused, num_free_blocks=unused, running=batch, queue=waiting(6),
            finished=tuple(history), max_running=20,
        )  # fmt: skip
        plan = policy.plan(step)
        return 0 if plan == AdmissionPlan() else (admits(plan, step) or 0)

    if free:
        assert admitted(free) <= admitted(free + more)


def test_draws_follow_the_history_given_what_was_generated() -> None:
    """A request that generated 50 can only become one of the longer ones; the mean peak follows their mean."""
    history = (10, 20, 60, 80)
    policy = PeakMemory(cold_requests=0, most_repeats=1, stratify=False)
    peaks = []
    for seed in range(400):
        step = PoolStep(
            block_size=1, num_total_blocks=500, num_free_blocks=440, running=running((10, 50, 1)), finished=history,
            seed=seed, queue=waiting(1),
        )  # fmt: skip
        forecast = Forecast(policy, step)
        peaks.append(forecast.tokens)
    assert set(peaks) == {70.0, 90.0}
    assert np.mean(peaks) == pytest.approx(80.0, abs=2.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reserve", 1.0),
        ("reserve", -0.1),
        ("forecast", "guess"),
        ("window", 0),
        ("cold_requests", -1),
        ("redraw_steps", 0),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"admission.{field}"):
        PeakMemory(**{field: value})


def refused_then(policy: PeakMemory, steps_on: int, **changes: object) -> int | None:
    """Let nobody fit in step 10; then, so many steps later, let two fit. Return how many join."""
    notes: dict[str, object] = {}
    crowded = PoolStep(
        num_total_blocks=8, num_free_blocks=2, running=running((60, 30, 1)), queue=waiting(3), finished=(60,) * 100,
        number=10, notes=notes,
    )  # fmt: skip
    assert admits(policy.plan(crowded), crowded) == 0
    roomy = {"num_total_blocks": 100, "num_free_blocks": 60, "max_running": 3, "number": 10 + steps_on}
    later = replace(crowded, **{**roomy, **changes})
    return admits(policy.plan(later), later)


@pytest.mark.parametrize(
    ("steps_on", "changes", "joined"),
    [
        (3, {}, 0),
        (4, {}, 2),
        (1, {"membership": 1}, 2),
        (1, {"queue": waiting(4), "queue_changes": 1}, 2),
        (1, {"queue": waiting(2), "queue_changes": 1}, 2),
        (1, {"queue_changes": 2}, 2),
    ],
    ids=["soon", "asked again", "somebody left", "somebody came", "somebody gave up", "another took its place"],
)
def test_that_nobody_fits_stands_for_some_steps_of_an_unchanged_batch(
    steps_on: int, changes: dict[str, object], joined: int
) -> None:
    assert refused_then(PeakMemory(redraw_steps=4), steps_on, **changes) == joined
    assert refused_then(PeakMemory(redraw_steps=1), steps_on, **changes) == 2
