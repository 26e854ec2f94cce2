"""Copies that belong to no request: the one place that writes into vLLM's books of copies.

vLLM books a copy as its request's, which must neither run nor be preempted while it loads, and whose stores end with
it. A copy of ours is booked as that of an owner of its own, which has ended: so its request can run, be preempted,
aborted or finish, or be gone already, and vLLM fences the blocks and cleans up all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestOffloadState,
    TransferJobStatus,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec, ReqContext, RequestOffloadingContext

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey


class Jobs:
    """Copies of chunks of one block each, of models with one group of layers.

    Args:
        side: vLLM's side of the connector.
    """

    def __init__(self, side: OffloadingConnectorScheduler) -> None:
        self._side = side

    def load(self, status: RequestOffloadState, first: int, blocks: Sequence[int]) -> int:
        """Begin to load a request's chunks, from a number on, into blocks, in the step that is being scheduled.

        Returns:
            The id of the job.
        """
        side, (group,) = self._side, status.group_states
        keys = group.offload_keys[first : first + len(blocks)]
        source = side.manager.prepare_load(keys, status.req_context)
        owner = f"{status.req.request_id}#load-{side._job_counter}"
        job_id, job = self._book(owner, status.req_context, blocks, source, keys, first)
        side._current_batch_load_jobs[job_id] = job
        if side._chunks_being_loaded is not None:
            side._chunks_being_loaded.update(keys)
        return job_id

    def store(
        self, context: ReqContext, keys: Sequence[OffloadKey], blocks: Sequence[int], target: LoadStoreSpec,
        *, now: bool,
    ) -> tuple[int, TransferJob]:  # fmt: skip
        """Begin to store chunks that nobody computes with any more.

        Args:
            context: Of the copy: its id names the owner.
            keys: The chunks.
            blocks: That hold them.
            target: Their places, from the manager.
            now: Whether the step that is being scheduled waits, since it overwrites the blocks; else whoever takes
                them waits.
        """
        side = self._side
        job_id, job = self._book(context.req_id, context, blocks, target, keys, None)
        for block in blocks:
            side._block_id_to_pending_jobs.setdefault(block, set()).add(job_id)
        if now:
            side._current_batch_jobs_to_flush.add(job_id)
        return job_id, job

    @property
    def num_stored_chunks(self) -> int:
        """Chunks of the stores under way."""
        return sum(len(job.keys) for job in self._side._jobs.values() if job.is_store)

    def wait_for_loads(self, req_ids: Iterable[str]) -> None:
        """Have the next step wait for the loads between steps of some requests before it writes anything."""
        wanted = set(req_ids)
        loads = (job_id for job_id, job in self._side._jobs.items() if not job.is_store and job.req_id in wanted)
        self._side._current_batch_jobs_to_flush.update(loads)

    def let_go_of_stores(self, *, since: int, blocks: frozenset[int]) -> None:
        """Let no chunk be found whose store was made after a job, and none be stored of who was aborted since.

        Args:
            since: Id of the job.
            blocks: That it did not fill; the next step would store what was computed from them.
        """
        books: Any = self._side.manager
        for job_id, job in self._side._jobs.items():
            if job.is_store and job_id > since:
                books.mark_unreadable([books.policy.get(key).chunk_id for key in job.keys])
        for status in self._side._req_status.values():
            for state in status.group_states:
                if status.req.is_finished() and not blocks.isdisjoint(state.block_ids):
                    state.block_ids.clear()

    def _book(
        self, owner: str, context: ReqContext, blocks: Sequence[int], host: LoadStoreSpec, keys: Sequence[OffloadKey],
        first: int | None,
    ) -> tuple[int, TransferJob]:  # fmt: skip
        """Book a load to blocks that begin with a request's number ``first``, or a store (None)."""
        side = self._side
        job_id, is_store = side._generate_job_id(), first is None
        request: Any = SimpleNamespace(
            request_id=owner, kv_transfer_params=None, block_hashes=(), is_finished=lambda: True
        )
        status = RequestOffloadState(
            config=side.config, req=request, req_context=context, offloading_context=RequestOffloadingContext()
        )
        status.finished_signaled = True
        status.transfer_jobs.add(job_id)
        side._req_status[owner] = status
        side._jobs[job_id] = TransferJobStatus(
            req_id=owner, pending_count=side.config.num_workers, keys=set(keys), is_store=is_store,
            deferred_fence_block_ids=list(blocks) if is_store else None,
        )  # fmt: skip
        device = GPULoadStoreSpec(list(blocks), group_sizes=[len(blocks)], block_indices=[first or 0])
        return job_id, TransferJob(owner, *((device, host) if is_store else (host, device)))
