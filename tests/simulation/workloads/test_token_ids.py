"""Token ids of prompts that share something."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vllm_ext.simulation.workloads import token_ids

BLOCK = 8


def test_first_3996_openings_differ_in_their_first_token_and_later_ones_in_the_second() -> None:
    assert len({token_ids.opening(n, 1)[0] for n in range(3996)}) == 3996
    assert token_ids.opening(0, 5)[0] == token_ids.opening(3996, 5)[0]
    assert token_ids.opening(0, 5)[1] != token_ids.opening(3996, 5)[1]


@given(number=st.integers(0, 10**9), count=st.integers(1, 40_000))
def test_ids_lie_in_their_range_and_have_the_wanted_length(number: int, count: int) -> None:
    numbered = [make(number, count) for make in (token_ids.opening, token_ids.alone)]
    for ids in (*numbered, token_ids.added(number, 3, count), token_ids.system_prompt(count)):
        assert len(ids) == count
        assert min(ids) >= 100
        assert max(ids) < 4096


@given(
    shared=st.lists(st.integers(0, 10**6), max_size=4, unique=True),
    own=st.tuples(st.integers(10**6 + 1, 10**9), st.integers(10**6 + 1, 10**9)).filter(lambda o: o[0] != o[1]),
    last=st.integers(3, BLOCK),
)
def test_prompts_share_exactly_the_tokens_of_their_common_leading_hash_ids(
    shared: list[int], own: tuple[int, int], last: int
) -> None:
    count = len(shared) * BLOCK + last
    one, other = (token_ids.of_blocks([*shared, o], count, BLOCK) for o in own)
    common = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))))
    assert len(one) == len(other) == count
    assert len(shared) * BLOCK <= common < len(shared) * BLOCK + 3, "the number of a block takes three tokens"


def test_partial_last_block_begins_like_the_whole_one() -> None:
    assert token_ids.of_blocks([5, 7], 11, BLOCK) == token_ids.of_blocks([5, 7, 9], 24, BLOCK)[:11]


def test_what_is_numbered_alike_differs_by_its_kind_and_from_the_system_prompt() -> None:
    numbered = (token_ids.opening(1, 16), token_ids.alone(1, 16), token_ids.of_blocks([1], 16, 16))
    assert len({tuple(ids[3:]) for ids in (*numbered, token_ids.system_prompt(16))}) == 4
