"""Stores ahead of time: chunks that nobody computes with are copied before their blocks are taken.

vLLM takes such blocks lazily, those first that were given up first. So they wait in a queue: what is at its front is
lost next, and is copied ahead of that when the device runs short of blocks that can be taken without losing anything
(Pensieve, section 4.3.2).

Ours: a copy that a step has to wait for is made only where it saves more than it takes,

    (share of such conversations that come back) * (time to compute a chunk again)  >  (time to copy it out)

with the mean over the sequence's chunks, as what is kept of a sequence is of use only with what stands before it; where
a preempted request comes back for certain. Waiting is what happens at the last moment, when a step overwrites the
chunk, and to copies ahead of time where running requests leave less of the device free than is to be kept free: then
the blocks are taken before the copy is through. A server of questions that nobody follows up, with a device full of
running requests, else stands still for copies of what is never asked for again. On the CPU every copy takes time from
the model, so all have to pay.

And where running requests have filled the device, what they leave will be overwritten at once: then their chunks are
copied while they run, as soon as they are full, if that pays when their turn has ended.

As published (``copies_all``) every copy is made that keeps something from being lost, whatever waits for it, and none
while its request runs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.request import RequestStatus

from vllm_ext.contract.preemption import KvDisposition
from vllm_ext.kv.conversations.conversation import Turn
from vllm_ext.kv.eviction.retention import Chain, LastUse
from vllm_ext.kv.eviction.worth import ClassCosts, class_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_offload.base import OffloadKey

    from vllm_ext.kv.connector.jobs import Jobs
    from vllm_ext.kv.connector.prices import TransferPrices
    from vllm_ext.kv.conversations.keeper import Keeper
    from vllm_ext.kv.partial_prefix.search import GapSearch

_MAX_AHEAD_PER_STEP = 16
"""Chunks copied ahead of time in one step at most beyond as many as it takes: a step's cost has a bound, and copies
keep pace."""
_MAX_LOOKED_AT = 512
"""Chunks looked at for that in one step, most of which the host may hold already; more than any step takes."""
_BEYOND = 0.25
"""Share of what is to be kept free by which copies go beyond it: some for several chunks, and not one for each."""
_FULL = 0.2
"""Share of what is to be kept free below which the device is full: what leaves is overwritten before it is copied."""
_MAX_UNDER_WAY_S = 0.1
"""Time that stores under way take above which none is made ahead of time: the link is behind already."""


@dataclass(frozen=True, slots=True, eq=False)
class IdleChunk:
    """A chunk whose request is gone, the block that holds it, and the request whose it was."""

    key: OffloadKey
    block: int
    hash: BlockHash
    owner: ReqContext
    used_s: float
    """When its request left; clock time, s."""

    def is_in(self, pool: BlockPool) -> bool:
        """Whether the block holds the chunk, and was not given to somebody else since."""
        found = pool.blocks[self.block].block_hash  # with the id of its group at the end
        return found is not None and found[: len(self.hash)] == self.hash


class IdleChunks:
    """A queue of idle chunks, the one in front that vLLM takes first.

    A chunk leaves it when it is copied, when somebody uses it again, or when its block is taken all the same, which the
    caller is told while that still holds it.

    Args:
        pool: vLLM's blocks.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._by_block: dict[int, IdleChunk] = {}
        self._queue: deque[IdleChunk] = deque()

    @property
    def num_blocks(self) -> int:
        """Blocks whose content would be lost."""
        return len(self._by_block)

    def add(self, chunks: Iterable[IdleChunk]) -> None:
        """Queue chunks, the one that vLLM takes first in front; blocks that are known already are theirs now."""
        for chunk in chunks:
            self._by_block[chunk.block] = chunk
            self._queue.append(chunk)
        if len(self._queue) > 2 * len(self._by_block) + 64:  # most were forgotten
            self._queue = deque(c for c in self._queue if self._by_block.get(c.block) is c)

    def taken(self, blocks: Iterable[int]) -> list[IdleChunk]:
        """Forget chunks whose blocks a step takes.

        Returns:
            Those that the step will overwrite; what is taken to be used is not lost.
        """
        chunks = [self._by_block.pop(block, None) for block in blocks]
        return [chunk for chunk in chunks if chunk is not None and not chunk.is_in(self._pool)]

    def oldest(self) -> Iterator[IdleChunk]:
        """Take chunks out, the one that vLLM takes first in front; what is on the device no more is passed over."""
        while self._queue:
            chunk = self._queue.popleft()
            if self._by_block.get(chunk.block) is not chunk:
                continue
            del self._by_block[chunk.block]
            if chunk.is_in(self._pool):
                yield chunk

    def clear(self) -> None:
        """Forget everything."""
        self._by_block.clear()
        self._queue.clear()


def is_whole(side: OffloadingConnectorScheduler, gaps: GapSearch | None, req_id: str) -> bool:
    """Whether a request's KV is there from the first token on, without a gap."""
    return gaps is None or not gaps.is_within(req_id, side._req_status[req_id].req.num_computed_tokens)


def filling(side: OffloadingConnectorScheduler, gaps: GapSearch | None, scheduled: Mapping[str, int]) -> dict[str, int]:
    """Return those of a step's requests that may fill a chunk in it; vLLM looks at each for ten times as long."""
    statuses, sizes, found = side._req_status, [config.tokens_per_chunk for config in side.config.kv_group_configs], {}
    for req_id, num_tokens in scheduled.items():
        if (status := statuses.get(req_id)) is not None:
            total = status.req.num_computed_tokens + num_tokens
            for size, state in zip(sizes, status.group_states, strict=True):
                if total // size > state.next_stored_chunk_idx and is_whole(side, gaps, req_id):
                    status.update_offload_keys()
                    found[req_id] = num_tokens
                    break
    return found


class AheadStores:
    """Which chunks a step copies to the host; for one group of full attention with vLLM's prefix cache.

    Args:
        side: vLLM's side of the connector.
        jobs: Begins copies.
        pool: vLLM's blocks.
        prices: What copies take.
        keeper: Follows conversations; None: nobody does, and all of them may come back.
        free_fraction: Share of the device's blocks that is kept free or copied.
        copies_all: Whether copies are made that are not expected to pay.

    Attributes:
        idle: What could be copied.
        leaving: Running requests that will be preempted soon: their chunks are stored as soon as they are full.
        unsaved: Chunks that were given up on the device without a copy.
        gaps: Who has gaps; None: nobody.
    """

    gaps: GapSearch | None = None

    def __init__(
        self, side: OffloadingConnectorScheduler, jobs: Jobs, pool: BlockPool, prices: TransferPrices,
        keeper: Keeper | None, *, free_fraction: float, copies_all: bool,
    ) -> None:  # fmt: skip
        self._side, self._jobs, self._pool, self._prices, self._keeper = side, jobs, pool, prices, keeper
        self.free_fraction, self.copies_all = free_fraction, copies_all
        self.idle = IdleChunks(pool)
        self.leaving: AbstractSet[str] = frozenset()
        self.unsaved = 0
        self._clock: Callable[[], float] = time.monotonic
        self._recompute_s: ClassCosts | None = None
        self._computed: dict[str, int] = {}
        """By request: tokens whose KV is there when the steps scheduled so far are through."""
        self._asked: dict[str, int] = {}
        """By request: tokens of chunks whose copies did not pay when that was asked last."""

    def use(self, clock: Callable[[], float], recompute_s: Callable[[int], float]) -> None:
        """Take the scheduler's clock, and the time to compute a chunk again, s, by the tokens up to its end."""
        self._clock, self._recompute_s = clock, ClassCosts(recompute_s)

    # --- who runs ---------------------------------------------------------------------------------------------------

    def of_running(self, scheduled: Mapping[str, int]) -> dict[str, int]:
        """Note how far a step's requests come, and return those of them whose chunks are stored while they run."""
        statuses, computed, gaps = self._side._req_status, self._computed, self.gaps
        for req_id, num_tokens in scheduled.items():  # every request in every step: no calls
            computed[req_id] = statuses[req_id].req.num_computed_tokens + num_tokens
        if gaps is not None:
            computed.update({req_id: gaps.front(req_id, computed[req_id]) for req_id in scheduled})
        found = {r: scheduled[r] for r in sorted(self.leaving & scheduled.keys()) if is_whole(self._side, gaps, r)}
        for req_id in found:
            statuses[req_id].update_offload_keys()
        return found | self._paying(scheduled) if self.looks_at_all else found

    @property
    def looks_at_all(self) -> bool:
        """Whether all who run may have chunks to copy in a step, as they have filled the device."""
        num_free, wanted = self._room()
        return num_free < _FULL * wanted and not self.copies_all

    def note_front(self, req_id: str, num_tokens: int) -> None:
        """Note that a request has computed so many tokens, those of steps under way included."""
        self._computed[req_id] = num_tokens if self.gaps is None else self.gaps.front(req_id, num_tokens)

    def forget_front(self, req_id: str) -> int:
        """Forget how far a request has come, and return that."""
        self._asked.pop(req_id, None)
        return self._computed.pop(req_id, 0)

    def clear(self) -> None:
        """Forget everything."""
        self.idle.clear()
        self._computed.clear()
        self._asked.clear()

    def _paying(self, scheduled: Mapping[str, int]) -> dict[str, int]:
        """Return those of a step's requests that have chunks to store whose copies will pay.

        What does not pay is asked about again when one more chunk is full: not for every request in every step.
        """
        size, computed, asked, found = self._prices.chunk_tokens, self._computed, self._asked, {}
        due = {r: n for r, n in scheduled.items() if computed[r] >= asked.get(r, 0) + size}
        for req_id, num_tokens in filling(self._side, self.gaps, due).items():
            owner = self._side._req_status[req_id].req_context
            turn = owner.get_state(Turn)
            in_answer = turn is not None and turn.prompts_only and computed[req_id] > turn.prompt_tokens
            if not in_answer and self._saves(owner, after_this_turn=True):
                found[req_id] = num_tokens
            else:
                asked[req_id] = computed[req_id] // size * size
        return found

    # --- who has left -----------------------------------------------------------------------------------------------

    def of_idle(self, output: SchedulerOutput, dispositions: Mapping[str, KvDisposition]) -> dict[int, TransferJob]:
        """Queue what has become idle, and copy what this step takes, what is swapped, and what will be taken soon.

        Args:
            output: The step.
            dispositions: What becomes of the KV of those whom it preempts, where that is not the tier's own way.
        """
        overwritten = self._side._current_batch_allocated_block_ids  # or used
        last_moment = self.idle.taken(overwritten)
        now: list[IdleChunk] = []
        for req_id, num_tokens, disposition in self._left(output, dispositions):
            chunks = self._chunks(req_id, num_tokens)
            here = [chunk for chunk in chunks if chunk.is_in(self._pool)]
            last_moment += (chunk for chunk in chunks if chunk.block in overwritten and not chunk.is_in(self._pool))
            if disposition is KvDisposition.SWAP:
                now += here
            else:
                self.idle.add(here)
        now += self._taken_soon(len(overwritten))
        return self._store(self._worth_a_copy(last_moment), now=True) | self._store(now, now=False)

    def _left(
        self, output: SchedulerOutput, dispositions: Mapping[str, KvDisposition]
    ) -> Iterator[tuple[str, int, KvDisposition]]:
        """Yield who gave up blocks whose content is kept, how many tokens of KV were in them, and what becomes of it.

        Those are requests that the step preempts and does not resume, and those that have ended, in an order that no
        hash of a process decides.
        """
        statuses = self._side._req_status
        for req_id in sorted((output.preempted_req_ids or set()) - output.num_scheduled_tokens.keys()):
            computed, disposition = self.forget_front(req_id), dispositions.get(req_id, KvDisposition.KEEP)
            if (status := statuses.get(req_id)) is not None:
                status.update_offload_keys()
                if disposition is not KvDisposition.RECOMPUTE:
                    yield req_id, min(status.req.num_tokens - 1, computed), disposition
        for req_id in sorted(output.finished_req_ids or ()):
            self.forget_front(req_id)
            if (status := statuses.get(req_id)) is not None:
                request = status.req
                aborted = request.status is RequestStatus.FINISHED_ABORTED
                # The last sampled token was never computed.
                known = max(request.num_prompt_tokens, request.num_tokens - 1)
                yield req_id, request.num_computed_tokens if aborted else known, KvDisposition.KEEP

    def _chunks(self, req_id: str, num_tokens: int) -> list[IdleChunk]:
        """Return a request's whole chunks, the last one first: so vLLM takes their blocks."""
        status, now = self._side._req_status[req_id], self._clock()
        group, (state,) = self._side.config.kv_group_configs[0], status.group_states
        count = status.storable_chunks(group, state, self._side._calc_num_offloadable_tokens(status, num_tokens))
        keys, blocks, hashes, owner = state.offload_keys, state.block_ids, status.req.block_hashes, status.req_context
        return [IdleChunk(keys[n], blocks[n], hashes[n], owner, now) for n in reversed(range(count)) if blocks[n] != 0]

    def _taken_soon(self, num_taken: int) -> list[IdleChunk]:
        """Return idle chunks to copy, until enough blocks can be taken without losing anything, and for a while.

        What the host holds already, since it was loaded from there or copied when its last request ended, counts for
        nothing: of long conversations that is most of what becomes idle.

        Args:
            num_taken: Blocks that the step takes.
        """
        idle, (num_free, wanted) = self.idle, self._room()
        chunks: list[IdleChunk] = []
        if num_free - idle.num_blocks >= wanted or self.under_way_s > _MAX_UNDER_WAY_S:
            return chunks
        must_pay, held = self._prices.takes_cycles or num_free < wanted, self._policy
        most = _MAX_AHEAD_PER_STEP + num_taken
        for chunk in islice(idle.oldest(), max(most, _MAX_LOOKED_AT)):
            if held.get(chunk.key) is None:
                chunks += self._worth_a_copy([chunk]) if must_pay else [chunk]
            if len(chunks) >= most or num_free - idle.num_blocks >= (1 + _BEYOND) * wanted:
                break
        return chunks

    @property
    def under_way_s(self) -> float:
        """The time that stores under way take by themselves."""
        return self._prices.store_s(self._jobs.num_stored_chunks * self._prices.chunk_tokens)

    @property
    def _policy(self) -> Any:
        books: Any = self._side.manager
        return books.policy

    def _room(self) -> tuple[int, int]:
        """Return how many blocks are free, and how many are to be."""
        return self._pool.get_num_free_blocks(), int(self.free_fraction * self._pool.num_gpu_blocks)

    # --- what pays --------------------------------------------------------------------------------------------------

    def _worth_a_copy(self, chunks: list[IdleChunk]) -> list[IdleChunk]:
        """Return the chunks whose copy saves more than it takes, and count those that are lost without."""
        worth, held = [], self._policy
        for of_one in _by_owner(chunks):
            if self._saves(of_one[0].owner):
                worth += of_one
            else:
                self.unsaved += sum(held.get(chunk.key) is None for chunk in of_one)
        return worth

    def _saves(self, owner: ReqContext, *, after_this_turn: bool = False) -> bool:
        turn, chain, keeper = owner.get_state(Turn), owner.get_state(Chain), self._keeper
        if self.copies_all or keeper is None or self._recompute_s is None or turn is None or chain is None:
            return True
        if not self._prices.out.known:  # a device full from the start would never learn
            return True
        size, (keys,) = self._prices.chunk_tokens, chain.keys.values()
        recompute_s = self._recompute_s.of(class_of(size * (len(keys) + 1) // 2))
        share = keeper.return_share(turn.conversation, after_this_turn=after_this_turn)
        return share * recompute_s > self._prices.store_s(size)

    # --- copies -----------------------------------------------------------------------------------------------------

    def _store(self, chunks: list[IdleChunk], *, now: bool) -> dict[int, TransferJob]:
        """Make jobs that copy chunks, one for each of their requests; ``now``: see `Jobs.store`."""
        jobs = {}
        for of_one in _by_owner(chunks):
            owner, first_to_last = of_one[0].owner, of_one[::-1]
            if (turn := owner.get_state(Turn)) is not None:  # which may have been left behind since
                position, most = owner.get_offload_key_position, turn.kept_tokens
                first_to_last = [chunk for chunk in first_to_last if (position(chunk.key) or 0) <= most]
            context = self._context(owner, first_to_last)
            self._side.manager.on_new_request(context)
            output = self._side.manager.prepare_store([chunk.key for chunk in first_to_last], context)
            self._side.manager.on_request_finished(context)
            if output is None or not output.keys_to_store:
                continue
            wanted = set(output.keys_to_store)
            blocks = [chunk.block for chunk in first_to_last if chunk.key in wanted]
            job_id, job = self._jobs.store(context, output.keys_to_store, blocks, output.store_spec, now=now)
            jobs[job_id] = job
        return jobs

    def _context(self, owner: ReqContext, chunks: Iterable[IdleChunk]) -> ReqContext:
        """Return what the manager is told of a copy: what it noted of the request is closed when that ends."""
        context = ReqContext(f"{owner.req_id}#store-{self._side._job_counter}")
        for kind in (Chain, Turn):
            if (state := owner.get_state(kind)) is not None:
                context.set_state(state)
        context.set_state(LastUse({chunk.key: chunk.used_s for chunk in chunks}))
        for chunk in chunks:
            if (end := owner.get_offload_key_position(chunk.key)) is not None:
                context.set_offload_key_position(chunk.key, end)
        return context


def _by_owner(chunks: Iterable[IdleChunk]) -> Iterator[list[IdleChunk]]:
    return (list(group) for _, group in groupby(chunks, key=lambda chunk: id(chunk.owner)))
