"""The scheduler's side of the connector: vLLM's, with a say in when KV is stored and loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata, TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.request import Request

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import AHEAD, ALL, AUTO, BETWEEN, EARLY, IN_STEP, PAYING
from vllm_ext.contract.preemption import KvDisposition
from vllm_ext.kv.connector.ahead_stores import AheadStores, filling
from vllm_ext.kv.connector.jobs import Jobs
from vllm_ext.kv.connector.prices import TransferPrices
from vllm_ext.kv.connector.step_loads import FailedLoads, StepLoads, TierMetadata
from vllm_ext.kv.conversations.conversation import Turn
from vllm_ext.kv.conversations.keeper import Keeper
from vllm_ext.kv.eviction.retention import Chain
from vllm_ext.kv.partial_prefix.plan import Action

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.outputs import KVConnectorOutput

    from vllm_ext.hints import HintError
    from vllm_ext.kv.partial_prefix.manager import Placement
    from vllm_ext.kv.partial_prefix.search import GapSearch


class TierScheduler(OffloadingConnectorScheduler):
    """vLLM's side, with ways of its own to store and to load.

    Stores are ``early``, vLLM's own: a chunk as soon as it is full; nothing waits for a copy, and much is copied that
    nobody asks for again. Or ``ahead`` (`AheadStores`): what is used again before its blocks are taken is never copied;
    for full attention with a prefix cache. ``auto`` is ``ahead`` where that can be done.

    Loads are ``between`` steps, vLLM's own, or ``in-step`` (`StepLoads`); ``auto`` is what costs less. Where gaps are
    crossed, what lies behind them is loaded within the step that computes them.

    Args:
        spec: vLLM's; so are the next two.
        vllm_config: Of the engine.
        kv_cache_config: Of the model.
        store: When chunks are copied.
        load: When they are brought back.
        copies: Which of the copies ahead of time are made.
        prices: What copies take.
        free_fraction: Share of the device's blocks that is kept free or copied.
        keeper: Follows conversations; None: nobody does.

    Attributes:
        store: What ``auto`` stands for, where that was asked for.
        stores: Stores ahead of time; None: there are none.
        loads: Loads within steps; None: there are none.
        gaps: Who has gaps, and what is done about them; None: nobody.
        clock: Returns the time, in seconds.
        discarded: See `vllm_ext.kv.connector.recovery`.

    Raises:
        ConfigError: this model's KV can't be stored or loaded so.
    """

    _current_batch_jobs_to_flush: set[int]
    gaps: GapSearch | None = None
    stores: AheadStores | None = None
    loads: StepLoads | None = None

    def __init__(
        self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *,
        store: str = AUTO, load: str = BETWEEN, copies: str = PAYING, prices: TransferPrices,
        free_fraction: float = 0.25, keeper: Keeper | None = None,
    ) -> None:  # fmt: skip
        super().__init__(spec, vllm_config, kv_cache_config)
        self.prices, self.keeper = prices, keeper
        self.clock: Callable[[], float] = time.monotonic
        self.jobs = Jobs(self)
        self.discarded: dict[str, frozenset[int]] = {}
        self._is_simple = _is_simple(self)
        # vLLM leaves groups out that are not kept, and a load that failed is told by blocks only where there is one.
        can_load = self._is_simple and len(kv_cache_config.kv_cache_groups) == 1
        if load == IN_STEP and not can_load:
            allowed = "needs full attention in one group of layers, since a load that fails can't be told otherwise"
            raise ConfigError("kv_tier.load", load, f"{allowed}; use between or auto")
        self._load = load if can_load else BETWEEN
        self._num_layers = len(kv_cache_config.kv_cache_groups[0].layer_names)
        can = self._is_simple and self._chunks_being_loaded is not None
        if store == AHEAD and not can:
            allowed = "needs full attention in one group of layers, and vLLM's prefix cache; use auto or early"
            raise ConfigError("kv_tier.store", store, allowed)
        self.store = store if store != AUTO else AHEAD if can else EARLY
        self._free_fraction, self._copies_all = free_fraction, copies == ALL
        self._dispositions: dict[str, KvDisposition] = {}
        """By request preempted in this step: what becomes of its KV, where that is not the tier's own way."""

    # --- what a scheduler tells and asks ----------------------------------------------------------------------------

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Take vLLM's blocks, of which ``ahead`` asks what they hold."""
        if self.store == AHEAD:
            self.stores = AheadStores(
                self, self.jobs, pool, self.prices, self.keeper,
                free_fraction=self._free_fraction, copies_all=self._copies_all,
            )  # fmt: skip

    def use(self, clock: Callable[[], float], prefill_s: Callable[[int, int], float]) -> None:
        """Take the scheduler's clock, and its estimate of the time to compute so many tokens after so many others."""
        self.clock = clock
        chunk = self.prices.chunk_tokens

        def recompute_s(end: int) -> float:
            return prefill_s(chunk, max(0, end - chunk))

        for part in (self.stores, self.keeper):
            if part is not None:
                part.use(clock, recompute_s)

    def load_in_steps(self, step_s: Callable[[], float], num_running: Callable[[], int]) -> None:
        """Let loads be within steps, after `use`; without it all are between them.

        Who calls it promises to ask `failed_step_loads` before a step's output is used.

        Args:
            step_s: Mean duration of a step, in seconds.
            num_running: Requests in the step that is being scheduled.
        """
        if self._load != BETWEEN:
            self.loads = StepLoads(
                self._load, self.prices, step_s, num_running, self.clock, num_layers=self._num_layers
            )

    def cross_gaps(self, gaps: GapSearch) -> None:
        """Take who plans; chunks are found for it if loads within a step are possible at all."""
        self.gaps = gaps
        if self.stores is not None:
            self.stores.gaps = gaps
        if self.loads is not None:
            gaps.host = self

    def report_bad_hints(self, told: Callable[[str, HintError], None]) -> None:
        """Say who is told the id of a request, and what of its hints it may not ask for."""
        if self.keeper is not None:
            self.keeper.on_bad_hint = told

    def decide(self, req_id: str, disposition: KvDisposition) -> None:
        """Take a decision about the KV of a request that this step preempts."""
        self._dispositions[req_id] = disposition

    def keeps(self, disposition: KvDisposition) -> bool:
        """Whether KV outlives the preemption of its request."""
        return self.store == EARLY or disposition is not KvDisposition.RECOMPUTE

    def missing_tokens(self, req_id: str, num_tokens: int) -> int:
        """Return how many of a running request's first tokens are in whole chunks that were not stored yet."""
        status = self._req_status.get(req_id)
        if status is None:
            return num_tokens
        stored: int = min(
            state.next_stored_chunk_idx * config.tokens_per_chunk
            for config, state in zip(self.config.kv_group_configs, status.group_states, strict=True)
        )
        return max(0, self.prices.kept_tokens(num_tokens) - stored)

    # --- look-ups that change nothing -------------------------------------------------------------------------------

    def peek(self, request: Request, local_tokens: int, max_num_new_tokens: int | None = None) -> tuple[int, bool]:
        """Return what `get_num_new_matched_tokens` would say now, and change nothing: to price an admission.

        vLLM's own counts what it finds, and a look-up on disk begins to bring a chunk back. Cost: one look-up in a
        dictionary per chunk that would be loaded, and one more; what the device holds, and what lies behind the first
        missing chunk, is not looked at. The chunks on the host are no prefix that could be bisected: those of a
        sequence's end are copied first, and those whose copy failed are missing.

        Args:
            request: One that waits.
            local_tokens: Its prefix hit. Where `GapSearch.peek` finds more than that, this is not to be asked: what
                its plan loads is in that count, and nothing is supplied beyond it.
            max_num_new_tokens: Most tokens to load; None: no bound.

        Returns:
            How many tokens the tier would supply beyond the local ones, and whether they would be loaded between steps.
            ``(0, False)`` also where vLLM would be told to ask again later, the request is unknown, or the model has
            several groups of layers. Chunks that are only on disk count as not there.
        """
        status = self._readable(request)
        if status is None or status.transfer_jobs:
            return 0, False
        placement = self._placement(request)
        if placement is not None and placement.layout.num_kept == local_tokens:
            return 0, False
        found = self._prefix_tokens(status, local_tokens, max_num_new_tokens)
        return self._when(request, local_tokens, found) if found else (0, False)

    def can_tell(self, request: Request, local_tokens: int) -> bool:
        """Say whether `get_num_new_matched_tokens` could tell by now, or would have vLLM ask again; changes nothing.

        Cost: as `peek`. True also where that is not to be asked, or does not look: of what is on disk, which only
        vLLM's question brings.
        """
        known = self._req_status.get(request.request_id)
        if known is not None and known.transfer_jobs:
            return False
        status = self._readable(request)
        return status is None or self.gaps is not None or self._prefix_tokens(status, local_tokens) is not None

    def held_blocks(self, request: Request, numbers: Iterable[int]) -> set[int]:
        """Return which blocks of a request can be loaded now, of those with such numbers; changes nothing.

        What is only on disk is left there: a plan can't wait for it, and would compute it again all the same.
        """
        status = self._req_status.get(request.request_id)
        if status is None:
            return set()
        status.update_offload_keys()
        keys = status.group_states[0].offload_keys
        books: Any = self.manager
        return {number for number in numbers if number < len(keys) and books.peek(keys[number]) is LookupResult.HIT}

    def _prefix_tokens(
        self, status: RequestOffloadState, local: int, max_num_new_tokens: int | None = None
    ) -> int | None:
        """Return how many tokens beyond the local ones vLLM would load now, of a model for which that is simple.

        Returns:
            None if a chunk is still being written, or being loaded for somebody else: vLLM asks again later.
        """
        size, most = self.prices.chunk_tokens, status.req.num_tokens
        for bound in (max_num_new_tokens, status.max_load_tokens):
            if bound is not None:
                most = min(most, local + bound)
        if status.max_load_tokens is not None:
            most = most // size * size
        status.update_offload_keys()
        books: Any = self.manager
        first, found, loading = local // size, 0, self._chunks_being_loaded or ()
        for key in status.group_states[0].offload_keys[first : -(-most // size)]:
            chunk = books.policy.get(key)
            if chunk is None or (chunk.ref_cnt < 0 and books.peek(key) is LookupResult.MISS):
                break
            if chunk.ref_cnt < 0 or key in loading:
                return None
            found += 1
        num_tokens = min(most, (first + found) * size) - local
        return num_tokens if num_tokens >= size else 0

    def _readable(self, request: Request) -> RequestOffloadState | None:
        """Return what is known of a request, if a look-up is made for it that can be foreseen."""
        readable = self._is_simple and not request.skip_reading_prefix_cache
        return self._req_status.get(request.request_id) if readable else None

    def _placement(self, request: Request) -> Placement | None:
        return None if self.gaps is None else self.gaps.placement(request.request_id)

    # --- loads ------------------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """As vLLM's; False if the load is to be within the step, and nothing where blocks are planned already."""
        loads = self.loads
        if loads is not None:
            loads.chosen.discard(request.request_id)
        if (placement := self._placement(request)) is not None:
            hit_tokens = placement.num_hit * self.prices.chunk_tokens
            planned, _ = super().get_num_new_matched_tokens(request, hit_tokens, 0)
            return (None if planned is None else 0), False
        num_tokens, found = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        if not num_tokens or not found:
            return num_tokens, found
        num_tokens, between = self._when(request, num_computed_tokens, num_tokens)
        if loads is not None and not between:
            loads.chosen.add(request.request_id)
        return num_tokens, between

    def _when(self, request: Request, num_computed_tokens: int, num_tokens: int) -> tuple[int, bool]:
        """Return how many of the tokens that can be loaded are, and whether that is between steps; changes nothing.

        A load within the step leaves out the block of the last token, which the step computes, and may not write where
        a copy does.
        """
        if self.loads is not None:
            fewer = min(num_tokens, self.prices.kept_tokens(request.num_tokens - 1) - num_computed_tokens)
            if fewer > 0 and self.loads.is_cheaper(fewer):
                return fewer, False
        return num_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As vLLM's, for loads between steps; begins those within the step: of a prefix, or those of a plan."""
        loads, size = self.loads, self.prices.chunk_tokens
        if loads is None:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            return
        chosen = request.request_id in loads.chosen
        loads.chosen.discard(request.request_id)
        if chosen and num_external_tokens:
            status = self._req_status[request.request_id]
            first = status.num_locally_computed_tokens // size
            end = first + num_external_tokens // size
            (state,) = status.group_states
            state.next_stored_chunk_idx = end
            if (ranges := getattr(status, "load_key_ranges", None)) is not None:  # from vLLM 0.32 on
                ranges[:] = [(n * size, (n + 1) * size, state.offload_keys[n]) for n in range(first, end)]
            self._load_in_step(request, blocks, first, end)
        else:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            loads.begin_between(num_external_tokens)
        if (placement := self._placement(request)) is not None:
            for run in placement.runs:
                if run.action is Action.LOAD:
                    self._load_in_step(request, blocks, run.start, run.end)

    def _load_in_step(self, request: Request, blocks: KVCacheBlocks, first: int, end: int) -> None:
        assert self.loads is not None
        ids = [block.block_id for block in blocks.blocks[0][first:end]]
        job_id = self.jobs.load(self._req_status[request.request_id], first, ids)
        self.loads.begin(job_id, ids, len(ids) * self.prices.chunk_tokens)

    # --- failures and resets ----------------------------------------------------------------------------------------

    @property
    def blocks_of_step_loads(self) -> frozenset[int]:
        """Blocks that loads within steps fill which were not reported yet."""
        return frozenset() if self.loads is None else self.loads.blocks

    def failed_step_loads(self, report: KVConnectorOutput) -> FailedLoads | None:
        """Close the books of the loads within a step, and let nothing be kept that was stored since one failed.

        Args:
            report: Of the step's workers, before vLLM's scheduler takes it.

        Returns:
            What failed; None if all is well.
        """
        failed = None if self.loads is None else self.loads.failed(report)
        if failed is not None:
            self.jobs.let_go_of_stores(since=failed.since, blocks=failed.blocks)
            if self.stores is not None:
                self.stores.idle.taken(failed.suspects)
        return failed

    def forget_steps(self, req_id: str) -> None:
        """Take it that nothing of a preempted request was computed or stored: what was may have been let go."""
        if (status := self._req_status.get(req_id)) is not None:
            for state in status.group_states:
                state.next_stored_chunk_idx = 0
        if self.stores is not None:
            self.stores.forget_front(req_id)

    def forget_device(self) -> None:
        """Forget idle chunks: what is in the device's prefix cache must not be used any more."""
        if self.stores is not None:
            self.stores.idle.clear()

    def reset_cache(self) -> None:
        """Forget what was stored."""
        # vLLM takes it that what the reset before wanted waited for was handed to a step since.
        flushed, self._current_batch_jobs_to_flush = self._current_batch_jobs_to_flush, set()
        super().reset_cache()
        self._current_batch_jobs_to_flush |= flushed
        if self.stores is not None:
            self.stores.clear()

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
        """Note that a turn of its conversation ended.

        What it found on the device counts as no use of the tier's copies: as long as the device has it too, these are
        what the host can spare first. Counted as used they cost some points of the hit rate of a small host.
        """
        result: tuple[bool, dict[str, Any] | None] = super().request_finished(request)
        status = self._req_status.get(request.request_id)
        turn = None if status is None else status.req_context.get_state(Turn)
        if self.keeper is not None and status is not None and turn is not None:
            chunks, output = status.group_states[0].offload_keys, request.output_token_ids
            self.keeper.leave(turn, chunks, self.clock(), output)
        return result

    # --- steps ------------------------------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the workers have to copy."""
        if self.keeper is not None:
            self.keeper.sweep(self.clock())
        preempted = scheduler_output.preempted_req_ids
        loading = {job.req_id for job in self._current_batch_load_jobs.values()} if preempted else set()
        # A request that was preempted since the last step, by a reset, may load in this one; vLLM takes the jobs of
        # those preempted for stores.
        if preempted and not loading.isdisjoint(preempted):
            scheduler_output.preempted_req_ids = preempted - loading
        try:
            meta = super().build_connector_meta(scheduler_output)
        finally:
            scheduler_output.preempted_req_ids = preempted
        starting = frozenset() if self.loads is None else self.loads.close()
        if starting and isinstance(meta, OffloadingConnectorMetadata):
            scheduler_output.has_sync_kv_loads = True  # which vLLM says only of loads from the front of a sequence
            return TierMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush, starting)
        return meta

    def _update_req_states(self, scheduler_output: SchedulerOutput) -> None:
        """Follow requests that got blocks; of the others nothing changes but keys, which are looked up when needed."""
        shown: Any = scheduler_output
        if self._is_simple:
            cached = scheduler_output.scheduled_cached_reqs
            given = [(r, blocks) for r, blocks in zip(cached.req_ids, cached.new_block_ids, strict=True) if blocks]
            shown = SimpleNamespace(
                scheduled_new_reqs=scheduler_output.scheduled_new_reqs,
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=[req_id for req_id, _ in given],
                    new_block_ids=[blocks for _, blocks in given],
                    resumed_req_ids=cached.resumed_req_ids,
                ),
                kv_cache_block_copies=scheduler_output.kv_cache_block_copies,
            )
        super()._update_req_states(shown)
        if self.loads is not None:
            self.loads.allocated(self._current_batch_allocated_block_ids)

    def _build_store_jobs(self, scheduler_output: SchedulerOutput) -> dict[int, TransferJob]:
        dispositions, self._dispositions = self._dispositions, {}
        scheduled, finished = scheduler_output.num_scheduled_tokens, scheduler_output.finished_req_ids
        stores = self.stores
        if stores is None and self.store == AHEAD:
            raise RuntimeError("the connector was not given vLLM's blocks before the first step")
        if stores is None:
            storing = filling(self, self.gaps, scheduled)
        else:
            storing, finished = stores.of_running(scheduled), set()
        jobs: dict[int, TransferJob]
        jobs = super()._build_store_jobs(SimpleNamespace(num_scheduled_tokens=storing, finished_req_ids=finished))
        return jobs if stores is None else jobs | stores.of_idle(scheduler_output, dispositions)

    def _calc_num_offloadable_tokens(self, req_status: RequestOffloadState, num_computed_tokens: int) -> int:
        """Return how many of a request's first tokens may be stored: of an ended one those that are worth it."""
        num_tokens: int = super()._calc_num_offloadable_tokens(req_status, num_computed_tokens)
        turn = req_status.req_context.get_state(Turn)
        return num_tokens if turn is None else int(min(num_tokens, turn.kept_tokens))


def _is_simple(side: OffloadingConnectorScheduler) -> bool:
    """Whether chunks are the blocks of one group of layers, from the front of a sequence."""
    config = side.config
    if len(config.kv_group_configs) != 1 or config.supports_partial_tail:
        return False
    group = config.kv_group_configs[0]
    return group.hashes_per_chunk == 1 and group.sliding_window_size_in_chunks is None and not group.is_eagle_group
