"""The plan of a returning prompt: by hand, and what must hold of any."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.kv.partial_prefix.plan import Action, gaps_of, plan

D, H, N = Action.REUSE, Action.LOAD, Action.COMPUTE
MANY = 9


def shown(places: list[Action], max_gaps: int = MANY) -> list[tuple[str, int, int]]:
    return [(run.action.value, run.start, run.end) for run in plan(places, max_gaps=max_gaps)]


@pytest.mark.parametrize("places", [[], [N, N]])
def test_where_nothing_is_kept_nothing_is_planned(places: list[Action]) -> None:
    assert plan(places, max_gaps=MANY) == ()


def test_a_prefix_is_reused_and_makes_no_gap() -> None:
    assert shown([D, D, H, N, N], 0) == [("reuse", 0, 2), ("load", 2, 3)]
    assert gaps_of(plan([D, D, H, N, N], max_gaps=0)) == 0


def test_a_dropped_leading_end_is_computed_and_the_rest_reused() -> None:
    assert shown([N, N, D, D, D], 1) == [("compute", 0, 2), ("reuse", 2, 5)]


def test_leading_and_middle_gaps_with_reuse_and_loads_between() -> None:
    wanted = [("compute", 0, 1), ("reuse", 1, 2), ("compute", 2, 3), ("load", 3, 5)]
    assert shown([N, D, N, H, H, N]) == wanted


def test_with_few_gaps_allowed_the_longest_stretches_are_kept() -> None:
    """Of two islands, one of one block and one of three, the larger one is kept; and the prefix in any case."""
    assert shown([N, D, N, D, H, D, N], 1) == [("compute", 0, 3), ("reuse", 3, 4), ("load", 4, 5), ("reuse", 5, 6)]
    assert shown([D, N, D, D, N, D], 1) == [("reuse", 0, 1), ("compute", 1, 2), ("reuse", 2, 4)]
    assert shown([D, N, D, H], 0) == [("reuse", 0, 1)]


def test_a_bad_value_is_refused() -> None:
    with pytest.raises(ValueError, match="max_gaps=-1: must be 0 or more"):
        plan([N], max_gaps=-1)


@given(places=st.lists(st.sampled_from(Action), max_size=24), max_gaps=st.integers(0, 4))
def test_all_is_used_that_the_gaps_allow(places: list[Action], max_gaps: int) -> None:
    runs = plan(places, max_gaps=max_gaps)
    assert [run.start for run in runs] == [0, *(run.end for run in runs)][: len(runs)]
    assert all(before.action is not after.action for before, after in pairwise(runs))
    assert not runs or runs[-1].action is not Action.COMPUTE
    assert gaps_of(runs) <= max_gaps
    chosen = [run.action for run in runs for _ in range(run.num_blocks)]
    given_up = [n for n, action in enumerate(chosen) if action is not places[n]]
    assert all(chosen[n] is Action.COMPUTE for n in given_up)
    if gaps_of(runs) < max_gaps:
        assert not given_up
        assert all(place is N for place in places[len(chosen) :])
