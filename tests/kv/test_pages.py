"""A page costs what is on it, wherever it begins and whatever was removed."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.kv.conversations.pages import _BLOCK, Pages


def pages(numbers: range) -> Pages[str]:
    made: Pages[str] = Pages()
    for number in numbers:
        made.add(number, str(number))
    return made


def page(found: Pages[str], cursor: int, limit: int) -> list[int]:
    return [number for number, _ in islice(found.after(cursor), limit)]


def test_pages_follow_each_other() -> None:
    made = pages(range(1, 1001))
    cursor, seen = 0, []
    while rows := page(made, cursor, 7):
        seen += rows
        cursor = rows[-1]
    assert seen == list(range(1, 1001))


def test_a_cursor_may_be_gone() -> None:
    made = pages(range(1, 1001))
    for number in range(2, 1000):
        made.remove(number)
    assert page(made, 500, 10) == [1000]
    assert page(made, 0, 10) == [1, 1000]
    assert page(made, 1000, 10) == []
    assert len(made._blocks) == len(made._firsts) == 2, "empty blocks are gone"


def test_what_is_not_there_is_not_removed() -> None:
    with pytest.raises(KeyError):
        Pages[str]().remove(1)
    with pytest.raises(KeyError):
        pages(range(1, 3)).remove(7)


@given(st.lists(st.booleans(), max_size=3 * _BLOCK), st.integers(0, 3 * _BLOCK))
def test_it_is_a_sorted_list(kept: list[bool], cursor: int) -> None:
    made = pages(range(1, len(kept) + 1))
    for number, keep in enumerate(kept, start=1):
        if not keep:
            made.remove(number)
    expected = [number for number, keep in enumerate(kept, start=1) if keep and number > cursor]
    assert page(made, cursor, len(kept) + 1) == expected
    made.add(len(kept) + 1, "more")
    assert page(made, len(kept), 2) == [len(kept) + 1]
