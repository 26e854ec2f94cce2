"""Records of a block pool: what moves into them, what they make room for, and who holds them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock, KVCacheBlockCopy, make_block_hash_with_group_id

from vllm_ext.kv.eviction.free_queue import RetentionQueue
from vllm_ext.kv.int8.geometry import ArenaGeometry
from vllm_ext.kv.int8.records import Records
from vllm_ext.kv.int8.step import Direction, RecordMove, RecordStep
from vllm_ext.simulation.engine.events import VirtualClock

BLOCK = 16
TO_RECORD, TO_BLOCK = Direction.TO_RECORD, Direction.TO_BLOCK


class Pool:
    """A pool of so many blocks besides the null block, and so many records; contents are letters."""

    def __init__(self, num_blocks: int = 4, num_records: int = 2, *, clock: VirtualClock | None = None) -> None:
        self.pool = BlockPool(num_blocks + 1, True, BLOCK)
        if clock is not None:
            RetentionQueue.serve(self.pool, clock, lambda end: 1.0 + end / 1024)
        geometry = ArenaGeometry(
            num_blocks=num_blocks + 1, arena_pages=num_records, scratch_pages=num_records, num_layers=1, page_bytes=64,
            record_bytes=64,
        )  # fmt: skip
        self.records = Records(self.pool, geometry)

    def fill(self, content: str) -> list[int]:
        """Let a block hold each letter, the first one first in its sequence, and free them as vLLM does."""
        blocks = self.pool.get_new_blocks(len(content))
        for number, (letter, block) in enumerate(zip(content, blocks, strict=True)):
            self.pool._insert_block_hash(key(letter), block, (number + 1) * BLOCK)
        self.pool.free_blocks(reversed(blocks))
        return [block.block_id for block in blocks]

    def where(self, letter: str) -> KVCacheBlock | None:
        found: KVCacheBlock | None = self.pool.cached_block_hash_to_block.get_one_block(key(letter))
        return found

    def in_records(self, letters: str) -> str:
        return "".join(c for c in letters if (b := self.where(c)) is not None and self.records.is_record(b))

    def step(self, *reads: int, copies: list[KVCacheBlockCopy] | None = None) -> RecordStep | None:
        return self.records.step(reads, SimpleNamespace(kv_cache_block_copies=copies))


def key(letter: str) -> Any:
    return make_block_hash_with_group_id(BlockHash(letter.encode()), 0)


def test_what_is_evicted_is_found_in_a_record_and_moved_before_its_block_is_written() -> None:
    pool = Pool()
    a, b, _, _ = pool.fill("abcd")
    taken = pool.pool.get_new_blocks(2)  # the last ones of a sequence go first
    assert pool.in_records("abcd") == "cd"
    step = pool.step()
    assert step is not None
    assert [(m.direction, m.block) for m in step.moves] == [(TO_RECORD, block.block_id) for block in taken]
    assert [pool.where(letter).block_id for letter in "ab"] == [a, b]  # type: ignore[union-attr]
    assert pool.step() is None


def test_new_tokens_never_get_a_record() -> None:
    pool = Pool()
    assert pool.pool.get_num_free_blocks() == 4
    assert all(not pool.records.is_record(block) for block in pool.pool.get_new_blocks(4))
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.pool.get_new_blocks(1)
    assert pool.records.num_free == 2


def test_the_oldest_record_makes_room_and_its_move_is_not_made_if_nobody_read_it() -> None:
    pool = Pool()
    pool.fill("abcd")
    pool.pool.get_new_blocks(4)
    assert pool.in_records("abcd") == "ab"
    assert pool.records.counts.forgotten == {"dropped": 2}
    step = pool.step()
    assert step is not None
    assert len(step.moves) == 2


def test_by_value_a_block_of_less_value_than_any_record_is_lost() -> None:
    """Leading blocks cost least to compute again; with a record's content older by far it is the other way round."""
    clock = VirtualClock(100.0)
    pool = Pool(num_blocks=4, num_records=1, clock=clock)
    pool.fill("abcd")
    pool.pool.get_new_blocks(4)
    assert pool.in_records("abcd") == "d", "each displaced the one before it, of less value"
    younger = Pool(num_blocks=2, num_records=1, clock=clock)
    younger.fill("ab")
    clock.advance(1000.0)
    held = younger.pool.get_new_blocks(1)
    assert younger.in_records("ab") == "a"
    younger.pool.free_blocks(held)
    clock.advance(1.0)
    (record,) = [younger.where("a")]
    younger.pool.touch([record])
    younger.pool.free_blocks([record])  # used just now: worth more than what was freed long ago
    younger.pool.get_new_blocks(2)
    assert younger.in_records("ab") == "a"
    assert younger.records.counts.forgotten == {"lost": 1}


def test_a_held_record_is_never_overwritten() -> None:
    pool = Pool()
    pool.fill("abcd")
    pool.pool.get_new_blocks(2)
    held = [pool.where("c"), pool.where("d")]
    pool.pool.touch(held)
    pool.pool.get_new_blocks(2)
    assert pool.in_records("abcd") == "cd"
    assert pool.records.counts.forgotten == {"lost": 2}


def test_records_are_moved_into_blocks_as_far_as_there_is_room() -> None:
    pool = Pool(num_blocks=5, num_records=3)
    pool.fill("abc")
    pool.pool.free_blocks(pool.pool.get_new_blocks(5))
    table = [pool.where(letter) for letter in "abc"]
    assert pool.in_records("abc") == "abc"
    pool.pool.touch(table)
    pool.step()
    pool.records.spare_blocks = lambda: 2
    records = [block.block_id for block in table if block is not None]
    pool.records.promote(table, BLOCK)  # type: ignore[arg-type]
    assert pool.in_records("abc") == "c"
    step = pool.step(records[2])
    assert step is not None
    assert [(m.direction, m.record) for m in step.moves] == [(TO_BLOCK, record) for record in records[:2]]
    assert list(step.reads) == [records[2]]
    assert pool.records.counts.read_tokens == BLOCK
    pool.pool.free_blocks(reversed(table))
    assert (pool.pool.get_num_free_blocks(), pool.records.num_free) == (5, 3)


def test_a_record_that_others_read_stays_when_it_is_moved_into_a_block() -> None:
    pool = Pool()
    pool.fill("a")
    pool.pool.free_blocks(pool.pool.get_new_blocks(4))
    record = pool.where("a")
    pool.pool.touch([record])
    pool.pool.touch([record])
    pool.records.spare_blocks = lambda: 4
    table = [record]
    pool.records.promote(table, BLOCK)  # type: ignore[arg-type]
    assert pool.where("a") is record
    assert table[0] is not record


def test_what_a_preempted_request_waits_for_makes_room_last() -> None:
    pool = Pool(num_blocks=4, num_records=2)
    pool.fill("ab")
    table = [pool.where("a"), pool.where("b")]
    pool.records.await_blocks("r", table)  # type: ignore[arg-type]
    pool.fill("cd")
    pool.pool.free_blocks(pool.pool.get_new_blocks(4))
    assert pool.in_records("abcd") == "ab", "the younger ones are lost"
    assert pool.records.counts.forgotten == {"lost": 2}
    pool.records.forget("r")
    pool.fill("ef")
    pool.pool.free_blocks(pool.pool.get_new_blocks(4))
    assert pool.in_records("abef") == "ef"


def test_of_what_is_waited_for_the_oldest_makes_room() -> None:
    pool = Pool(num_blocks=4, num_records=2)
    pool.fill("abcd")
    pool.records.await_blocks("r", [pool.where(letter) for letter in "abcd"])  # type: ignore[misc]
    pool.pool.free_blocks(pool.pool.get_new_blocks(4))
    assert pool.in_records("abcd") == "ab"
    assert pool.records.num_free == 2


def request(num_tokens: int, req_id: str = "r") -> Any:
    return SimpleNamespace(request_id=req_id, num_tokens=num_tokens)


def test_a_partly_filled_block_is_kept_for_its_request_until_it_resumes() -> None:
    pool = Pool()
    table = pool.pool.get_new_blocks(2)
    pool.records.keep_partial("r", table, BLOCK + 5, BLOCK)
    pool.pool.free_blocks(reversed(table))
    step = pool.step()
    assert step is not None
    ((direction, block, record_id, num_tokens),) = step.moves
    assert (direction, block, num_tokens) == (TO_RECORD, table[1].block_id, 5)
    assert pool.records.partial_hit(request(BLOCK + 6), 0, BLOCK) is None, "what stands before it is gone"
    hit = pool.records.partial_hit(request(BLOCK + 6), BLOCK, BLOCK)
    assert hit is not None
    record, found = hit
    assert (record.block_id, found) == (record_id, 5)
    assert pool.records.partial_hit(request(BLOCK + 4), BLOCK, BLOCK) == (record, 3), "the last token is computed"
    copies = [KVCacheBlockCopy(record_id, 3), KVCacheBlockCopy(1, 2)]
    output = SimpleNamespace(kv_cache_block_copies=copies)
    step = pool.records.step((), output)
    assert step is not None
    assert list(step.moves) == [RecordMove(TO_BLOCK, 3, record_id)]
    assert output.kv_cache_block_copies == [KVCacheBlockCopy(1, 2)], "vLLM's own copies stay"
    pool.records.adopted("r", record)
    assert pool.records.counts.resumed_tokens == 5
    assert pool.records.num_free == 2


@pytest.mark.parametrize("num_tokens", [0, BLOCK, 2 * BLOCK])
def test_whole_blocks_have_no_rest_to_keep(num_tokens: int) -> None:
    pool = Pool()
    pool.records.keep_partial("r", pool.pool.get_new_blocks(2), num_tokens, BLOCK)
    assert pool.step() is None


def test_a_request_that_is_preempted_twice_or_ends_gives_its_record_back() -> None:
    pool = Pool()
    table = pool.pool.get_new_blocks(2)
    pool.records.keep_partial("r", table, 5, BLOCK)
    pool.records.keep_partial("r", table, BLOCK + 7, BLOCK)
    assert pool.records.num_free == 1
    pool.records.keep_partial("other", table, 3, BLOCK)
    pool.records.keep_partial("third", table, 3, BLOCK)  # all records are held
    assert pool.records.partial_hit(request(9, "third"), 0, BLOCK) is None
    pool.records.forget("r")
    pool.records.forget_all()
    assert pool.records.num_free == 2


def test_a_reset_forgets_what_records_hold() -> None:
    pool = Pool()
    pool.fill("abcd")
    pool.pool.free_blocks(pool.pool.get_new_blocks(4))
    assert pool.pool.reset_prefix_cache()
    assert pool.in_records("abcd") == ""
    assert pool.records.state()["records"] == {"held": 0, "kept": 0, "empty": 2}


def test_neighbouring_moves_are_made_together_unless_they_write_the_same_place_or_turn_round() -> None:
    moves = [
        RecordMove(TO_RECORD, 1, 10), RecordMove(TO_RECORD, 2, 11), RecordMove(TO_RECORD, 3, 10),
        RecordMove(TO_BLOCK, 1, 11), RecordMove(TO_RECORD, 4, 11),
    ]  # fmt: skip
    runs = [(direction, [m.block for m in run]) for direction, run in RecordStep(moves).runs()]
    assert runs == [(TO_RECORD, [1, 2]), (TO_RECORD, [3]), (TO_BLOCK, [1]), (TO_RECORD, [4])]
