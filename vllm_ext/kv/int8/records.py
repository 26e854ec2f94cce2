"""The scheduler's side of records: what is evicted from a block moves into one, and what is used again moves back.

One block pool and one hash map serve both: a record is one of the pool's blocks with an id of its own, so that vLLM's
look-ups find it like any other. It is taken for what loses its block, of less value than what it holds itself; new
tokens never get it (`lanes`). The moves of a step are made by its workers before anything else, in the order in which
they were decided, so that a block that is given away in the same step is read first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from vllm_ext.kv.int8.lanes import TwoLanes
from vllm_ext.kv.int8.step import Direction, RecordMove, RecordStep

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

    from vllm_ext.kv.int8.geometry import ArenaGeometry

DEMOTED, PROMOTED, PARTIAL, RESUMED = "demoted", "promoted", "partial", "resumed"
"""Kinds of moves: an evicted block into a record; a record into a block; the last, partly filled block of a preempted
request into a record, and back into a block when the request resumes."""
DROPPED, LOST = "dropped", "lost"
"""What was forgotten: records that made room for others, and blocks of less value than any record."""
_SPARED = 8
"""Records that are looked at for one that nobody waits for."""


@dataclass
class RecordCounts:
    """What became of records."""

    moves: Counter[str] = field(default_factory=Counter)
    """By kind."""
    forgotten: Counter[str] = field(default_factory=Counter)
    """By reason."""
    read_tokens: int = 0
    """Tokens that requests found in records when they got their blocks, and read there."""
    resumed_tokens: int = 0
    """Tokens of partly filled blocks that preempted requests need not compute again."""


@dataclass(frozen=True)
class Partial:
    """The last tokens of a preempted request, which fill no whole block."""

    record: KVCacheBlock
    number: int
    """Of the block in the request's sequence."""
    num_tokens: int


class Records:
    """The records of one scheduler.

    Args:
        pool: vLLM's blocks, none of which is in use.
        geometry: Of the device's memory.

    Attributes:
        spare_blocks: Returns how many blocks may be taken for what would otherwise be read from records.
    """

    def __init__(self, pool: BlockPool, geometry: ArenaGeometry) -> None:
        self._pool = pool
        self.first_record: int = pool.num_gpu_blocks
        records = [KVCacheBlock(self.first_record + i, pool=pool) for i in range(geometry.num_records)]
        pool.blocks.extend(records)
        self.lanes = TwoLanes(pool.free_block_queue, records)
        pool.free_block_queue = self.lanes
        self.num_records = geometry.num_records
        self.counts = RecordCounts()
        self.spare_blocks: Callable[[], int] = lambda: 0
        self._partials: dict[str, Partial] = {}
        self._waits_for: dict[str, list[BlockHashWithGroupId]] = {}
        self._awaited: Counter[BlockHashWithGroupId] = Counter()
        """Of these requests: how many wait for each."""
        self._moves: list[RecordMove] = []
        self._giving_away = False
        self._take, self._evict = pool.get_new_blocks, pool._maybe_evict_cached_block
        pool.get_new_blocks, pool._maybe_evict_cached_block = self._get_new_blocks, self._maybe_evict_cached_block

    @property
    def num_free(self) -> int:
        """Records that nobody holds; most of them hold what may be found again."""
        count: int = self.lanes.records.num_free_blocks
        return count

    def state(self) -> dict[str, Any]:
        """Return what there is, and what became of it, fit for JSON."""
        records = self._pool.blocks[self.first_record :]
        held = sum(record.ref_cnt > 0 for record in records)
        kept = sum(record.ref_cnt == 0 and record.block_hash is not None for record in records)
        return {
            "records": {"held": held, "kept": kept, "empty": self.num_records - held - kept},
            "moves": dict(self.counts.moves),
            "forgotten": dict(self.counts.forgotten),
            "read_tokens": self.counts.read_tokens,
            "resumed_tokens": self.counts.resumed_tokens,
        }

    def is_record(self, block: KVCacheBlock) -> bool:
        """Whether a block of the pool is a record."""
        return bool(block.block_id >= self.first_record)

    # --- blocks -----------------------------------------------------------------------------------------------------

    def promote(self, table: list[KVCacheBlock], block_size: int) -> None:
        """Move records at the front of a request's block table into blocks, as many as may be taken for that.

        Args:
            table: Of a request whose table the workers do not know yet; changed.
            block_size: Tokens of a block.
        """
        numbers = [number for number, block in enumerate(table) if self.is_record(block)]
        room = min(len(numbers), max(0, self.spare_blocks()))
        for number, block in zip(numbers, self._pool.get_new_blocks(room), strict=False):
            record = table[number]
            self._move(PROMOTED, RecordMove(Direction.TO_BLOCK, block.block_id, record.block_id))
            if record.ref_cnt == 1:  # others that read it now go on to find it
                self._pool.move_block_hashes(record, block)
            table[number] = block
            self._pool.free_blocks([record])
        self.counts.read_tokens += (len(numbers) - room) * block_size

    def _get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        self._giving_away = True
        try:
            blocks: list[KVCacheBlock] = self._take(num_blocks)
            return blocks
        finally:
            self._giving_away = False

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        if not self._giving_away or block.block_hash is None:
            return bool(self._evict(block))
        record = self._take_record(None if block.block_hash in self._awaited else block)
        if record is None:
            self.counts.forgotten[LOST] += 1
            return bool(self._evict(block))
        if self._pool.metrics_collector:
            self._pool.metrics_collector.on_block_evicted(block)
        self._empty(record)
        self._pool.move_block_hashes(block, record)
        self.lanes.keep(record, block)
        self._move(DEMOTED, RecordMove(Direction.TO_RECORD, block.block_id, record.block_id))
        return False

    def _take_record(self, in_place_of: KVCacheBlock | None) -> KVCacheBlock | None:
        """Return a record, in which what somebody waits for stands last of all.

        Whoever was preempted comes back for certain, and soon; of all others it is not known.

        Args:
            in_place_of: A block whose content must be of more value than the record's; None: somebody waits for it.
        """
        spared = []
        for _ in range(_SPARED):
            record = self.lanes.take_record(in_place_of)
            if record is None or record.block_hash not in self._awaited:
                break
            spared.append(record)
        else:
            record = None
        if record is None and spared and in_place_of is None:
            record = spared.pop(0)
        if spared:
            self.lanes.append_n(spared)
        return record

    def _empty(self, record: KVCacheBlock) -> None:
        if record.block_hash is not None:
            self.counts.forgotten[DROPPED] += 1
            self._evict(record)

    def _move(self, kind: str, move: RecordMove) -> None:
        self.counts.moves[kind] += 1
        self._moves.append(move)

    # --- preempted requests -----------------------------------------------------------------------------------------

    def await_blocks(self, req_id: str, table: Sequence[KVCacheBlock]) -> None:
        """Keep what the blocks of a request hold that is being preempted, rather than what nobody may come back for.

        Args:
            req_id: Whose.
            table: Its blocks, which it still holds.
        """
        self.forget(req_id)
        hashes = [block.block_hash for block in table if block.block_hash is not None]
        self._waits_for[req_id] = hashes
        self._awaited.update(hashes)

    def keep_partial(self, req_id: str, table: Sequence[KVCacheBlock], num_tokens: int, block_size: int) -> None:
        """Keep the last tokens of a request that is being preempted, which fill no whole block.

        Args:
            req_id: Whose.
            table: Its blocks, which it still holds.
            num_tokens: Tokens whose KV they hold, from the first one on.
            block_size: Tokens of a block.
        """
        number, rest = divmod(num_tokens, block_size)
        if not rest or number >= len(table) or table[number].is_null or self.is_record(table[number]):
            return
        record = self._take_record(None)
        if record is None:
            return
        self._drop_partial(req_id)
        self._empty(record)
        record.ref_cnt += 1
        self._partials[req_id] = Partial(record, number, rest)
        self._move(PARTIAL, RecordMove(Direction.TO_RECORD, table[number].block_id, record.block_id, rest))

    def partial_hit(self, request: Request, num_hit_tokens: int, block_size: int) -> tuple[KVCacheBlock, int] | None:
        """Return the record with the tokens behind a request's prefix hit, and how many of them it may use, if any.

        The last token is always computed: what follows it is sampled from that.
        """
        partial = self._partials.get(request.request_id)
        if partial is None or num_hit_tokens != partial.number * block_size:
            return None
        num_tokens = min(partial.num_tokens, request.num_tokens - 1 - num_hit_tokens)
        return (partial.record, num_tokens) if num_tokens > 0 else None

    def adopted(self, req_id: str, record: KVCacheBlock) -> None:
        """Note that a request resumes with its partly filled block, which vLLM has copied for it."""
        partial = self._partials.get(req_id)
        if partial is not None and partial.record is record:
            self.counts.resumed_tokens += partial.num_tokens
            self._drop_partial(req_id)

    def forget(self, req_id: str) -> None:
        """Keep nothing any more for a request that has ended, or goes on with what it has."""
        self._drop_partial(req_id)
        for block_hash in self._waits_for.pop(req_id, ()):
            self._awaited[block_hash] -= 1
            if not self._awaited[block_hash]:
                del self._awaited[block_hash]

    def _drop_partial(self, req_id: str) -> None:
        partial = self._partials.pop(req_id, None)
        if partial is not None:
            self._pool.free_blocks([partial.record])

    def forget_all(self) -> None:
        """Keep nothing for anybody: what was computed before a reset must not be used."""
        for req_id in [*self._waits_for, *self._partials]:
            self.forget(req_id)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, reads: Iterable[int], output: Any) -> RecordStep | None:
        """Return what to tell a step's workers, and begin the next one.

        Copies that vLLM wants made from a record, into the block in which a request goes on, become moves; the others
        stay.

        Args:
            reads: Records in the block tables of the step's requests.
            output: The step; its copies are changed.
        """
        copies = output.kv_cache_block_copies or ()
        for copy in copies:
            if copy.src_block_id >= self.first_record:
                self._move(RESUMED, RecordMove(Direction.TO_BLOCK, copy.dst_block_id, copy.src_block_id))
        if copies:
            kept = [copy for copy in copies if copy.src_block_id < self.first_record]
            output.kv_cache_block_copies = kept or None
        moves, self._moves = _needed(self._moves), []
        found = sorted(set(reads))
        return RecordStep(moves, found) if moves or found else None


def _needed(moves: list[RecordMove]) -> list[RecordMove]:
    """Return moves without those into records that later ones overwrite before anybody has read them."""
    overwritten: set[int] = set()
    kept = []
    for move in reversed(moves):
        if move.direction is Direction.TO_BLOCK:
            overwritten.discard(move.record)
        elif move.record in overwritten:
            continue
        else:
            overwritten.add(move.record)
        kept.append(move)
    return kept[::-1]
