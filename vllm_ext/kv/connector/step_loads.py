"""The scheduler's side of loads within a step: a request computes in the step that brings its KV back.

vLLM's connector loads between steps only, and books a load as its request's, which must neither run nor be preempted
meanwhile. A load within a step is booked as that of an owner of its own, which has ended, as copies of idle chunks are:
so the request can run, be preempted, aborted or finish, and the load ends with the step all the same.

A load that fails has been computed with by then: by its request, by those that share its blocks, and with async
scheduling by the next step too. Nothing of that may last. Blocks written since leave the prefix cache, what was to be
stored since is never found, and who read them is preempted without its output. vLLM would let them go on from the
first block that failed, but goes wrong there: with async scheduling it delivers what the next step made of the KV, a
prompt that is computed again in pieces can be found in the prefix cache before its last piece is, and the connector
stores chunks that were computed from what was not loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext

from vllm_ext.config.errors import ConfigError
from vllm_ext.config.kv_tier import BETWEEN, IN_STEP
from vllm_ext.kv.connector.load_choice import in_step_is_cheaper

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from vllm_ext.kv.connector.prices import TransferPrices


@dataclass
class TierMetadata(OffloadingConnectorMetadata):
    """What the workers have to copy, and which of the loads the step waits for."""

    in_step: frozenset[int] = frozenset()
    """Ids of jobs in ``load_jobs``."""


class Engine(NamedTuple):
    """What the choice is made by. Who gives it promises to ask `failed_step_loads` before a step's output is used."""

    step_s: Callable[[], float]
    """Mean duration of a step, in seconds."""
    num_running: Callable[[], int]
    """Requests in the step that is being scheduled."""


class FailedLoads(NamedTuple):
    """Loads within a step that did not fill all of their blocks."""

    blocks: frozenset[int]
    """Those that were not filled."""
    suspects: frozenset[int]
    """Blocks allocated since the step of the first of these loads: all that can have been computed from them."""


@dataclass
class _StepLoad:
    blocks: frozenset[int]
    since: set[int] = field(default_factory=set)
    """Blocks that were allocated in its step and in those scheduled since."""


class StepLoadingScheduler(OffloadingConnectorScheduler):
    """vLLM's side, which can also load within a step.

    Args:
        load: Between steps, within them, or what costs less.
        prices: What copies take.

    Attributes:
        clock: Returns the time, in seconds.
        makes_way: Whether the worker's other copies make way for loads within a step, as the CPU's do.

    Raises:
        ConfigError: this model's KV can't be loaded so.
    """

    makes_way: bool = False

    def __init__(
        self, spec: OffloadingSpec, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig,
        *, load: str = BETWEEN, prices: TransferPrices,
    ) -> None:  # fmt: skip
        super().__init__(spec, vllm_config, kv_cache_config)
        self.prices = prices
        self.clock: Callable[[], float] = time.monotonic
        groups = kv_cache_config.kv_cache_groups
        can = len(groups) == 1 and self._is_simple()
        if load == IN_STEP and not can:
            allowed = "needs full attention in one group of layers, since a load that fails can't be told otherwise"
            raise ConfigError("kv_tier.load", load, f"{allowed}; use between or auto")
        self._load = load if can else BETWEEN
        self._num_layers = len(groups[0].layer_names) if can else 1
        self._engine: Engine | None = None
        self._chosen: set[str] = set()
        """Requests whose load is to be within the step, if they get their blocks."""
        self._planned_s = 0.0
        """What the loads take that are within the step that is being scheduled."""
        self._unhurried_s = 0.0
        """What those take that it begins and nobody waits for."""
        self._link_free_s = 0.0
        """When the link will be through with those of the steps before, by the clock."""
        self._starting: set[int] = set()
        """Loads within the step that is being scheduled."""
        self._step_loads: dict[int, _StepLoad] = {}
        """Loads within steps whose output did not come yet."""

    def _is_simple(self) -> bool:
        """Whether chunks are the blocks of one group of layers, from the front of a sequence."""
        config = self.config
        if len(config.kv_group_configs) != 1 or config.supports_partial_tail:
            return False
        group = config.kv_group_configs[0]
        return group.hashes_per_chunk == 1 and group.sliding_window_size_in_chunks is None and not group.is_eagle_group

    def load_in_steps(self, engine: Engine) -> None:
        """Take what a scheduler tells and promises; without it all loads are between steps."""
        self._engine = None if self._load == BETWEEN else engine

    # --- what vLLM's scheduler asks ---------------------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """As vLLM's; False if the load is to be within the step.

        That leaves out the block of the last token, which the step computes, and may not write where a copy does.
        """
        self._chosen.discard(request.request_id)
        num_tokens, found = super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        if not num_tokens or not found:
            return num_tokens, found
        num_tokens, between = self._when(request, num_computed_tokens, num_tokens)
        if not between:
            self._chosen.add(request.request_id)
        return num_tokens, between

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As vLLM's; gives a load within the step an owner of its own."""
        chosen = request.request_id in self._chosen
        self._chosen.discard(request.request_id)
        if not (chosen and num_external_tokens):
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            self._unhurried_s += self.prices.load_s(num_external_tokens)
            return
        super().update_state_after_alloc(request, _as_if_new(blocks), num_external_tokens)
        self._planned_s += self.prices.load_s(num_external_tokens)
        self._detach(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the workers have to copy."""
        meta = super().build_connector_meta(scheduler_output)
        starting, self._starting, self._planned_s = frozenset(self._starting), set(), 0.0
        if self._unhurried_s and self._engine is not None:  # they begin behind the step
            self._link_free_s = max(self._link_free_s, self.clock() + self._engine.step_s()) + self._unhurried_s
        self._unhurried_s = 0.0
        if starting and isinstance(meta, OffloadingConnectorMetadata):
            scheduler_output.has_sync_kv_loads = True  # which vLLM says only of loads from the front of a sequence
            return TierMetadata(meta.load_jobs, meta.store_jobs, meta.jobs_to_flush, starting)
        return meta

    def _update_req_states(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_req_states(scheduler_output)
        for load in self._step_loads.values():
            load.since |= self._current_batch_allocated_block_ids

    # --- failures ---------------------------------------------------------------------------------------------------

    @property
    def blocks_of_step_loads(self) -> frozenset[int]:
        """Blocks that loads within steps fill which were not reported yet."""
        return frozenset().union(*(load.blocks for load in self._step_loads.values()))

    def failed_step_loads(self, report: KVConnectorOutput) -> FailedLoads | None:
        """Close the books of the loads within a step, and let nothing be kept that was stored since one failed.

        Args:
            report: Of the step's workers, before vLLM's scheduler takes it.

        Returns:
            What failed; None if all is well.
        """
        if not self._step_loads:
            return None
        completed = getattr(report.kv_connector_worker_meta, "completed_jobs", {})
        unfilled = report.invalid_block_ids or set()
        failed: dict[int, _StepLoad] = {}
        for job_id in completed:
            load = self._step_loads.pop(job_id, None)
            if load is not None and not load.blocks.isdisjoint(unfilled):
                failed[job_id] = load
        if not failed:
            return None
        blocks = frozenset().union(*(load.blocks for load in failed.values())) & unfilled
        self._let_go_of_stores(since=min(failed))
        self._let_go_of_ended(blocks)
        suspects = frozenset().union(*(load.since for load in failed.values()))
        self.forget_blocks(suspects)
        return FailedLoads(blocks, suspects)

    def forget_blocks(self, blocks: frozenset[int]) -> None:
        """Store nothing from blocks whose content is doubtful, and whose request is gone."""

    def forget_steps(self, req_id: str) -> None:
        """Take it that nothing of a preempted request was stored: what was may have been let go."""
        if (status := self._req_status.get(req_id)) is not None:
            for state in status.group_states:
                state.next_stored_chunk_idx = 0

    def _let_go_of_stores(self, since: int) -> None:
        """Let no chunk be found whose store was made after a job."""
        books: Any = self.manager
        for job_id, job in self._jobs.items():
            if job.is_store and job_id > since:
                books.mark_unreadable([books.policy.get(key).chunk_id for key in job.keys])

    def _let_go_of_ended(self, blocks: frozenset[int]) -> None:
        """Let nothing be stored of requests that were aborted since with such blocks, as the next step would."""
        for status in self._req_status.values():
            for state in status.group_states:
                if status.req.is_finished() and not blocks.isdisjoint(state.block_ids):
                    state.block_ids.clear()

    # --- parts ------------------------------------------------------------------------------------------------------

    def _when(self, request: Request, num_computed_tokens: int, num_tokens: int) -> tuple[int, bool]:
        """Return how many of the tokens that can be loaded are, and whether that is between steps; changes nothing."""
        if self._engine is None:
            return num_tokens, True
        size = self.config.kv_group_configs[0].tokens_per_block
        whole = (request.num_tokens - 1) // size * size
        fewer = min(num_tokens, whole - num_computed_tokens)
        if fewer <= 0 or not self._prefers_the_step(self._engine, fewer):
            return num_tokens, True
        return fewer, False

    def _prefers_the_step(self, engine: Engine, num_tokens: int) -> bool:
        behind_s = 0.0 if self.makes_way else max(0.0, self._link_free_s - self.clock())
        return self._load == IN_STEP or in_step_is_cheaper(
            self.prices.load_s(num_tokens),
            planned_s=self._planned_s,
            step_s=engine.step_s(),
            num_layers=self._num_layers,
            others=engine.num_running(),
            behind_s=behind_s,
        )

    def _detach(self, req_id: str) -> None:
        status = self._req_status[req_id]
        (job_id,) = status.transfer_jobs
        status.transfer_jobs.clear()
        owner = f"{req_id}#step-{job_id}"
        self._req_status[owner] = ended_owner(self, owner, status.req_context, job_id)
        self._jobs[job_id].req_id = owner
        job = self._current_batch_load_jobs[job_id]
        job.req_id = owner
        blocks: Any = job.dst_spec
        self._note_step_load(job_id, blocks.block_ids.tolist())

    def _note_step_load(self, job_id: int, block_ids: Iterable[int]) -> None:
        """Book a load of the step that is being scheduled, which its workers wait for."""
        self._starting.add(job_id)
        self._step_loads[job_id] = _StepLoad(frozenset(block_ids))


def _as_if_new(blocks: KVCacheBlocks) -> Any:
    """Return blocks that seem not to be in the prefix cache.

    Those that a load fills are in it already where the request computes in the same step, and vLLM's connector takes
    them for filled.
    """
    groups = [
        [SimpleNamespace(block_id=block.block_id, is_null=block.is_null, block_hash=None) for block in group]
        for group in blocks.blocks
    ]
    return SimpleNamespace(blocks=groups)


def ended_owner(
    side: OffloadingConnectorScheduler, req_id: str, context: ReqContext, job_id: int
) -> RequestOffloadState:
    """Return the state of a request that has ended, and whose copy is under way: vLLM fences its blocks and cleans up.

    Args:
        side: Whose books it is for.
        req_id: Of the owner, which no real request has.
        context: Handed to the manager when the copy is through.
        job_id: Of the copy.
    """
    request: Any = SimpleNamespace(
        request_id=req_id, kv_transfer_params=None, block_hashes=(), is_finished=lambda: True
    )
    status = RequestOffloadState(
        config=side.config, req=request, req_context=context, offloading_context=RequestOffloadingContext()
    )
    status.finished_signaled = True
    status.transfer_jobs.add(job_id)
    return status
