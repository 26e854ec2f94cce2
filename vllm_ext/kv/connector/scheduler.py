"""The scheduler's side of the connector: vLLM's, with a say in when KV is stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import AHEAD, ALL, AUTO, BETWEEN, EARLY, PAYING
from vllm_ext.contract.preemption import KvDisposition
from vllm_ext.kv.connector.idle import IdleChunks
from vllm_ext.kv.connector.idle_stores import IdleStoringScheduler
from vllm_ext.kv.connector.peek import prefix_tokens
from vllm_ext.kv.connector.prices import TransferPrices
from vllm_ext.kv.conversations.conversation import Turn
from vllm_ext.kv.conversations.keeper import Keeper
from vllm_ext.kv.eviction.retention import Chain

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import RequestOffloadState
    from vllm.v1.core.block_pool import BlockPool

    from vllm_ext.hints import HintError


class TierScheduler(IdleStoringScheduler):
    """vLLM's side, with two ways to store.

    ``early``, vLLM's own: a chunk as soon as it is full. Nothing waits for a copy, and much is copied that nobody asks
    for again.

    ``ahead``: when the device runs short of blocks that can be taken without loss, those first that vLLM would take
    first; and at the last moment, before a step overwrites them, which that step waits for, if that pays. What is used
    again before is never copied. For full attention with a prefix cache.

    ``auto`` is ``ahead`` where that can be done, else ``early``.

    Attributes:
        store: When chunks are copied; what ``auto`` stands for, where that was asked for.
        prices: What copies take.
        leaving: Running requests that will be preempted soon: their chunks are stored as soon as they are full.
    """

    _current_batch_jobs_to_flush: set[int]

    def __init__(
        self,
        *args: Any,
        store: str = AUTO,
        load: str = BETWEEN,
        copies: str = PAYING,
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
        self.leaving: frozenset[str] = frozenset()
        self.discarded: dict[str, frozenset[int]] = {}
        """See `vllm_ext.kv.connector.resets`."""
        self.free_fraction = free_fraction
        self.copies_all = copies == ALL
        self.store = self._resolved(store)
        self._computed: dict[str, int] = {}
        """By request: tokens whose KV is there when the steps scheduled so far are through."""
        self._asked: dict[str, int] = {}
        """By request: tokens of chunks whose copies did not pay when that was asked last."""
        self._dispositions: dict[str, KvDisposition] = {}
        """By request preempted in this step: what becomes of its KV, where that is not the tier's own way."""

    def _resolved(self, store: str) -> str:
        can = self._chunks_being_loaded is not None and self._is_simple()
        if store == AHEAD and not can:
            allowed = "needs full attention in one group of layers, and vLLM's prefix cache; use auto or early"
            raise ConfigError("kv_tier.store", store, allowed)
        return store if store != AUTO else AHEAD if can else EARLY

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Take vLLM's blocks, of which ``ahead`` asks what they hold."""
        self._pool = pool
        if self.store == AHEAD:
            self.idle = IdleChunks(pool)

    def use(self, clock: Callable[[], float], prefill_s: Callable[[int, int], float]) -> None:
        """Take the scheduler's clock, and its estimate of the time to compute so many tokens after so many others."""
        self.clock = clock
        chunk = self.prices.chunk_tokens

        def recompute_s(end: int) -> float:
            return prefill_s(chunk, max(0, end - chunk))

        self.price(recompute_s)
        if self.keeper is not None:
            self.keeper.use(clock, recompute_s)

    def peek(self, request: Request, local_tokens: int, max_num_new_tokens: int | None = None) -> tuple[int, bool]:
        """Return what `get_num_new_matched_tokens` would say now, and change nothing: to price an admission.

        Cost: one look-up in a dictionary per chunk that would be loaded (`peek.prefix_tokens`); a request without
        anything on the host costs one.

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
        status = self._req_status.get(request.request_id)
        if status is None or status.transfer_jobs or request.skip_reading_prefix_cache or not self._is_simple():
            return 0, False
        placement = None if self.gaps is None else self.gaps.placement(request.request_id)
        if placement is not None and placement.layout.num_kept == local_tokens:
            return 0, False
        found = prefix_tokens(self, status, local_tokens, max_num_new_tokens)
        return self._when(request, local_tokens, found) if found else (0, False)

    def can_tell(self, request: Request, local_tokens: int) -> bool:
        """Say whether `get_num_new_matched_tokens` could tell by now, or would have vLLM ask again; changes nothing.

        Cost: as `peek`. True also where that is not to be asked, or does not look: of what is on disk, which only
        vLLM's question brings.
        """
        status = self._req_status.get(request.request_id)
        if status is None:
            return True
        if status.transfer_jobs:
            return False
        if self.gaps is not None or request.skip_reading_prefix_cache or not self._is_simple():
            return True
        return prefix_tokens(self, status, local_tokens, None) is not None

    def report_bad_hints(self, told: Callable[[str, HintError], None]) -> None:
        """Say who is told the id of a request, and what of its hints it may not ask for."""
        if self.keeper is not None:
            self.keeper.on_bad_hint = told

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

    def decide(self, req_id: str, disposition: KvDisposition) -> None:
        """Take a decision about the KV of a request that this step preempts."""
        self._dispositions[req_id] = disposition

    @property
    def stores_early(self) -> bool:
        """Whether every chunk is stored as soon as it is full, whatever is decided."""
        return self.store == EARLY

    @property
    def looks_at_all(self) -> bool:
        """Whether all who run may have to copy chunks in the step at hand, not only those that will leave soon."""
        return self.store == AHEAD and self._is_full() and not self.copies_all

    def keeps(self, disposition: KvDisposition) -> bool:
        """Whether KV outlives the preemption of its request."""
        return self.stores_early or disposition is not KvDisposition.RECOMPUTE

    def forget_blocks(self, blocks: frozenset[int]) -> None:
        """Forget the idle chunks in such blocks."""
        if self.idle is not None:
            self.idle.taken(blocks)

    def forget_steps(self, req_id: str) -> None:
        """Take it that nothing of a preempted request was computed or stored."""
        super().forget_steps(req_id)
        self._forget_front(req_id)

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
        dispositions, self._dispositions = self._dispositions, {}
        jobs: dict[int, TransferJob]
        if self.stores_early:
            shown: Any = SimpleNamespace(
                num_scheduled_tokens=self._with_new_chunks(scheduler_output.num_scheduled_tokens),
                finished_req_ids=scheduler_output.finished_req_ids,
            )
            jobs = super()._build_store_jobs(shown)
            return jobs
        finished = sorted(scheduler_output.finished_req_ids or ())  # in an order that no hash of a process decides
        given_up = self._given_up(scheduler_output)
        statuses, scheduled = self._req_status, scheduler_output.num_scheduled_tokens
        self._note_fronts(scheduled)
        for req_id in finished:
            self._forget_front(req_id)
        leaving = {r: scheduled[r] for r in sorted(self.leaving & scheduled.keys()) if self._is_whole(r)}
        for req_id in leaving:
            statuses[req_id].update_offload_keys()
        leaving |= self._paying(scheduled) if self.looks_at_all else {}
        jobs = super()._build_store_jobs(SimpleNamespace(num_scheduled_tokens=leaving, finished_req_ids=()))
        return jobs | self._idle_jobs(finished, given_up, dispositions)

    def _calc_num_offloadable_tokens(self, req_status: RequestOffloadState, num_computed_tokens: int) -> int:
        """Return how many of a request's first tokens may be stored: of an ended one those that are worth it."""
        num_tokens: int = super()._calc_num_offloadable_tokens(req_status, num_computed_tokens)
        turn = req_status.req_context.get_state(Turn)
        return num_tokens if turn is None else int(min(num_tokens, turn.kept_tokens))

    def _paying(self, scheduled: Mapping[str, int]) -> dict[str, int]:
        """Return those of a step's requests that have chunks to store whose copies will pay.

        What does not pay is asked about again when one more chunk is full: not for every request in every step.
        """
        size, statuses, computed, asked = self.prices.chunk_tokens, self._req_status, self._computed, self._asked
        found = {}
        filling = self._with_new_chunks({r: n for r, n in scheduled.items() if computed[r] >= asked.get(r, 0) + size})
        for req_id, num_tokens in filling.items():
            owner = statuses[req_id].req_context
            turn = owner.get_state(Turn)
            in_answer = turn is not None and turn.prompts_only and computed[req_id] > turn.prompt_tokens
            if not in_answer and self._saves(owner, after_this_turn=True):
                found[req_id] = num_tokens
            else:
                asked[req_id] = computed[req_id] // size * size
        return found

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

    def _note_fronts(self, scheduled: Mapping[str, int]) -> None:
        """Note how many tokens of each request, from the first one on, have their KV after a step."""
        statuses, computed, gaps = self._req_status, self._computed, self.gaps
        for req_id, num_tokens in scheduled.items():  # every request in every step: no calls
            computed[req_id] = statuses[req_id].req.num_computed_tokens + num_tokens
        if gaps is not None:
            computed.update({req_id: gaps.front(req_id, computed[req_id]) for req_id in scheduled})

    def note_front(self, req_id: str, num_tokens: int) -> None:
        """Note the same for one request that has computed so many tokens, those of steps under way included."""
        self._computed[req_id] = num_tokens if self.gaps is None else self.gaps.front(req_id, num_tokens)

    def _forget_front(self, req_id: str) -> int:
        self._asked.pop(req_id, None)
        return self._computed.pop(req_id, 0)

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
                found[req_id] = min(status.req.num_tokens - 1, self._forget_front(req_id))
        return found

    # --- resets -----------------------------------------------------------------------------------------------------

    def wait_for_loads(self, req_ids: Iterable[str]) -> None:
        """Have the next step wait for the loads of some requests before it writes anything."""
        wanted = set(req_ids)
        loads = (job_id for job_id, job in self._jobs.items() if not job.is_store and job.req_id in wanted)
        self._current_batch_jobs_to_flush.update(loads)

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
        self._asked.clear()
