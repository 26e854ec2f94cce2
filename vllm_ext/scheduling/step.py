"""The scheduler's state as policies see it before a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, filterfalse, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from vllm_ext.contract import Batch, Candidate, Pool, RequestView, Room, Server, Split, StepStats, Victim
from vllm_ext.contract.step import Lengths
from vllm_ext.scheduling.demand import Prices
from vllm_ext.scheduling.engine_state import (
    EngineState,
    adapter_of,
    awaits_grammar,
    grammar_failed,
    read,
    tokens_left,
)
from vllm_ext.step_time.runtime import StepFeatures

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

    from vllm_ext.contract import Rank
    from vllm_ext.kv.connector.cached_prefixes import CachedPrefixes
    from vllm_ext.scheduling.running_order import RunningOrder
    from vllm_ext.scheduling.tracked_requests import TrackedRequests
    from vllm_ext.scheduling.waiting_table import WaitingTable
    from vllm_ext.step_time.runtime import RuntimeModel

LOOK_AHEAD = 32
"""Waiting requests shown to a policy at most: a step must not cost more because the queue is longer."""
_ASKED_IN_VAIN = 64
"""Requests of which a connector can't tell yet what KV it has that a look comes across at most."""
_TYPICAL_TOKENS = 512
"""Length of the sequences of a full batch, where it only matters of which order its step is."""
_computed_tokens = attrgetter("num_computed_tokens")
_LENGTHS = (_computed_tokens, attrgetter("num_prompt_tokens"), attrgetter("max_tokens"))


class EngineStep:
    """The `Step` of one moment, for which vLLM's lists were read once; views of requests are made when asked for."""

    def __init__(
        self,
        engine: EngineState,
        now: float,
        num_waiting: int,
        *,
        tracked: TrackedRequests,
        queue: WaitingTable,
        order: RunningOrder,
        rng: np.random.Generator,
        memo: dict[str, Any],
        victim: Callable[[RequestView, int], Victim],
        prefixes: CachedPrefixes,
    ) -> None:
        """Take the scheduler and what is known beside it.

        Args:
            engine: vLLM's scheduler.
            now: Clock time, s.
            num_waiting: How many wait.
            tracked: Makes views.
            queue: Who waits.
            order: Who runs.
            rng: For policies that draw.
            memo: What policies noted in earlier steps.
            victim: Prices the preemption of a running request that frees so many blocks.
            prefixes: Say what of those who wait needs no computing, and whether that can be told by now.
        """
        self._prefixes = prefixes
        self._engine, self._tracked, self._queue, self._order, self._victim = engine, tracked, queue, order, victim
        self._lists = lists = read(engine, num_waiting)
        self.now = now
        self.pool = pool_of(engine)
        self.rng = rng
        self.memo = memo
        self.number: int = engine.current_step
        self.num_running = len(lists.running)
        self.num_waiting = num_waiting
        self.unfinished_prompts = lists.prefilling
        self.num_prefilling = len(lists.prefilling)
        self.num_decoding = self.num_running - self.num_prefilling
        self.token_budget = engine.max_num_scheduled_tokens
        # With pipeline parallelism vLLM schedules nothing of those in the other batches.
        self._some_in_flight = engine.vllm_config.parallel_config.pipeline_parallel_size > 1
        self.decode_tokens = self._count_decodes()
        self.runtime: RuntimeModel = tracked.runtime
        self.step_stats: StepStats = tracked.step_stats.latest
        self.changes: int = order.changes + queue.changes
        self._apart = False
        self._chunk: int | None = None
        self._free_tokens: int | None = None
        self._shown: list[Candidate] = []
        """Who of those who wait was looked at already; behind them come the others."""
        self._hidden = self._all_waiting()
        self.untold: list[Request] = []
        """Those that were left out as a connector can't tell yet what KV it has of them: vLLM would pass over them."""

    def _count_decodes(self) -> int:
        engine = self._engine
        if not engine.num_spec_tokens and not self._some_in_flight:
            return self.num_decoding
        half_done, cap = engine._inflight_prefills, self._lists.largest_chunk or self.token_budget
        return sum([min(cap, tokens_left(request)) for request in self._lists.running if request not in half_done])

    def split_by(self, split: Split) -> None:
        """Take the budget policy's answer: from here on the step has what that leaves."""
        if split.tokens is not None:
            self.token_budget = split.budget(self.token_budget)
        if not split.prefill and self.num_decoding:  # else vLLM has nothing to wait for, and prefills
            self.token_budget = min(self.token_budget, self.decode_tokens)
        self._apart, self._chunk = split.apart, split.chunk
        self._free_tokens = None

    @property
    def free_tokens(self) -> int:
        """Tokens of the budget that running requests, and those that have loaded, leave; may be negative."""
        if self._free_tokens is None:
            lists = self._lists
            free = self.token_budget - (0 if self._apart else self.decode_tokens)
            cap = lists.largest_chunk or self.token_budget
            cap = cap if self._chunk is None else min(cap, self._chunk)
            for request in lists.prefilling:
                free -= min(cap, request.num_tokens - request.num_computed_tokens)
            # Those whose KV has come start before all others.
            self._free_tokens = free - sum([max(1, r.num_tokens - r.num_computed_tokens) for r in lists.loaded])
        return self._free_tokens

    def room(self) -> Room:
        """Return what the step has left for those who join."""
        engine, lists, free_tokens = self._engine, self._lists, self.free_tokens
        # As upstream has it, a load between steps takes its seat when its KV has come.
        ready = len(lists.loaded)
        seated = self.num_running + lists.num_parked - len(lists.loading) + ready
        speculative = engine.vllm_config.speculative_config
        drafts = 0 if speculative is None else int(speculative.max_num_new_slots_for_drafting)
        inputs = engine.scheduler_config.max_num_batched_tokens - (self.token_budget - free_tokens)
        prices = Prices(engine, self._prefixes, self.pool)
        return Room(
            seats=engine.max_num_active_reqs - seated,
            tokens=free_tokens,
            chunk=lists.largest_chunk,
            blocks=self.pool.unused - engine.kv_cache_manager.watermark_blocks,
            inputs=inputs - drafts * (self.num_running + ready),
            draft_slots=drafts,
            adapters=self._queue.adapters,
            idle=not self.num_running and not lists.loading,
            price=prices.price,
            taken=prices.joins,
        )

    @property
    def context_tokens(self) -> int:
        """Sum of the KV tokens held by running requests."""
        return sum(map(_computed_tokens, self._lists.running))

    def tbt_s(self, default_s: float) -> float:
        """Return the smallest TBT objective of the running requests that can be kept.

        One below what the step's decodes take by themselves is lost, and counts as none.
        """
        objectives = self._order.tbt_s
        if not objectives:
            return default_s
        least = self.runtime.step_time_s(StepFeatures(self.num_decoding, 0, self.context_tokens))
        named = [objective_s for objective_s in objectives.values() if objective_s >= least]
        return min(named) if len(named) == len(self._order.keys) else min((default_s, *named))

    def finished_lengths(self) -> Lengths:
        """Output lengths of the requests that finished last, ascending."""
        return self._tracked.finished_lengths.ascending()

    def _holders(self, without: Sequence[Victim]) -> list[Request]:
        leaving = {victim.request.req_id for victim in without}
        return [r for r in (*self._lists.running, *self._lists.loading) if r.request_id not in leaving]

    def batch(self, without: Sequence[Victim] = ()) -> Batch:
        """Those who run or load KV, as columns."""
        holders, half_done = self._holders(without), self._engine._inflight_prefills
        computed, prompt, max_tokens = (
            np.fromiter(map(read, holders), dtype=np.int64, count=len(holders)) for read in _LENGTHS
        )
        # Who decodes has computed all but its last token; of the others, a few, the request itself is asked.
        generated = np.maximum(computed - prompt, 0)
        tokens = np.maximum(computed, prompt)
        if half_done:
            for place, request in enumerate(holders):
                if request in half_done:
                    generated[place], tokens[place] = request.num_output_tokens, request.num_tokens
        return Batch(tokens, computed, generated, max_tokens)

    def predicted_lengths(self, without: Sequence[Victim] = ()) -> Lengths:
        """Current estimates of their total output, in the order of `batch`."""
        by_id = self._tracked.by_id
        return np.array([by_id[request.request_id].estimate for request in self._holders(without)], dtype=np.int64)

    def prefilling(self) -> Sequence[RequestView]:
        """Running requests with a part of their prompt still to compute, best rank first."""
        return [self._view(request) for request in sorted(self._lists.prefilling, key=self._order.keys.__getitem__)]

    def decoding(self) -> Iterator[RequestView]:
        """Running requests whose prompt is computed, in no particular order."""
        half_done = self._engine._inflight_prefills
        return (self._view(request) for request in self._lists.running if request not in half_done)

    def waiting(self, but: Callable[[Candidate], bool] | None = None, *, past: int = 256) -> Iterator[Candidate]:
        """Waiting requests that could join now, best rank first; who was looked at once in a step is kept."""
        found = self._candidates()
        return islice(found if but is None else filterfalse(but, islice(found, past)), LOOK_AHEAD)

    def _candidates(self) -> Iterator[Candidate]:
        fits, hidden = self._queue.adapters.fits, self._hidden
        for place in count():
            if place == len(self._shown):
                candidate = next(hidden, None)
                if candidate is None:
                    return
                self._shown.append(candidate)
            else:
                candidate = self._shown[place]
                if candidate.adapter and not fits(candidate.adapter):
                    continue
            yield candidate

    def _all_waiting(self) -> Iterator[Candidate]:
        asks = self._engine.connector is not None
        self._queue.begin_look()
        for key, entry in self._queue.ranked():
            if not could_join(entry.request):
                continue
            if not asks or self._prefixes.can_tell(entry.request):
                yield self._candidate(entry.request, entry.rank, key)
            else:
                self.untold.append(entry.request)
                if len(self.untold) >= _ASKED_IN_VAIN:
                    return

    def candidates(self, requests: Sequence[Request]) -> list[Candidate]:
        """Return waiting requests as candidates, wherever they stand."""
        queue = self._queue
        return [self._candidate(request, queue.rank(request), queue.key(request)) for request in requests]

    def _candidate(self, request: Request, rank: Rank, key: tuple[float, ...]) -> Candidate:
        adapter = 0 if request.lora_request is None else adapter_of(request)
        aged = rank.older_only_s <= self.now
        view = partial(self._tracked.view, self._tracked.by_id[request.request_id])
        return Candidate(request.request_id, key, view, aged, rank.presses, adapter)

    def is_waiting(self, req_id: str) -> bool:
        """Say whether a request waits, for whatever reason."""
        return self._engine.requests.get(req_id) in self._queue

    def victims(self, behind: tuple[float, ...] = ()) -> Iterator[Victim]:
        """Running requests that rank after ``behind``, worst rank first, ranked afresh when looked at.

        While blocks of earlier preemptions are on their way back there is nobody: more would leave than is needed.
        """
        if self._engine.deferred_frees:
            return
        for request, key in self._order.worst_first():
            if key <= behind:
                return
            victim = self._victim(self._view(request), self._blocks_freed_by(request))
            yield victim._replace(key=key)

    def best_running(self) -> RequestView | None:
        """The running request of the best rank."""
        request = self._order.best()
        return None if request is None else self._view(request)

    def _view(self, request: Request) -> RequestView:
        return self._tracked.view(self._tracked[request.request_id])

    def _blocks_freed_by(self, request: Request) -> int:
        """Return the blocks that a preemption would free: those that nobody else holds, which need not be the last.

        Records, whose ids are behind those of the blocks, have a place of their own.
        """
        manager = self._engine.kv_cache_manager
        held, end = manager.get_blocks(request.request_id).blocks, manager.block_pool.num_gpu_blocks
        return sum([b.ref_cnt <= 1 and not b.is_null and b.block_id < end for group in held for b in group])


def could_join(request: Request) -> bool:
    """Whether vLLM will take the request if it fits, or pass over it: its output, grammar or KV is still on its way."""
    if request.num_stale_output_tokens and not request.drop_stale_output:
        return False
    status = request.status
    if status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
        # vLLM looks whether the grammar is there only when a seat is free, which may be what we are to see to.
        return not awaits_grammar(request) and not grammar_failed(request)
    return status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)


def pool_of(engine: EngineState) -> Pool:
    """Return the KV blocks of an engine, as they are now; vLLM keeps one, the null block, for itself."""
    manager = engine.kv_cache_manager
    unused = manager.block_pool.get_num_free_blocks()
    return Pool(
        total=manager.block_pool.num_gpu_blocks - 1,
        unused=unused,
        free=unused - manager.watermark_blocks if engine.running else unused,
        block_sizes=tuple(each.block_size for each in manager.coordinator.single_type_managers),
        lookahead_tokens=engine.num_lookahead_tokens,
        max_model_len=engine.max_model_len,
    )


def server_of(engine: EngineState, runtime: RuntimeModel) -> Server:
    """Return what requests take their share of: seats, KV, and steps of a batch that fills both."""
    pool = pool_of(engine)
    kv_tokens = max(1, pool.total * pool.block_size)
    decodes = max(1, min(engine.max_num_active_reqs, kv_tokens // _TYPICAL_TOKENS))
    step_s = runtime.step_time_s(StepFeatures(decodes, 0, min(kv_tokens, decodes * _TYPICAL_TOKENS)))
    token_s = runtime.prefill_s(_TYPICAL_TOKENS) / _TYPICAL_TOKENS
    return Server(engine.max_num_active_reqs, kv_tokens, token_s / max(step_s, 1e-9))
