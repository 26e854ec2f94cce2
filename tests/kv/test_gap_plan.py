"""The plan of a returning prompt and the virtual indices that it gives: by hand, and what must hold of any."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.kv.partial_prefix.layout import GapLayout, Span
from vllm_ext.kv.partial_prefix.plan import Action, gaps_of, plan

D, H, N = Action.REUSE, Action.LOAD, Action.COMPUTE
MANY = 9


def shown(places: list[Action], max_gaps: int = MANY) -> list[tuple[str, int, int]]:
    return [(run.action.value, run.start, run.end) for run in plan(places, max_gaps=max_gaps)]


def test_leading_and_middle_gaps_with_reuse_and_loads_between() -> None:
    wanted = [("compute", 0, 1), ("reuse", 1, 2), ("compute", 2, 3), ("load", 3, 5)]
    assert shown([N, D, N, H, H, N]) == wanted


def test_with_few_gaps_allowed_the_longest_stretches_are_kept() -> None:
    """Of two islands, one of one block and one of three, the larger one is kept; and the prefix in any case."""
    assert shown([N, D, N, D, H, D, N], 1) == [("compute", 0, 3), ("reuse", 3, 4), ("load", 4, 5), ("reuse", 5, 6)]


def test_a_bad_value_is_refused() -> None:
    with pytest.raises(ValueError, match="max_gaps=-1: must be 0 or more"):
        plan([N], max_gaps=-1)


@given(places=st.lists(st.sampled_from(Action), max_size=24), max_gaps=st.integers(0, 4))
def test_as_much_is_used_as_the_gaps_allow(places: list[Action], max_gaps: int) -> None:
    runs = plan(places, max_gaps=max_gaps)
    assert [run.start for run in runs] == [0, *(run.end for run in runs)][: len(runs)]
    assert all(before.action is not after.action for before, after in itertools.pairwise(runs))
    assert not runs or runs[-1].action is not N
    assert gaps_of(runs) == sum(run.action is N for run in runs) <= max_gaps
    chosen = [run.action for run in runs for _ in range(run.num_blocks)]
    assert all(action in (N, place) for action, place in zip(chosen, places, strict=False))
    kept = "".join("-" if place is N else "k" for place in places)
    prefix, *islands = kept.split("-")
    lengths = sorted(map(len, islands), reverse=True)
    assert sum(action is not N for action in chosen) == len(prefix) + sum(lengths[:max_gaps])


def test_a_dropped_leading_end() -> None:
    layout = GapLayout(((64, 160),))  # [0, 64) is computed again, then what follows 160
    assert (layout.num_kept, layout.end) == (96, 160)
    assert [layout.position(index) for index in (96, 97, 159, 160, 161)] == [0, 1, 63, 160, 161]
    assert list(layout.spans(96, 64)) == [Span(0, 64)]
    assert list(layout.spans(96, 80)) == [Span(0, 64), Span(160, 176)]
    assert list(layout.spans(150, 12)) == [Span(54, 64), Span(160, 162)]
    assert list(layout.spans(160, 5)) == [Span(160, 165)]
    assert list(layout.spans(500, 1)) == [Span(500, 501)], "long after: an ordinary decode"


def test_what_is_no_layout_is_refused() -> None:
    for kept in [(), ((0, 32),), ((32, 32),), ((64, 96), (32, 48)), ((16, 32), (32, 64))]:
        with pytest.raises(ValueError, match="kept="):
            GapLayout(kept)
    with pytest.raises(ValueError, match="index=95: must be at least 96"):
        GapLayout(((64, 160),)).position(95)


@given(data=st.data())
def test_spans_are_the_computed_tokens_in_order(data: st.DataObject) -> None:
    kept_tokens = data.draw(st.lists(st.booleans(), min_size=2, max_size=40))
    runs, start = [], 0
    for position in range(1, len(kept_tokens) + 1):
        if position == len(kept_tokens) or kept_tokens[position] != kept_tokens[start]:
            if kept_tokens[start]:
                runs.append((start, position))
            start = position
    if not runs or (runs[-1][0] == 0):
        return
    layout = GapLayout(tuple(runs))
    computed = [position for position, kept in enumerate(kept_tokens) if not kept]
    total = len(kept_tokens) + 5
    computed += range(len(kept_tokens), total)
    index = layout.num_kept
    found: list[int] = []
    while index < total:  # in chunks, as a scheduler does
        chunk = min(data.draw(st.integers(1, 9)), total - index)
        spans = list(layout.spans(index, chunk))
        assert sum(end - start for start, end in spans) == chunk
        assert all(before.end < after.start for before, after in itertools.pairwise(spans))
        found += [position for start, end in spans for position in range(start, end)]
        index += chunk
    assert found == computed == [layout.position(index) for index in range(layout.num_kept, total)]
    assert (layout.num_kept, layout.end) == (sum(kept_tokens), runs[-1][1])
