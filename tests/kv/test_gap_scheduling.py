"""Conversations whose leading KV was dropped, through the real scheduler and block manager: gaps in one step."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.support.extent import with_full
from tests.support.fake_runner import RunnerError
from tests.support.preempting import PREEMPTING
from vllm_ext.simulation.engine.harness import block_hasher, make_request

from .gap_talks import BLOCK, DEPTHS, ONE_GAP_OF_FIVE_BLOCKS, Talks, crowded, returning, words


@DEPTHS
def test_a_dropped_leading_end_is_computed_with_the_new_prompt_in_one_step(depth: int) -> None:
    talks = returning(depth=depth)
    first, *later = talks.talk("a", words(2, 40))
    # 5 blocks of the gap, the block of the answer that was not full, and the new prompt
    assert first == {"a2": 5 * BLOCK + 4 + 40}
    assert all(step in ({"a2": 1}, {}) for step in later)
    assert talks.scheduler.gaps.counts.state() == ONE_GAP_OF_FIVE_BLOCKS
    third, *_ = talks.talk("a", words(3, 10))
    assert third["a3"] <= 10 + BLOCK + 4, "an ordinary hit: the whole conversation is in the prefix cache again"
    assert talks.scheduler.gaps.counts.requests == 1


@DEPTHS
@pytest.mark.parametrize("budget", [3, 7, 16, 33, 100])
def test_gaps_are_computed_in_chunks(budget: int, depth: int) -> None:
    talks = Talks(depth=depth, num_blocks=64, max_num_seqs=3, max_num_batched_tokens=budget)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(2, 5))
    talks.drop("a", range(7, 8))
    steps = talks.talk("a", words(2, 40))
    decoded = 3 + (depth - 1)  # of 4 tokens, and with async scheduling one that is not wanted any more
    assert sum(step.get("a2", 0) for step in steps) - decoded == 4 * BLOCK + 4 + 40
    assert talks.scheduler.gaps.counts.gaps == 2
    assert talks.scheduler.gaps.counts.requests_by_gaps == {2: 1}
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 63


def test_a_request_that_does_not_read_what_is_kept_is_counted_once() -> None:
    talks = crowded(answer=30)
    req_id = talks.say("a", words(3, 40))  # waits: 15 blocks, of which 10 are free
    talks.scheduler.requests[req_id].skip_reading_prefix_cache = True
    for _ in range(5):
        talks.step()
    assert talks.scheduler.gaps.counts.refused == {"unsupported": 1}
    talks.drain()
    assert talks.scheduler.gaps.counts.requests == 0


def test_without_it_all_from_the_first_missing_block_on_is_computed() -> None:
    talks = returning(gaps="off")
    first, *_ = talks.talk("a", words(2, 40))
    assert first == {"a2": 12 * BLOCK + 4 + 40}
    assert talks.scheduler.gaps is None


def test_the_device_drops_leading_ends_first() -> None:
    talks = Talks(num_blocks=26, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.talk("b", words(2, 17 * BLOCK))  # 18 blocks: 5 of the 13 of the first one go
    request = make_request("probe", talks.history["a"], hasher=block_hasher(BLOCK))
    there = [talks.pool.get_cached_block(h, [0]) is not None for h in request.block_hashes]
    assert there == [False] * 5 + [True] * 7
    first, *_ = talks.talk("a", words(3, 20))
    assert first["a2"] == 5 * BLOCK + 4 + 20


def test_a_twin_reuses_what_the_first_one_computes() -> None:
    talks = returning()
    talks.history["b"] = talks.history["a"]
    talks.say("a", words(2, 20))
    talks.say("b", words(3, 20))
    first, *_ = talks.drain()
    assert first == {"a2": 5 * BLOCK + 4 + 20, "b1": 4 + 20}, "in one step, as vLLM's prefix cache does"


@DEPTHS
@pytest.mark.parametrize("after", range(1, 8))
def test_an_abort_within_a_gap_leaves_nothing_behind(after: int, depth: int) -> None:
    talks = Talks(depth=depth, num_blocks=64, max_num_batched_tokens=32)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(8))
    req_id = talks.say("a", words(2, 40))
    for _ in range(after):
        talks.step()
    talks.loop.abort(req_id)
    talks.drain()
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 63
    talks.say("a", words(3, 8))  # what it did enter into the prefix cache is checked when it is read
    talks.drain()


def test_one_that_is_aborted_before_it_gets_its_blocks_leaves_nothing_behind() -> None:
    talks = crowded(answer=30)
    req_id = talks.say("a", words(3, 40))  # 15 blocks, of which 10 are free
    talks.step()
    assert not talks.manager.placements[req_id].placed
    talks.loop.abort(req_id)
    talks.drain()
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == 25


def test_what_is_kept_under_another_salt_is_nobodys() -> None:
    talks = Talks(num_blocks=64, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK), salt="mine")
    talks.drop("a", range(5), salt="mine")
    talks.history["b"] = talks.history["a"]
    (first, *_), tokens = talks.talk("b", words(2, 20), salt="yours"), 12 * BLOCK + 4 + 20
    assert first == {"b1": tokens}
    assert talks.scheduler.gaps.counts.requests == 0
    talks.talk("a", words(2, 20), salt="mine")
    assert talks.scheduler.gaps.counts.requests == 1


def test_who_waits_for_blocks_is_not_looked_up_in_full_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    talks = crowded(answer=60)
    looked_for: list[Any] = []
    real = talks.pool.get_cached_block
    monkeypatch.setattr(talks.pool, "get_cached_block", lambda *args: looked_for.append(args) or real(*args))
    talks.say("a", words(3, 40))  # 15 blocks, of which 10 are free
    talks.step()
    at_first = len(looked_for)
    for _ in range(10):
        talks.step()
    assert at_first == 1 + 14, "vLLM's own lookup ends at the first"
    assert len(looked_for) - at_first == 10 * (1 + 7), "those that were kept"
    talks.drain()
    assert talks.scheduler.gaps.counts.requests == 1
    assert talks.manager.searches == {}


def test_the_runner_would_see_a_block_that_is_not_what_it_is_taken_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a kept block of another conversation, and a jump over a gap that was not computed."""
    talks = returning()
    probe = make_request("probe", talks.history["a"], hasher=block_hasher(BLOCK))
    kept = talks.pool.get_cached_block(probe.block_hashes[8], [0])
    talks.runner.ledger.slots[kept[0].block_id * BLOCK] = -1  # type: ignore[union-attr]
    with pytest.raises(RunnerError, match="is not that of its own prefix"):
        talks.talk("a", words(2, 40))

    talks = returning()
    monkeypatch.setattr(talks.scheduler.gaps, "layouts", lambda *_: {})
    with pytest.raises(RunnerError, match="is not that of its own prefix"):
        talks.talk("a", words(2, 40))


def test_a_step_has_no_more_rows_than_the_attention_kernels_tables() -> None:
    """Tables are as long as ``--max-num-seqs``; with gaps beyond that FlashInfer raises, and FA3 writes behind its own.

    Three conversations come back without their beginnings, and a fourth asks something new, where four may run: the
    first two take a row more each, the third finds none left, and the last waits until gaps are computed.
    """
    talks = Talks(num_blocks=128, max_num_seqs=4, max_num_batched_tokens=64)
    for name in "abc":
        talks.talk(name, words(ord(name), 12 * BLOCK))
        talks.drop(name, range(5))
    talks.say("b", words(4, 40))
    talks.step()
    talks.say("a", words(5, 40))
    talks.say("c", words(6, 40))
    talks.say("d", words(7, 40))
    talks.drain()
    assert talks.most_rows <= 4
    counts = talks.scheduler.gaps.counts
    assert counts.requests + counts.refused["rows"] == 3
    assert counts.refused["rows"] > 0


def test_a_request_may_have_as_many_gaps_as_rows_are_left() -> None:
    talks = Talks(num_blocks=64, max_num_seqs=2, max_num_batched_tokens=512)
    talks.talk("a", words(1, 12 * BLOCK))
    talks.drop("a", range(2, 5))
    talks.drop("a", range(7, 8))
    talks.talk("a", words(2, 40))
    assert talks.scheduler.gaps.counts.requests_by_gaps == {1: 1}


def test_where_no_row_is_left_the_missing_front_is_computed_in_full() -> None:
    talks = returning(max_num_seqs=1)
    first, *_ = talks.talk("a", words(2, 40))
    assert first == {"a2": 12 * BLOCK + 4 + 40}
    assert talks.scheduler.gaps.counts.refused == {"rows": 1}


@DEPTHS
@pytest.mark.parametrize("seed", with_full(range(2), range(6)))
@pytest.mark.parametrize("system", ["fcfs", PREEMPTING, "auto"])
def test_walk(system: str, seed: int, depth: int) -> None:
    """Random turns in a pool that is too small, random drops, aborts; every read is checked."""
    rng = random.Random(seed)
    budget = rng.choice([24, 48, 96, 512])
    talks = Talks(
        system=system,
        depth=depth,
        num_blocks=rng.randint(34, 48),
        max_num_batched_tokens=budget,
        max_num_seqs=8 if seed % 2 == 0 else 4,
        max_model_len=448,
    )
    shared = words(99, rng.choice([0, 24, 48]))
    talks.walk(rng, shared, clients=3, lose=0.3)
    counts = talks.scheduler.gaps.counts
    assert counts.requests > 3, "the walk went past what it is for"
    if (system, seed) == (PREEMPTING, 0):
        assert sum(talks.scheduler.vllm_ext_state()["preemptions"].values()) > 0
    assert talks.manager.placements == {}
    assert talks.pool.get_num_free_blocks() == talks.pool.num_gpu_blocks - 1
    assert talks.scheduler.vllm_ext_state()["fallbacks"] == 0
