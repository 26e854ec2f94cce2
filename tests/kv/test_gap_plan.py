"""The plan of a returning prompt: by hand, and against trying everything."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.kv.gaps.plan import Action, Costs, GapPlan, Place, plan

D, H, N = Place.DEVICE, Place.HOST, Place.NOWHERE
REUSE, LOAD, COMPUTE = Action.REUSE, Action.LOAD, Action.COMPUTE
BLOCK = 4
MANY = 9


def compute_s(num_tokens: int, after: int) -> float:
    """One second a token, and a hundredth for each that it attends to: a first block of 4 takes 4.1, a tenth 5.54."""
    return num_tokens + 0.01 * (num_tokens * after + num_tokens * (num_tokens + 1) / 2)


def costs(*, load: float = 1.0, job: float = 0.0, gap: float = 0.0, int8: float = 0.0) -> Costs:
    return Costs(compute_s=compute_s, load_s_per_block=load, load_s=job, int8_s_per_block=int8, gap_s=gap)


def shown(found: GapPlan) -> list[tuple[str, int, int]]:
    return [(run.action.value, run.start, run.end) for run in found.runs]


def test_nothing_of_a_new_prompt_is_planned() -> None:
    assert plan([], BLOCK, costs(), max_gaps=MANY) == GapPlan(runs=(), cost_s=0.0)


def test_a_prefix_is_reused_and_the_rest_computed() -> None:
    found = plan([D, D, N, N], BLOCK, costs(gap=1.0), max_gaps=0)
    assert shown(found) == [("reuse", 0, 2), ("compute", 2, 4)]
    assert found.gaps == ()
    assert found.cost_s == pytest.approx(compute_s(8, 8))


def test_a_dropped_leading_end_is_computed_and_the_rest_reused() -> None:
    found = plan([N, N, D, D, D], BLOCK, costs(gap=1.0), max_gaps=1)
    assert shown(found) == [("compute", 0, 2), ("reuse", 2, 5)]
    assert [(gap.start, gap.end) for gap in found.gaps] == [(0, 2)]
    assert found.cost_s == pytest.approx(compute_s(8, 0) + 1.0)


def test_without_gaps_all_behind_the_first_miss_is_computed_again() -> None:
    found = plan([D, N, D, H], BLOCK, costs(), max_gaps=0)
    assert shown(found) == [("reuse", 0, 1), ("compute", 1, 4)]


def test_leading_and_middle_gaps_with_reuse_and_loads_between() -> None:
    found = plan([N, D, N, H, H, N], BLOCK, costs(gap=0.5, job=0.25), max_gaps=MANY)
    assert shown(found) == [("compute", 0, 1), ("reuse", 1, 2), ("compute", 2, 3), ("load", 3, 5), ("compute", 5, 6)]
    assert [(gap.start, gap.end) for gap in found.gaps] == [(0, 1), (2, 3)]
    expected = compute_s(4, 0) + 0.5 + compute_s(4, 8) + 0.5 + 0.25 + 2 * 1.0 + compute_s(4, 20)
    assert found.cost_s == pytest.approx(expected)
    assert [found.num_blocks(action) for action in Action] == [1, 2, 3]


def test_a_gap_that_costs_more_than_it_saves_is_closed() -> None:
    assert shown(plan([N, D, N], BLOCK, costs(gap=5.0), max_gaps=MANY)) == [("compute", 0, 3)]
    assert shown(plan([N, D, N], BLOCK, costs(gap=4.0), max_gaps=MANY))[1] == ("reuse", 1, 2)


def test_with_few_gaps_allowed_the_dearest_are_closed_last() -> None:
    """Of two islands, one of one block and one of three, the larger one is kept."""
    found = plan([N, D, N, D, D, D, N], BLOCK, costs(), max_gaps=1)
    assert shown(found) == [("compute", 0, 3), ("reuse", 3, 6), ("compute", 6, 7)]


def test_of_a_stretch_on_the_host_the_beginning_is_computed_where_that_is_quicker() -> None:
    """Blocks take 4.1, 4.26, 4.42, ... seconds: with loads of 4.3 s, the first two are computed."""
    found = plan([H] * 5, BLOCK, costs(load=4.3), max_gaps=1)
    assert shown(found) == [("compute", 0, 2), ("load", 2, 5)]
    assert shown(plan([H] * 5, BLOCK, costs(load=4.3, gap=1.0), max_gaps=1)) == [("load", 0, 5)]
    assert shown(plan([H] * 5, BLOCK, costs(load=9.0), max_gaps=1)) == [("compute", 0, 5)]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda: plan([N], 0, costs(), max_gaps=1), "block_size=0: must be at least 1"),
        (lambda: plan([N], BLOCK, costs(), max_gaps=-1), "max_gaps=-1: must be 0 or more"),
        (lambda: costs(load=-1.0), "load_s_per_block=-1.0: must be 0 or more seconds"),
    ],
)
def test_bad_values_are_refused(bad: object, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        bad()  # type: ignore[operator]
    assert said in str(caught.value)


def cost_of(actions: tuple[Action, ...], places: list[Place], price: Costs) -> tuple[float, int] | None:
    """Cost and gaps of one decision per block; none if it can't be carried out."""
    allowed = {D: (REUSE, COMPUTE), Place.DEVICE_INT8: (REUSE, COMPUTE), H: (LOAD, COMPUTE), N: (COMPUTE,)}
    if any(action not in allowed[place] for action, place in zip(actions, places, strict=True)):
        return None
    total, gaps = 0.0, 0
    for number, action in enumerate(actions):
        if action is COMPUTE:
            total += compute_s(BLOCK, number * BLOCK)
        elif action is LOAD:
            total += price.load_s_per_block + (price.load_s if number == 0 or actions[number - 1] is not LOAD else 0)
        elif places[number] is Place.DEVICE_INT8:
            total += price.int8_s_per_block
    for before, after in pairwise(actions):
        gaps += before is COMPUTE and after is not COMPUTE
    return total + gaps * price.gap_s, gaps


@given(
    places=st.lists(st.sampled_from(Place), max_size=8),
    load=st.floats(0, 6),
    job=st.sampled_from([0.0, 0.5, 5.0]),
    gap=st.sampled_from([0.0, 0.3, 5.0]),
    int8=st.sampled_from([0.0, 0.1, 4.3]),
    max_gaps=st.integers(0, 3),
)
def test_no_other_choice_is_cheaper(
    places: list[Place], load: float, job: float, gap: float, int8: float, max_gaps: int
) -> None:
    price = costs(load=load, job=job, gap=gap, int8=int8)
    found = plan(places, BLOCK, price, max_gaps=max_gaps)
    assert [run.start for run in found.runs] == [0, *(run.end for run in found.runs)][: len(found.runs)]
    assert all(before.action is not after.action for before, after in pairwise(found.runs))
    chosen = tuple(run.action for run in found.runs for _ in range(run.num_blocks))
    own = cost_of(chosen, places, price)
    assert own is not None
    assert own[0] == pytest.approx(found.cost_s)
    assert own[1] == len(found.gaps) <= max_gaps
    others = (cost_of(actions, places, price) for actions in product(Action, repeat=len(places)))
    cheapest = min(cost for one in others if one is not None for cost, gaps in [one] if gaps <= max_gaps)
    assert found.cost_s <= cheapest + 1e-9


def test_records_of_8_bits_are_read_where_they_cost_less_than_computing_them() -> None:
    """A first block takes 4.1 s to compute; the last one, behind four others, 4.74."""
    places = [Place.DEVICE_INT8, D, D, D, Place.DEVICE_INT8]
    free = plan(places, BLOCK, costs(), max_gaps=MANY)
    assert shown(free) == [("reuse", 0, 5)], "neighbours of both kinds are one run"
    found = plan(places, BLOCK, costs(int8=4.5), max_gaps=MANY)
    assert shown(found) == [("compute", 0, 1), ("reuse", 1, 5)]
    assert found.cost_s == pytest.approx(compute_s(4, 0) + 4.5)
