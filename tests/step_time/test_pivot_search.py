"""The pivot forward size: where throughput saturates, by measurements that may be disturbed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.step_time.pivot_search import SHARE, most_sizes, prompts_of, search
from vllm_ext.step_time.runtime import Pivot


def knee(at: int) -> Callable[[int], float]:
    """Steps that all take a second up to ``at`` tokens, and in proportion beyond: throughput is flat from there."""
    return lambda tokens: max(1.0, tokens / at)


class Noting:
    """Notes what was measured, in order."""

    def __init__(self, measure: Callable[[int], float | None]) -> None:
        self.asked: list[int] = []
        self._measure = measure

    def __call__(self, tokens: int) -> float | None:
        self.asked.append(tokens)
        return self._measure(tokens)


def test_sizes_double_to_the_largest_and_then_halve_the_interval_of_the_answer() -> None:
    """Worked by hand: flat from 700 tokens on, so that 0.95 of the best is reached at 665."""
    measure = Noting(knee(700))
    found = search(measure, 2048)
    assert measure.asked == [16, 32, 64, 128, 256, 512, 1024, 2048, 768, 640, 704]
    assert found is not None
    assert (found.pivot, found.saturated) == (Pivot(704, 704 / 700), True)
    assert list(found.times) == sorted(measure.asked)
    assert len(measure.asked) == most_sizes(2048)


def test_a_largest_step_that_is_no_power_of_two_is_measured() -> None:
    measure = Noting(knee(1))
    search(measure, 1000)
    assert measure.asked[:6] == [31, 62, 125, 250, 500, 1000]


def test_throughput_that_still_rises_gives_the_largest_step_and_says_so() -> None:
    found = search(lambda tokens: 1.0, 4096)
    assert found is not None
    assert (found.pivot, found.saturated) == (Pivot(4096, 1.0), False)
    assert len(found.times) == 9, "nothing is left to refine"


def test_throughput_that_is_saturated_at_once_gives_the_smallest_step() -> None:
    found = search(lambda tokens: 0.01 * tokens, 4096)
    assert found is not None
    assert (found.pivot, found.saturated) == (Pivot(16, 0.16), True)
    assert len(found.times) == 9


def test_throughput_that_falls_again_has_its_pivot_before_the_top() -> None:
    """Attention grows with the square: the best is not at the largest step."""
    found = search(lambda tokens: 1.0 + tokens / 100 + (tokens / 1000) ** 2, 8192)
    assert found is not None
    assert found.saturated
    best = max(tokens / step_s for tokens, step_s in found.times.items())
    assert found.pivot.tokens / found.pivot.step_s >= SHARE * best
    assert found.pivot.tokens < 1024


def test_steps_larger_than_the_engine_takes_are_not_asked_for() -> None:
    measure = Noting(lambda tokens: None if tokens > 600 else 1.0)
    found = search(measure, 4096)
    assert measure.asked == [16, 32, 64, 128, 256, 512, 1024]
    assert found is not None
    assert (found.pivot.tokens, found.saturated) == (512, False)


def test_a_refinement_that_the_engine_does_not_take_leaves_the_answer() -> None:
    found = search(lambda tokens: None if tokens == 768 else knee(700)(tokens), 2048)
    assert found is not None
    assert (found.pivot.tokens, found.saturated) == (1024, True)


def test_an_engine_that_takes_no_step_of_prompts_has_no_pivot() -> None:
    assert search(lambda tokens: None, 4096) is None


@pytest.mark.parametrize("largest", [1, 2, 15])
def test_a_step_smaller_than_the_smallest_is_all_there_is(largest: int) -> None:
    measure = Noting(lambda tokens: 1.0)
    found = search(measure, largest)
    assert measure.asked == [largest]
    assert found is not None
    assert (found.pivot.tokens, found.saturated) == (largest, False)


def test_a_disturbed_step_counts_as_the_larger_one_that_took_less() -> None:
    """A pause at 1024, where 1000 tokens have all of the throughput: 1152, the next one measured, is the answer."""
    found = search(lambda tokens: 9.0 if tokens == 1024 else knee(1000)(tokens), 4096)
    assert found is not None
    assert found.times[1024] == found.times[1152] == 1.152
    assert (found.pivot.tokens, found.saturated) == (1152, True)


@given(
    at=st.integers(1, 5000),
    largest=st.integers(1, 20_000),
    slow=st.dictionaries(st.integers(1, 20_000), st.floats(1, 9)),
)
def test_the_answer_was_measured_and_has_its_share_whatever_is_disturbed(
    at: int, largest: int, slow: dict[int, float]
) -> None:
    measure = Noting(lambda tokens: knee(at)(tokens) * slow.get(tokens, 1.0))
    found = search(measure, largest)
    assert found is not None
    assert found.pivot.tokens in measure.asked
    assert max(measure.asked) == largest
    assert len(measure.asked) == len(set(measure.asked)) <= most_sizes(largest)
    assert found.times[found.pivot.tokens] == found.pivot.step_s
    durations = list(found.times.values())
    assert durations == sorted(durations)
    best = max(tokens / step_s for tokens, step_s in found.times.items())
    assert found.pivot.tokens / found.pivot.step_s >= SHARE * best


@pytest.mark.parametrize(
    ("tokens", "longest", "seats", "prompts"),
    [
        (16, 4000, 64, [16]),
        (512, 4000, 64, [512]),
        (513, 4000, 64, [257, 256]),
        (1536, 4000, 64, [512, 512, 512]),
        (1000, 100, 64, [100] * 10),
        (4096, 4000, 4, [1024] * 4),
        (2050, 4000, 1, [2050]),
    ],
)
def test_a_step_is_made_of_equal_prompts_of_512_tokens_at_most_unless_seats_are_few(
    tokens: int, longest: int, seats: int, prompts: list[int]
) -> None:
    assert prompts_of(tokens, longest, seats) == prompts


@given(longest=st.integers(1, 10_000), seats=st.integers(1, 300), share=st.floats(0, 1))
def test_prompts_fill_the_step_and_fit_the_engine(longest: int, seats: int, share: float) -> None:
    tokens = max(1, round(share * longest * seats))
    prompts = prompts_of(tokens, longest, seats)
    assert sum(prompts) == tokens
    assert len(prompts) <= seats
    assert 1 <= min(prompts) <= max(prompts) <= longest
    assert max(prompts) - min(prompts) <= 1
