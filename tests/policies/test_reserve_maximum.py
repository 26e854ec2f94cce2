"""Reserving the maximum: Orca's rule worked by hand, the token budget, and what memory may never change."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.config import ConfigError
from vllm_ext.policies.admission.reserve_maximum import ReserveMaximum

from .pool_step import PoolStep, admits, prompts


def admitted(step: PoolStep, **parameters: int) -> int | None:
    return admits(ReserveMaximum(**parameters).plan(step), step)  # type: ignore[arg-type]


@pytest.mark.parametrize(("total", "expected"), [(3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3), (100, 3)], ids=str)
def test_as_many_start_as_reservations_of_four_blocks_fit_beside_one_of_one(total: int, expected: int) -> None:
    """Prompt 10 + 54 outputs = 64 tokens = 4 blocks each, whatever is free right now; one block more is promised."""
    step = PoolStep(queue=prompts((10, 54), (10, 54), (10, 54)), bounds=(16,), num_total_blocks=total + 1)
    assert admitted(replace(step, num_free_blocks=10_000)) == expected


def test_the_first_that_does_not_fit_ends_the_scan() -> None:
    step = PoolStep(queue=prompts((10, 6), (10, 300), (10, 6)), bounds=(), num_total_blocks=10)
    assert admitted(step) == 1


@pytest.mark.parametrize(("reserve", "expected"), [(0, 4), (16, 4), (160, 3), (2048, 1)])
def test_a_fixed_reservation_is_cut_at_the_longest_sequence_and_never_below_the_bound(
    reserve: int, expected: int
) -> None:
    """A pool of 33 blocks; bounds of 1 block each become 1, 10 or (at 512 tokens) 32."""
    step = PoolStep(queue=prompts((10, 6), (10, 6), (10, 6), (10, 6)), num_total_blocks=33)
    assert admitted(step, reserve_tokens=reserve) == expected


def test_a_fixed_reservation_counts_for_what_runs_too() -> None:
    step = PoolStep(queue=prompts((10, 6)), bounds=(16, 16), num_total_blocks=29)
    assert admitted(step, reserve_tokens=160) == 0
    assert admitted(replace(step, num_total_blocks=30), reserve_tokens=160) == 1


@pytest.mark.parametrize(
    ("queue", "running", "prefilling", "expected"),
    [
        pytest.param(((20, 1), (44, 1), (1, 1)), 0, (), 2, id="64 of 64 tokens"),
        pytest.param(((20, 1), (45, 1)), 0, (), 1, id="one token too many"),
        pytest.param(((60, 1),), 4, (), 1, id="decodes leave 60"),
        pytest.param(((61, 1),), 4, (), 0, id="a whole prompt or none"),
        pytest.param(((65, 1), (1, 1)), 4, (), 1, id="longer than any budget: alone"),
        pytest.param(((1, 1), (65, 1)), 4, (), 1, id="longer than any budget: not beside another"),
        pytest.param(((65, 1),), 2, (100,), 0, id="not while another takes all"),
        pytest.param(((13, 1),), 2, (50,), 1, id="beside a last chunk"),
        pytest.param(((14, 1),), 2, (50,), 0, id="not enough beside a last chunk"),
    ],
)
def test_only_whole_prompts_join(
    queue: tuple[tuple[int, int], ...], running: int, prefilling: tuple[int, ...], expected: int
) -> None:
    step = PoolStep(queue=prompts(*queue), bounds=(16,) * running, unfinished=prefilling)
    assert admitted(step) == expected


def test_admissions_end_at_seats_and_at_the_limit_per_step() -> None:
    step = PoolStep(queue=prompts(*[(1, 1)] * 9), bounds=(16,) * 3)
    assert admitted(step) == 5
    assert admitted(step, max_admissions=2) == 2


def test_without_seats_or_queue_there_is_nothing_to_decide() -> None:
    assert admitted(PoolStep(bounds=(16,))) is None
    assert admitted(PoolStep(queue=prompts((1, 1)), bounds=(16,) * 8)) is None


def test_one_request_alone_always_starts() -> None:
    assert admitted(PoolStep(queue=prompts((10, 500)), num_total_blocks=5)) == 1


_QUEUE = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 200)), min_size=1, max_size=8)
_BOUNDS = st.lists(st.integers(1, 200), max_size=7)


@given(queue=_QUEUE, bounds=_BOUNDS, blocks=st.integers(1, 120), more=st.integers(0, 60), reserve=st.integers(0, 300))
def test_more_memory_or_tokens_never_admit_less(
    queue: list[tuple[int, int]], bounds: list[int], blocks: int, more: int, reserve: int
) -> None:
    step = PoolStep(queue=prompts(*queue), bounds=tuple(bounds), num_total_blocks=blocks)
    base = admitted(step, reserve_tokens=reserve)
    richer = admitted(replace(step, num_total_blocks=blocks + more), reserve_tokens=reserve)
    assert base is not None
    assert richer is not None
    assert richer >= base


@given(queue=_QUEUE, bounds=_BOUNDS, blocks=st.integers(1, 120), reserve=st.integers(0, 300))
def test_what_is_admitted_fits_at_its_longest(
    queue: list[tuple[int, int]], bounds: list[int], blocks: int, reserve: int
) -> None:
    step = PoolStep(queue=prompts(*queue), bounds=tuple(bounds), num_total_blocks=blocks)
    count = admitted(step, reserve_tokens=reserve)
    assert count is not None
    promised = [step.blocks_for(max(view.bound_tokens, reserve)) for view in step.queue[:count]]
    alone = not bounds and count == 1
    assert count <= 0 or alone or step.blocks_at_bound(reserve) + sum(promised) <= blocks


@pytest.mark.parametrize(("field", "value"), [("reserve_tokens", -1), ("max_admissions", 0)])
def test_bad_parameters_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError) as caught:
        ReserveMaximum(**{field: value})
    assert (caught.value.field, caught.value.value) == (f"admission.{field}", value)
