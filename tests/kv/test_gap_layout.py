"""Virtual indices of a sequence with gaps, by hand and against counting."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.kv.partial_prefix.layout import GapLayout, Span


def test_a_dropped_leading_end() -> None:
    layout = GapLayout(((64, 160),))  # [0, 64) is computed again, then what follows 160
    assert (layout.num_kept, layout.end) == (96, 160)
    assert [layout.position(index) for index in (96, 97, 159, 160, 161)] == [0, 1, 63, 160, 161]
    assert list(layout.spans(96, 64)) == [Span(0, 64)]
    assert list(layout.spans(96, 80)) == [Span(0, 64), Span(160, 176)]
    assert list(layout.spans(150, 12)) == [Span(54, 64), Span(160, 162)]
    assert list(layout.spans(160, 5)) == [Span(160, 165)]
    assert list(layout.spans(500, 1)) == [Span(500, 501)], "long after: an ordinary decode"


def test_a_prefix_hit_and_two_gaps() -> None:
    layout = GapLayout(((0, 32), (64, 96), (128, 160)))
    assert (layout.num_kept, layout.end) == (96, 160)
    assert list(layout.spans(96, 70)) == [Span(32, 64), Span(96, 128), Span(160, 166)]
    assert list(layout.spans(127, 2)) == [Span(63, 64), Span(96, 97)]
    assert list(layout.spans(96, 0)) == []


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
    assert found == computed
    assert all(layout.position(index) == index for index in range(layout.end, total))
