"""The scheduler's side of stores ahead of time: chunks that nobody uses are copied before their blocks are reused."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext
from vllm.v1.request import RequestStatus

from vllm_ext.contract.preemption import KvDisposition
from vllm_ext.kv.connector.gap_loads import GapLoadingScheduler
from vllm_ext.kv.connector.idle import IdleChunk, IdleChunks
from vllm_ext.kv.connector.step_loads import ended_owner
from vllm_ext.kv.conversations.conversation import Turn
from vllm_ext.kv.conversations.keeper import Keeper
from vllm_ext.kv.eviction.retention import Chain, LastUse
from vllm_ext.kv.eviction.worth import ClassCosts, class_of

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

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


class IdleStoringScheduler(GapLoadingScheduler):
    """Copies what is idle on the device: the KV of requests that have left it (Pensieve, section 4.3.2).

    Ours: a copy that a step has to wait for is made only where it saves more than it takes,

        (share of such conversations that come back) * (time to compute a chunk again)  >  (time to copy it out)

    with the mean over the sequence's chunks, as what is kept of a sequence is of use only with what stands before it;
    where a preempted request comes back for certain. Waiting is what happens at the last moment, when a step
    overwrites the chunk, and to copies ahead of time where running requests leave less of the device free than is to be
    kept free: then the blocks are taken before the copy is through. A server of questions that nobody follows up, with
    a device full of running requests, else stands still for copies of what is never asked for again. On the CPU every
    copy takes time from the model, so all have to pay.

    And where running requests have filled the device, what they leave will be overwritten at once: then their chunks
    are copied while they run, as soon as they are full, if that pays when their turn has ended.

    As published (``copies_all``) every copy is made that keeps something from being lost, whatever waits for it, and
    none while its request runs.

    Attributes:
        idle: What could be copied; None: copies are made at other times.
        free_fraction: Share of the device's blocks that is kept free or copied.
        takes_cycles: Whether what computes also copies, as on the CPU.
        copies_all: Whether copies are made that are not expected to pay.
        keeper: Follows conversations; None: nobody does, and all of them may come back.
        unsaved: Chunks that were given up on the device without a copy.
    """

    idle: IdleChunks | None = None
    free_fraction: float = 0.25
    takes_cycles: bool = False
    copies_all: bool = False
    keeper: Keeper | None = None
    unsaved: int = 0
    _pool: BlockPool | None = None
    _recompute_s: ClassCosts | None = None

    def price(self, recompute_s: Callable[[int], float]) -> None:
        """Take the time to compute a chunk again, s, by the tokens up to its end."""
        self._recompute_s = ClassCosts(recompute_s)

    def _idle_jobs(
        self, finished: Iterable[str], given_up: dict[str, int], dispositions: dict[str, KvDisposition]
    ) -> dict[int, TransferJob]:
        """Queue what has become idle, and copy what this step takes, what is swapped, and what will be taken soon."""
        idle, pool = self.idle, self._pool
        if idle is None or pool is None:
            raise RuntimeError("the connector was not given vLLM's blocks before the first step")
        overwritten = self._current_batch_allocated_block_ids  # or used
        last_moment = idle.taken(overwritten)
        now: list[IdleChunk] = []
        for req_id, num_tokens in self._became_idle(finished, given_up):
            disposition = dispositions.get(req_id, KvDisposition.KEEP) if req_id in given_up else KvDisposition.KEEP
            if disposition is KvDisposition.RECOMPUTE:
                continue
            chunks = self._chunks(req_id, num_tokens)
            here = [chunk for chunk in chunks if chunk.is_in(pool)]
            last_moment += (chunk for chunk in chunks if chunk.block in overwritten and not chunk.is_in(pool))
            if disposition is KvDisposition.SWAP:
                now += here
            else:
                idle.add(here)
        now += self._taken_soon(idle, pool, len(overwritten))
        saved = self._store_idle(self._worth_a_copy(last_moment), at_once=True)
        return saved | self._store_idle(now, at_once=False)

    def _worth_a_copy(self, chunks: list[IdleChunk]) -> list[IdleChunk]:
        """Return the chunks whose copy saves more than it takes, and count those that are lost without."""
        worth, held = [], self.manager.policy
        for _, group in groupby(chunks, key=lambda chunk: id(chunk.owner)):
            of_one = list(group)
            if self._saves(of_one[0].owner):
                worth += of_one
            else:
                self.unsaved += sum(held.get(chunk.key) is None for chunk in of_one)
        return worth

    def _room(self, pool: BlockPool) -> tuple[int, int]:
        """Return how many blocks are free, and how many are to be."""
        return pool.get_num_free_blocks(), int(self.free_fraction * pool.num_gpu_blocks)

    def _is_full(self) -> bool:
        """Whether running requests hold nearly all of the device."""
        if self._pool is None:
            return False
        num_free, wanted = self._room(self._pool)
        return num_free < _FULL * wanted

    def _saves(self, owner: ReqContext, *, after_this_turn: bool = False) -> bool:
        turn, chain = owner.get_state(Turn), owner.get_state(Chain)
        if self.copies_all or self.keeper is None or self._recompute_s is None or turn is None or chain is None:
            return True
        if not self.prices.out.known:  # a device full from the start would never learn
            return True
        size, (keys,) = self.prices.chunk_tokens, chain.keys.values()
        recompute_s = self._recompute_s.of(class_of(size * (len(keys) + 1) // 2))
        share = self.keeper.return_share(turn.conversation, after_this_turn=after_this_turn)
        return share * recompute_s > self.prices.store_s(size)

    def _became_idle(self, finished: Iterable[str], given_up: dict[str, int]) -> Iterable[tuple[str, int]]:
        """Yield requests that gave up their blocks, and how many tokens of KV were in them."""
        yield from given_up.items()
        for req_id in finished:
            if (status := self._req_status.get(req_id)) is not None:
                request = status.req
                aborted = request.status is RequestStatus.FINISHED_ABORTED
                # The last sampled token was never computed.
                known = max(request.num_prompt_tokens, request.num_tokens - 1)
                yield req_id, request.num_computed_tokens if aborted else known

    def _chunks(self, req_id: str, num_tokens: int) -> list[IdleChunk]:
        """Return a request's whole chunks, the last one first: so vLLM takes their blocks."""
        status, group = self._req_status[req_id], self.config.kv_group_configs[0]
        state = status.group_states[0]
        offloadable = self._calc_num_offloadable_tokens(status, num_tokens)
        count, now = status.storable_chunks(group, state, offloadable), self.clock()
        return [
            IdleChunk(
                state.offload_keys[number],
                state.block_ids[number],
                status.req.block_hashes[number],
                status.req_context,
                now,
            )
            for number in reversed(range(count))
            if state.block_ids[number] != 0
        ]

    def _taken_soon(self, idle: IdleChunks, pool: BlockPool, num_taken: int) -> list[IdleChunk]:
        """Return idle chunks to copy, until enough blocks can be taken without losing anything, and for a while.

        What the host holds already, since it was loaded from there or copied when its last request ended, counts for
        nothing: of long conversations that is most of what becomes idle.

        Args:
            idle: Chunks that could be copied.
            pool: vLLM's blocks.
            num_taken: Blocks that the step takes.
        """
        num_free, wanted = self._room(pool)
        chunks: list[IdleChunk] = []
        if num_free - idle.num_blocks >= wanted or self._under_way_s() > _MAX_UNDER_WAY_S:
            return chunks
        must_pay, held = self.takes_cycles or num_free < wanted, self.manager.policy
        most = _MAX_AHEAD_PER_STEP + num_taken
        for chunk in islice(idle.oldest(), max(most, _MAX_LOOKED_AT)):
            if held.get(chunk.key) is None:
                chunks += self._worth_a_copy([chunk]) if must_pay else [chunk]
            if len(chunks) >= most or num_free - idle.num_blocks >= (1 + _BEYOND) * wanted:
                break
        return chunks

    def _under_way_s(self) -> float:
        """Return the time that stores under way take by themselves."""
        num_chunks = sum(len(job.keys) for job in self._jobs.values() if job.is_store)
        return self.prices.store_s(num_chunks * self.prices.chunk_tokens)

    def _store_idle(self, chunks: list[IdleChunk], *, at_once: bool) -> dict[int, TransferJob]:
        """Make jobs that copy chunks whose requests are gone, one for each of them.

        Args:
            at_once: Whether the step must wait, since it overwrites the blocks; else whoever takes them waits.
        """
        jobs: dict[int, TransferJob] = {}
        for _, group in groupby(chunks, key=lambda chunk: id(chunk.owner)):
            job = self._store_job(list(group))
            if job is not None:
                job_id = self._generate_job_id()
                jobs[job_id] = self._enter(job_id, *job)
                if at_once:
                    self._current_batch_jobs_to_flush.add(job_id)
        return jobs

    def _store_job(self, chunks: list[IdleChunk]) -> tuple[ReqContext, TransferJob, set[Any]] | None:
        owner = chunks[0].owner
        if (turn := owner.get_state(Turn)) is not None:  # which may have been left behind since
            chunks = [c for c in chunks if (owner.get_offload_key_position(c.key) or 0) <= turn.kept_tokens]
        context = ReqContext(f"{owner.req_id}#idle-{self._job_counter}")
        for kind in (Chain, Turn):  # what the manager noted of the request is closed when that ends
            if (state := owner.get_state(kind)) is not None:
                context.set_state(state)
        context.set_state(LastUse({chunk.key: chunk.used_s for chunk in chunks}))
        for chunk in chunks:
            end = owner.get_offload_key_position(chunk.key)
            if end is not None:
                context.set_offload_key_position(chunk.key, end)
        self.manager.on_new_request(context)
        first_to_last = chunks[::-1]
        output = self.manager.prepare_store([chunk.key for chunk in first_to_last], context)
        self.manager.on_request_finished(context)
        if output is None or not output.keys_to_store:
            return None
        wanted = set(output.keys_to_store)
        blocks = [chunk.block for chunk in first_to_last if chunk.key in wanted]
        source = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        return context, TransferJob(context.req_id, source, output.store_spec), wanted

    def _enter(self, job_id: int, context: ReqContext, job: TransferJob, keys: set[Any]) -> TransferJob:
        """Book a job as that of a request of its own, which has ended: so vLLM fences its blocks, and cleans up."""
        self._req_status[job.req_id] = ended_owner(self, job.req_id, context, job_id)
        blocks = [int(block) for block in job.src_spec.block_ids]
        self._jobs[job_id] = TransferJobStatus(
            req_id=job.req_id,
            pending_count=self.config.num_workers,
            keys=keys,
            is_store=True,
            deferred_fence_block_ids=blocks,
        )
        for block in blocks:
            self._block_id_to_pending_jobs.setdefault(block, set()).add(job_id)
        return job
