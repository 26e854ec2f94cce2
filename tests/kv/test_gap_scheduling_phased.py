"""Conversations whose leading KV was dropped, through the real scheduler: gaps in steps of their own."""

from __future__ import annotations

import pytest

from tests.support.fake_runner import RunnerError
from vllm_ext.kv.gaps import crossing
from vllm_ext.kv.gaps.phases import send_positions

from .gap_talks import BLOCK, DEPTHS, ONE_GAP_OF_FIVE_BLOCKS, RUNNERS, Talks, words


@DEPTHS
@RUNNERS
def test_a_dropped_leading_end_is_computed_in_a_step_before_the_new_prompt(v2: bool, depth: int) -> None:
    talks = Talks(gaps="phased", v2=v2, depth=depth, num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(5))
    first, second, *later = talks.talk("a", words(2, 40))
    assert (first, second) == ({"a2": 5 * BLOCK}, {"a2": 4 + 40})
    assert all(step in ({"a2": 1}, {}) for step in later)
    assert talks.scheduler.gaps.counts.state() == ONE_GAP_OF_FIVE_BLOCKS
    third, *_ = talks.talk("a", words(3, 10))
    assert third["a3"] <= 10 + BLOCK + 4, "an ordinary hit: the whole conversation is in the prefix cache again"


@DEPTHS
@RUNNERS
@pytest.mark.parametrize("budget", [2, 7, 16, 33, 100])
def test_several_gaps_are_computed_one_after_the_other_in_chunks(budget: int, v2: bool, depth: int) -> None:
    talks = Talks(gaps="phased", v2=v2, depth=depth, num_blocks=64, max_num_seqs=2, max_num_batched_tokens=budget)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(2, 5))
    talks.drop("a", range(7, 8))
    steps = [step["a2"] for step in talks.talk("a", words(2, 40)) if "a2" in step]
    prefill = steps[: len(steps) - 3 - (depth - 1)]
    pieces = [-(-tokens // budget) for tokens in (3 * BLOCK, BLOCK, 44)]
    assert len(prefill) == sum(pieces)
    assert sum(prefill) == 4 * BLOCK + 44
    assert sum(prefill[: pieces[0]]) == 3 * BLOCK, "no piece goes beyond a kept range"
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 63


@DEPTHS
@RUNNERS
@pytest.mark.parametrize("after", range(1, 6))
def test_an_abort_between_two_gaps_leaves_nothing_behind(after: int, v2: bool, depth: int) -> None:
    talks = Talks(gaps="phased", v2=v2, depth=depth, num_blocks=64, max_num_batched_tokens=32)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(2, 4))
    talks.drop("a", range(6, 9))
    req_id = talks.say("a", words(2, 40))
    for _ in range(after):
        talks.step()
    talks.loop.abort(req_id)
    talks.drain()
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 63
    talks.say("a", words(3, 8))
    talks.drain()


def test_runners_that_are_not_told_where_a_piece_stands_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative controls of the tests above: virtual counts are sent as they are; V2 is not sent the request anew."""

    def talk(v2: bool) -> None:
        talks = Talks(gaps="phased", v2=v2, num_blocks=64, max_num_batched_tokens=512)
        talks.talk("a", words(1, 12 * BLOCK))
        talks.drop("a", range(5))
        talks.talk("a", words(2, 40))

    with monkeypatch.context() as patch:
        patch.setattr(crossing, "send_positions", lambda *_: None)
        with pytest.raises(RunnerError, match="is not that of its own prefix"):
            talk(v2=False)
    with monkeypatch.context() as patch:
        patch.setattr(
            crossing, "send_positions", lambda output, placements, _: send_positions(output, placements, None)
        )
        with pytest.raises(RunnerError, match="this runner counts by itself: 80"):
            talk(v2=True)
