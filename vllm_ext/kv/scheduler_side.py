"""The scheduler's side of the connector: vLLM's, with a say in when KV is stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext
from vllm.v1.request import Request, RequestStatus

from vllm_ext.config_checks import ConfigError
from vllm_ext.config_kv import AHEAD, BETWEEN, EARLY, LATE
from vllm_ext.kv.conversations import Turn
from vllm_ext.kv.gap_loads import GapLoadingScheduler
from vllm_ext.kv.idle import IdleChunk, IdleChunks
from vllm_ext.kv.keeper import Keeper
from vllm_ext.kv.prices import TransferPrices
from vllm_ext.kv.retention import Chain
from vllm_ext.kv.step_loads import ended_owner
from vllm_ext.policies.residency.fate import Fate

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_MAX_AHEAD_PER_STEP = 16
"""Chunks copied ahead of time in one step at most, so that a step's cost has a bound and copies follow each other."""
_MAX_AHEAD_JOBS = 8
"""Copies under way above which none is made ahead of time: the link is behind already."""


class TierScheduler(GapLoadingScheduler):
    """vLLM's side, with three ways to store.

    ``early``, vLLM's own: a chunk as soon as it is full. Nothing waits for a copy, and much is copied that nobody asks
    for again.

    ``late``: when its request is preempted or ends. Half as many jobs, each of many chunks. The step which preempts
    waits for the copy, since it may write into those blocks.

    ``ahead``: when the device runs short of blocks that can be taken without loss, those first that vLLM would take
    first; and at the last moment, before a step overwrites them, which that step waits for. What is used again before
    is never copied (Pensieve, section 4.3.2). For full attention with a prefix cache.

    Attributes:
        prices: What copies take.
        keeper: Follows conversations; None: nobody does.
        clock: Returns the time, in seconds.
        leaving: Running requests that will be preempted soon: their chunks are stored as soon as they are full.
        free_fraction: Share of the device's blocks that ``ahead`` keeps free or copied.
    """

    def __init__(
        self,
        *args: Any,
        store: str = EARLY,
        load: str = BETWEEN,
        prices: TransferPrices,
        free_fraction: float = 0.25,
        keeper: Keeper | None = None,
    ) -> None:
        """Take vLLM's arguments, and how to store and to load.

        Raises:
            ConfigError: this model's KV can't be stored so.
        """
        super().__init__(*args, load=load, prices=prices)
        self.keeper = keeper
        self.clock: Callable[[], float] = time.monotonic
        self.leaving: frozenset[str] = frozenset()
        self.free_fraction = free_fraction
        self.idle: IdleChunks | None = None
        self._store = store
        self._pool: BlockPool | None = None
        self._computed: dict[str, int] = {}
        """By request: tokens whose KV is there when the steps scheduled so far are through."""
        self._fates: dict[str, Fate] = {}
        """By request preempted in this step: what becomes of its KV, where that is not the tier's own way."""
        if store == AHEAD and (self._chunks_being_loaded is None or not self._is_simple()):
            allowed = "needs full attention in one group of layers, and vLLM's prefix cache; use early or late"
            raise ConfigError("kv_tier.store", store, allowed)

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Take vLLM's blocks, of which ``ahead`` asks what they hold."""
        self._pool = pool
        if self._store == AHEAD:
            self.idle = IdleChunks(pool)

    def use(self, clock: Callable[[], float], prefill_s: Callable[[int, int], float]) -> None:
        """Take the scheduler's clock, and its estimate of the time to compute so many tokens after so many others."""
        self.clock = clock
        chunk = self.prices.chunk_tokens
        if self.keeper is not None:
            self.keeper.use(clock, lambda end: prefill_s(chunk, max(0, end - chunk)))

    # --- requests ---------------------------------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Let the eviction policy know in which order a request's chunks follow each other."""
        super().on_new_request(request)
        status = self._req_status[request.request_id]
        groups = list(zip(self.config.kv_group_configs, status.group_states, strict=True))
        keys = {config.group_idx: state.offload_keys for config, state in groups}
        sizes = {config.group_idx: config.tokens_per_chunk for config, _ in groups}
        status.req_context.set_state(Chain(keys, sizes))
        if self.keeper is not None:
            status.update_offload_keys()
            prompt = status.group_states[0].offload_keys
            status.req_context.set_state(self.keeper.enter(request, prompt, self.clock()))

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Note that a turn of its conversation ended."""
        result = super().request_finished(request)
        status = self._req_status.get(request.request_id)
        turn = None if status is None else status.req_context.get_state(Turn)
        if self.keeper is not None and status is not None and turn is not None:
            self.keeper.leave(turn, status.group_states[0].offload_keys, self.clock())
        return result

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the workers have to copy."""
        if self.keeper is not None:
            self.keeper.sweep(self.clock())
        preempted = scheduler_output.preempted_req_ids
        loading = {job.req_id for job in self._current_batch_load_jobs.values()}
        if not preempted or loading.isdisjoint(preempted):
            return super().build_connector_meta(scheduler_output)
        # A request that was preempted since the last step, by a reset, may load in this one; vLLM takes the jobs of
        # those preempted for stores.
        scheduler_output.preempted_req_ids = preempted - loading
        try:
            return super().build_connector_meta(scheduler_output)
        finally:
            scheduler_output.preempted_req_ids = preempted

    def decide(self, req_id: str, fate: Fate) -> None:
        """Take a decision about the KV of a request that this step preempts."""
        self._fates[req_id] = fate

    @property
    def stores_early(self) -> bool:
        """Whether every chunk is stored as soon as it is full, whatever is decided."""
        return self._store == EARLY

    def keeps(self, fate: Fate) -> bool:
        """Whether KV outlives the preemption of its request."""
        return self.stores_early or fate is not Fate.RECOMPUTE

    def forget_blocks(self, blocks: frozenset[int]) -> None:
        """Forget the idle chunks in such blocks."""
        if self.idle is not None:
            self.idle.taken(blocks)

    def forget_steps(self, req_id: str) -> None:
        """Take it that nothing of a preempted request was computed or stored."""
        super().forget_steps(req_id)
        self._computed.pop(req_id, None)

    def missing_tokens(self, req_id: str, num_tokens: int) -> int:
        """Return how many of a running request's first tokens are in whole chunks that were not stored yet."""
        status = self._req_status.get(req_id)
        if status is None:
            return num_tokens
        stored = min(
            state.next_stored_chunk_idx * config.tokens_per_chunk
            for config, state in zip(self.config.kv_group_configs, status.group_states, strict=True)
        )
        return max(0, self.prices.kept_tokens(num_tokens) - stored)

    # --- stores -----------------------------------------------------------------------------------------------------

    def _update_req_states(self, scheduler_output: SchedulerOutput) -> None:
        """Follow requests that got blocks; of the others nothing changes but keys, which are looked up when needed."""
        if not self._is_simple():
            super()._update_req_states(scheduler_output)
            return
        cached = scheduler_output.scheduled_cached_reqs
        given = [(r, blocks) for r, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True) if blocks]
        shown: Any = SimpleNamespace(
            scheduled_new_reqs=scheduler_output.scheduled_new_reqs,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[req_id for req_id, _ in given],
                new_block_ids=[blocks for _, blocks in given],
                resumed_req_ids=cached.resumed_req_ids,
            ),
            kv_cache_block_copies=scheduler_output.kv_cache_block_copies,
        )
        super()._update_req_states(shown)

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        fates, self._fates = self._fates, {}
        if self.stores_early:
            shown: Any = SimpleNamespace(
                num_scheduled_tokens=self._with_new_chunks(scheduler_output.num_scheduled_tokens),
                finished_req_ids=scheduler_output.finished_req_ids,
            )
            return super()._build_store_jobs(shown)
        finished = sorted(scheduler_output.finished_req_ids or ())  # in an order that no hash of a process decides
        given_up = self._given_up(scheduler_output)
        statuses, scheduled = self._req_status, scheduler_output.num_scheduled_tokens
        self._computed.update({r: self._front(r, n) for r, n in scheduled.items()})
        for req_id in finished:
            self._computed.pop(req_id, None)
        leaving = {r: scheduled[r] for r in sorted(self.leaving & scheduled.keys()) if self._is_whole(r)}
        for req_id in leaving:
            statuses[req_id].update_offload_keys()
        if self._store == LATE:
            swapped = {r: n for r, n in given_up.items() if fates.get(r, Fate.SWAP) is Fate.SWAP}
            # A preempted request's own count of computed tokens is 0 by now.
            shown = SimpleNamespace(num_scheduled_tokens=swapped | leaving, finished_req_ids=finished)
            jobs = super()._build_store_jobs(shown)
            self._current_batch_jobs_to_flush.update(job_id for job_id, job in jobs.items() if job.req_id in given_up)
            return jobs
        jobs = super()._build_store_jobs(SimpleNamespace(num_scheduled_tokens=leaving, finished_req_ids=()))
        return jobs | self._idle_jobs(finished, given_up, fates)

    def _with_new_chunks(self, scheduled: Mapping[str, int]) -> dict[str, int]:
        """Return those of a step's requests that may fill a chunk in it; vLLM looks at each for ten times as long."""
        statuses, sizes = self._req_status, [config.tokens_per_chunk for config in self.config.kv_group_configs]
        found = {}
        for req_id, num_tokens in scheduled.items():
            if (status := statuses.get(req_id)) is not None:
                total = status.req.num_computed_tokens + num_tokens
                for size, state in zip(sizes, status.group_states, strict=True):
                    if total // size > state.next_stored_chunk_idx and self._is_whole(req_id):
                        status.update_offload_keys()
                        found[req_id] = num_tokens
                        break
        return found

    def _front(self, req_id: str, num_tokens: int) -> int:
        """Return how many tokens of a request, from the first one on, have their KV after a step of so many."""
        total = self._req_status[req_id].req.num_computed_tokens + num_tokens
        return total if self.gaps is None else self.gaps.front(req_id, total)

    def _is_whole(self, req_id: str) -> bool:
        """Whether a request's KV is there from the first token on, without a gap."""
        return self.gaps is None or not self.gaps.is_within(req_id, self._req_status[req_id].req.num_computed_tokens)

    def _given_up(self, scheduler_output: SchedulerOutput) -> dict[str, int]:
        """Return the tokens whose KV is there, of requests that this step preempts and does not resume."""
        found = {}
        preempted = scheduler_output.preempted_req_ids or set()
        for req_id in sorted(preempted - scheduler_output.num_scheduled_tokens.keys()):
            if (status := self._req_status.get(req_id)) is not None:
                status.update_offload_keys()
                found[req_id] = min(status.req.num_tokens - 1, self._computed.pop(req_id, 0))
        return found

    # --- chunks that nobody uses ------------------------------------------------------------------------------------

    def _idle_jobs(
        self, finished: Iterable[str], given_up: dict[str, int], fates: dict[str, Fate]
    ) -> dict[int, TransferJob]:
        """Queue what has become idle, and copy what this step takes, what is swapped, and what will be taken soon."""
        idle, pool = self.idle, self._pool
        if idle is None or pool is None:
            raise RuntimeError("the connector was not given vLLM's blocks before the first step")
        taken = self._current_batch_allocated_block_ids
        last_moment = idle.taken(taken)
        now: list[IdleChunk] = []
        for req_id, num_tokens in self._became_idle(finished, given_up):
            fate = fates.get(req_id, Fate.KEEP) if req_id in given_up else Fate.KEEP
            if fate is Fate.RECOMPUTE:
                continue
            chunks = self._chunks(req_id, num_tokens)
            last_moment += (c for c in chunks if not c.is_in(pool) and not taken.isdisjoint(c.blocks))
            here = [c for c in chunks if c.is_in(pool)]
            if fate is Fate.SWAP:
                now += here
            else:
                idle.add(here)
        now += self._taken_soon(idle, pool)
        return self._store_idle(last_moment, at_once=True) | self._store_idle(now, at_once=False)

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
        state, size = status.group_states[0], self.config.blocks_per_chunk
        offloadable = self._calc_num_offloadable_tokens(status, num_tokens)
        count = status.storable_chunks(group, state, offloadable)
        return [
            IdleChunk(
                state.offload_keys[number],
                tuple(state.block_ids[number * size : (number + 1) * size]),
                tuple(status.req.block_hashes[number * size : (number + 1) * size]),
                status.req_context,
            )
            for number in reversed(range(count))
            if 0 not in state.block_ids[number * size : (number + 1) * size]
        ]

    def _taken_soon(self, idle: IdleChunks, pool: BlockPool) -> list[IdleChunk]:
        """Return idle chunks to copy, until enough blocks can be taken without losing anything."""
        wanted = int(self.free_fraction * pool.num_gpu_blocks)
        chunks: list[IdleChunk] = []
        if len(self._jobs) < _MAX_AHEAD_JOBS and pool.get_num_free_blocks() - idle.num_blocks < wanted:
            for chunk in idle.oldest():
                chunks.append(chunk)
                enough = pool.get_num_free_blocks() - idle.num_blocks >= wanted
                if enough or len(chunks) >= _MAX_AHEAD_PER_STEP:
                    break
        return chunks

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
        context = ReqContext(f"{owner.req_id}#idle-{self._job_counter}")
        for kind in (Chain, Turn):  # what the manager noted of the request is closed when that ends
            if (state := owner.get_state(kind)) is not None:
                context.set_state(state)
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
        blocks = [block for chunk in first_to_last if chunk.key in wanted for block in chunk.blocks]
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

    # --- resets -----------------------------------------------------------------------------------------------------

    def forget_device(self) -> None:
        """Forget idle chunks: what is in the device's prefix cache must not be used any more."""
        if self.idle is not None:
            self.idle.clear()

    def reset_cache(self) -> None:
        """Forget what was stored."""
        # vLLM takes it that what the reset before wanted waited for was handed to a step since.
        flushed, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= flushed
        self.forget_device()
        self._computed.clear()
