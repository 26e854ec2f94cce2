"""The scheduler's side of loads into the middle of a sequence.

vLLM's connector can only say how many tokens more than the device holds it has, from the front. What lies behind a gap
is found chunk by chunk, and brought back within the step that computes the gap, by jobs like those of
`kv.connector.step_loads`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import TransferJobStatus
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult

from vllm_ext.kv.connector.peek import chunk_key
from vllm_ext.kv.connector.step_loads import StepLoadingScheduler, ended_owner
from vllm_ext.kv.partial_prefix.plan import Action, Run

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from vllm_ext.kv.partial_prefix.search import GapSearch


class GapLoadingScheduler(StepLoadingScheduler):
    """Loads within a step, also into the middle of a sequence.

    Attributes:
        gaps: Who has gaps, and what is done about them; None: nobody.
    """

    gaps: GapSearch | None = None

    def cross_gaps(self, gaps: GapSearch) -> None:
        """Take who plans; chunks are found for it if loads within a step are possible at all."""
        self.gaps = gaps
        if self._engine is not None:
            gaps.host = self

    def held_blocks(self, request: Request, numbers: Iterable[int]) -> set[int]:
        """Return which blocks of a request can be loaded now, of those with such numbers; changes nothing.

        What is only on disk is left there: a plan can't wait for it, and would compute it again all the same.
        """
        status = self._req_status.get(request.request_id)
        if status is None:
            return set()
        keys = ((number, chunk_key(status, number)) for number in numbers)
        return {number for number, key in keys if key is not None and self.manager.peek(key) is LookupResult.HIT}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        """As the base's; nothing for a request whose blocks are planned already."""
        placement = None if self.gaps is None else self.gaps.placement(request.request_id)
        if placement is None:
            return super().get_num_new_matched_tokens(request, num_computed_tokens, max_num_new_tokens)
        hit_tokens = placement.num_hit * self.config.kv_group_configs[0].tokens_per_block
        num_tokens, _ = super().get_num_new_matched_tokens(request, hit_tokens, 0)
        self._chosen.discard(request.request_id)
        return (None if num_tokens is None else 0), False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """As the base's; begins the loads of a plan."""
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        placement = None if self.gaps is None else self.gaps.placement(request.request_id)
        if placement is not None:
            for run in placement.runs:
                if run.action is Action.LOAD:
                    self._load_run(request, [block.block_id for block in blocks.blocks[0][run.start : run.end]], run)

    def _load_run(self, request: Request, block_ids: list[int], run: Run) -> None:
        status = self._req_status[request.request_id]
        keys = status.group_states[0].offload_keys[run.start : run.end]
        source = self.manager.prepare_load(keys, status.req_context)
        target = GPULoadStoreSpec(block_ids, group_sizes=[len(block_ids)], block_indices=[run.start])
        job_id = self._generate_job_id()
        owner = f"{request.request_id}#step-{job_id}"
        self._req_status[owner] = ended_owner(self, owner, status.req_context, job_id)
        self._current_batch_load_jobs[job_id] = TransferJob(owner, source, target)
        self._jobs[job_id] = TransferJobStatus(
            req_id=owner, pending_count=self.config.num_workers, keys=set(keys), is_store=False
        )
        if self._chunks_being_loaded is not None:
            self._chunks_being_loaded.update(keys)
        self._planned_s += self.prices.load_s(run.num_blocks * self.config.kv_group_configs[0].tokens_per_block)
        self._note_step_load(job_id, block_ids)
