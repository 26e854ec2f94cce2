"""Gates that count: reserved maximums, a watermark, whole prompts; by hand, together, and with somebody leaving."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.pool_step import PoolStep, bounded, half_done, prompts, select
from vllm_ext.contract import GatePolicy, Room
from vllm_ext.systems.alise import Preemptive
from vllm_ext.systems.baselines import ReserveMaximum, Watermark, WholePrompts
from vllm_ext.systems.upstream import InOrder

VLLM_2023 = Watermark(watermark=0.99), WholePrompts()
SWAPPING = Preemptive(priced=False)


def admitted(step: PoolStep, *gates: GatePolicy) -> int:
    """How many join in order."""
    return len(select(InOrder(), step, *gates).admit)


@pytest.mark.parametrize(("total", "expected"), [(3, 0), (4, 1), (7, 1), (8, 2), (11, 2), (12, 3), (100, 3)], ids=str)
def test_as_many_start_as_reservations_of_four_blocks_fit_beside_one_of_one(total: int, expected: int) -> None:
    """Prompt 10 + 54 outputs = 64 tokens = 4 blocks each, whatever is free right now; one block more is promised."""
    step = PoolStep(queue=prompts((10, 54), (10, 54), (10, 54)), running=bounded(16), total=total + 1, free=10_000)
    assert admitted(step, ReserveMaximum()) == expected
    assert admitted(replace(step, total=5), ReserveMaximum(overcommit=max(1, (total + 1) / 5))) == max(
        int(total <= 4), expected
    )


def test_the_first_that_does_not_fit_ends_the_scan() -> None:
    room = select(InOrder(), PoolStep(queue=prompts((10, 6), (10, 300), (10, 6)), total=10), ReserveMaximum())
    assert (room.admit, room.why) == (["w0"], {"w1": "reserve_maximum"})


@pytest.mark.parametrize(("reserve", "expected"), [(0, 4), (16, 4), (160, 3), (2048, 1)])
def test_a_fixed_reservation_is_cut_at_the_longest_sequence_and_never_below_the_bound(
    reserve: int, expected: int
) -> None:
    """A pool of 33 blocks; bounds of 1 block each become 1, 10 or (at 512 tokens) 32."""
    step = PoolStep(queue=prompts((10, 6), (10, 6), (10, 6), (10, 6)), total=33)
    assert admitted(step, ReserveMaximum(reserve_tokens=reserve)) == expected


def test_a_fixed_reservation_counts_for_what_runs_too() -> None:
    step = PoolStep(queue=prompts((10, 6)), running=bounded(16, 16), total=29)
    assert admitted(step, ReserveMaximum(reserve_tokens=160)) == 0
    assert admitted(replace(step, total=30), ReserveMaximum(reserve_tokens=160)) == 1


_QUEUE = st.lists(st.tuples(st.integers(1, 80), st.integers(1, 200)), min_size=1, max_size=8)
_BOUNDS = st.lists(st.integers(1, 200), max_size=7)


@given(queue=_QUEUE, bounds=_BOUNDS, total=st.integers(1, 120), reserve=st.integers(0, 300))
def test_what_is_admitted_fits_at_its_longest(
    queue: list[tuple[int, int]], bounds: list[int], total: int, reserve: int
) -> None:
    step = PoolStep(queue=prompts(*queue), running=bounded(*bounds), total=total)
    count = admitted(step, ReserveMaximum(reserve_tokens=reserve))
    lengths = [*bounds, *(view.bound_tokens for view in step.queue[:count])]
    promised = sum(step.pool.blocks_for(max(length, reserve)) for length in lengths)
    assert promised <= total or not count or (not bounds and count == 1)


@pytest.mark.parametrize(
    ("free", "watermark", "expected"),
    [(1, 1.0, 0), (2, 1.0, 1), (4, 1.0, 2), (2, 0.99, 0), (3, 0.99, 1), (11, 0.9, 0), (12, 0.9, 1), (3, 0.981, 0)],
)
def test_an_admission_leaves_the_watermark_free(free: int, watermark: float, expected: int) -> None:
    """Prompts of 20 tokens take 2 blocks; of 100 blocks, 99 % are 99, and 98.1 % are 98."""
    step = PoolStep(queue=prompts((20, 9), (20, 9)), running=bounded(16), free=free)
    assert admitted(step, Watermark(watermark=watermark)) == expected


def test_what_a_prompt_that_was_let_in_still_needs_is_not_given_away() -> None:
    """95 blocks less 58 that are held, less 5 of 9 that its 130 tokens take: 32."""
    step = PoolStep(queue=prompts((512, 9)), running=(half_done(130, 64),), free=42, token_budget=1000)
    assert (admitted(step, Watermark()), admitted(replace(step, free=41), Watermark())) == (1, 0)


def test_a_preempted_request_returns_with_what_it_generated() -> None:
    (view,) = prompts((30, 90))
    step = PoolStep(queue=(view._replace(num_output_tokens=20),), running=bounded(16), free=4, apart=True)
    assert (admitted(step, *VLLM_2023), admitted(replace(step, free=5), *VLLM_2023)) == (0, 1)


@pytest.mark.parametrize(
    ("queue", "decodes", "left", "apart", "expected"),
    [
        pytest.param(((20, 9), (44, 9), (1, 9)), 4, 0, True, 2, id="64 of 64 tokens, decodes take none"),
        pytest.param(((20, 9), (45, 9), (1, 9)), 4, 0, True, 1, id="one token too many ends the scan"),
        pytest.param(((65, 9), (1, 9)), 4, 0, True, 1, id="longer than a step: alone"),
        pytest.param(((1, 9), (65, 9)), 4, 0, True, 1, id="longer than a step: not beside another"),
        pytest.param(((1, 500), (1, 500)), 4, 0, True, 2, id="outputs are not reserved"),
        pytest.param(((20, 1), (44, 1), (1, 1)), 0, 0, False, 2, id="64 of 64 tokens"),
        pytest.param(((20, 1), (45, 1)), 0, 0, False, 1, id="one token too many"),
        pytest.param(((60, 1),), 4, 0, False, 1, id="decodes leave 60"),
        pytest.param(((61, 1),), 4, 0, False, 0, id="a whole prompt or none"),
        pytest.param(((65, 1), (1, 1)), 4, 0, False, 1, id="longer than any budget: alone"),
        pytest.param(((1, 1), (65, 1)), 4, 0, False, 1, id="longer than any budget: not beside another"),
        pytest.param(((65, 1),), 1, 100, False, 0, id="not while another takes all"),
        pytest.param(((13, 1),), 1, 50, False, 1, id="beside a last chunk"),
        pytest.param(((14, 1),), 1, 50, False, 0, id="not enough beside a last chunk"),
    ],
)
def test_only_whole_prompts_join(
    queue: tuple[tuple[int, int], ...], decodes: int, left: int, apart: bool, expected: int
) -> None:
    prefilling = (half_done(200, 200 - left),) if left else ()
    step = PoolStep(queue=prompts(*queue), running=bounded(*[16] * decodes) + prefilling, apart=apart)
    assert admitted(step, WholePrompts()) == expected


_GATES: tuple[GatePolicy, ...] = (ReserveMaximum(), Watermark(watermark=0.5), WholePrompts())


def test_seats_end_the_admissions_and_one_request_alone_always_starts() -> None:
    step = PoolStep(queue=prompts(*[(1, 1)] * 9), running=bounded(16, 16, 16))
    assert [admitted(step, gate) for gate in _GATES] == [5, 5, 5]
    alone = PoolStep(queue=prompts((100, 500)), total=5, free=5)
    assert admitted(alone, *_GATES, Watermark(watermark=0.1)) == 1


@given(
    queue=_QUEUE, bounds=_BOUNDS, total=st.integers(1, 120), share=st.floats(0, 1), more=st.integers(0, 60),
    tokens=st.integers(0, 60), apart=st.booleans(),
)  # fmt: skip
def test_more_memory_or_tokens_never_admit_less_and_several_gates_admit_what_each_does(
    queue: list[tuple[int, int]], bounds: list[int], total: int, share: float, more: int, tokens: int, apart: bool
) -> None:
    free = int(share * total)
    step = PoolStep(queue=prompts(*queue), running=bounded(*bounds), total=total, free=free, apart=apart)
    richer = replace(step, total=total + more, free=free + more, token_budget=64 + tokens)
    for gate in _GATES[:2]:  # one more token lets a prompt of 65 no longer pass as longer than a step
        assert admitted(richer, gate) >= admitted(step, gate)
    roomier = replace(richer, token_budget=64)
    assert admitted(roomier, WholePrompts()) >= admitted(step, WholePrompts())
    assert admitted(step, *_GATES) == min(admitted(step, gate) for gate in _GATES)


def test_each_gate_says_who_was_refused_by_it() -> None:
    step = PoolStep(queue=prompts((61, 9)), running=bounded(16, 16, 16, 16), free=100)
    assert select(InOrder(), step, *_GATES).why == {"w0": "whole_prompts"}
    assert select(InOrder(), replace(step, free=53, apart=True), *_GATES).why == {"w0": "watermark"}
    assert select(InOrder(), replace(step, total=8, apart=True), *_GATES).why == {"w0": "reserve_maximum"}


def leaves_for(total: int, free: int, freed: int, *gates: GatePolicy) -> Room:
    """Two run, whose bounds are 4 blocks each; one waits that needs 7 blocks of its own, with its output 8."""
    step = PoolStep(
        queue=prompts((100, 20)), running=bounded(64, 64), total=total, free=free, blocks={"r0": freed, "r1": freed},
        token_budget=200,
    )  # fmt: skip
    return select(SWAPPING, step, *gates)


@pytest.mark.parametrize(
    ("gates", "total", "free", "freed", "preempt"),
    [
        ((Watermark(),), 100, 12, 6, []),  # 95 - 88 = 7
        ((Watermark(),), 100, 11, 6, ["r1"]),  # 6 and 6
        ((Watermark(),), 100, 11, 0, None),
        ((ReserveMaximum(),), 16, 16, 1, []),  # 8 of 16 are promised
        ((ReserveMaximum(),), 15, 15, 1, ["r1"]),  # 7 and 4
        ((ReserveMaximum(),), 11, 11, 1, ["r1", "r0"]),  # 3 and 8
        ((ReserveMaximum(),), 7, 15, 1, None),
        ((Watermark(), ReserveMaximum()), 20, 7, 1, ["r1"]),  # 19 - 13 and 1; 12 of 20 are not promised
        ((Watermark(), ReserveMaximum()), 15, 15, 1, ["r1"]),
        ((WholePrompts(), ReserveMaximum()), 15, 15, 1, ["r1"]),
    ],
)
def test_who_leaves_gives_back_what_gates_count(
    gates: tuple[GatePolicy, ...], total: int, free: int, freed: int, preempt: list[str] | None
) -> None:
    room = leaves_for(total, free, freed, *gates)
    assert (room.admit, room.preempt) == (([], []) if preempt is None else (["w0"], preempt))


def test_a_half_done_prompt_that_leaves_takes_along_what_it_still_needed() -> None:
    """It holds 13 blocks and needs 69 more: without it 99 are free, and 30 are needed."""
    run = (*bounded(16), half_done(1312, 208, predicted_remaining_s=9.0))
    step = PoolStep(queue=prompts((480, 9)), running=run, free=86, token_budget=5000, max_model_len=4096)
    assert admitted(replace(step, running=run[:1], free=99), Watermark()) == 1
    assert select(SWAPPING, step, Watermark()).preempt == ["p"]


def test_a_gate_remembers_who_left_and_who_joined() -> None:
    """Each needs 4 blocks of 12, of which 4 each are promised to three; then the pool is full again."""
    step = PoolStep(queue=prompts((10, 54), (10, 54)), running=bounded(64, 64, 64), total=12)
    room = select(SWAPPING, step, ReserveMaximum())
    assert (room.admit, room.preempt, room.gates[0].closed) == (["w0", "w1"], ["r2", "r1"], True)
    # 95 - 89 and 6 - 7 leave 5, and that and 6 suffice for another 7.
    step = PoolStep(queue=prompts((100, 9), (100, 9)), running=bounded(64, 64), free=11, token_budget=999)
    room = select(SWAPPING, replace(step, blocks={"r0": 6, "r1": 6}), Watermark())
    assert (room.admit, room.preempt) == (["w0", "w1"], ["r1", "r0"])
