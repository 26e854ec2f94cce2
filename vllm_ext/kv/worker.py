"""The worker's side of the tier: a thread that copies KV between the device's blocks and the pool in host memory.

What vLLM's connector guarantees is relied upon here: a block that is stored from is not written until the store is
through or waited for, a block that is loaded into is not read before, and a chunk is in use by one direction at a time.
So copies need no order among each other, and loads, for which a request waits, go before stores.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, OffloadingWorker, TransferResult

from vllm_ext.kv.transfer_plan import GroupTransfer, group_transfers

if TYPE_CHECKING:
    from vllm_ext.kv.codec import Codec

logger = init_logger("vllm.vllm_ext.kv")

_LOAD, _STORE, _END = 0, 1, 2
"""Which goes first."""
_JOIN_S = 5.0


class Failures(NamedTuple):
    """What went wrong since the last time it was asked for."""

    chunks: set[int]
    """Chunks that hold nothing that may be read."""
    blocks: set[int]
    """Blocks of the device that a load did not fill."""
    load_jobs: set[int]
    """Loads that did not fill all of their blocks."""


class _Job(NamedTuple):
    direction: int
    number: int
    job_id: int
    device: GPULoadStoreSpec | None
    host: BlockIDsLoadStoreSpec | None


class TierWorker(OffloadingWorker):
    """Copies, in the background, one job at a time.

    A job that fails is reported as through, since vLLM's connector knows nothing else; what it left behind is in
    `take_failures`, and must reach the scheduler with the report.

    Args:
        codec: Copies blocks of one tensor.
        tensors_of_group: By group of layers, the tensors that hold their KV.
        blocks_per_chunk: Device blocks of a chunk.
        chunk_bytes: What a chunk moves over the link, for the statistics.
    """

    def __init__(
        self, codec: Codec, tensors_of_group: Sequence[Sequence[int]], *, blocks_per_chunk: int, chunk_bytes: int
    ) -> None:
        self._codec = codec
        self._tensors_of_group = tensors_of_group
        self._blocks_per_chunk = blocks_per_chunk
        self._chunk_bytes = chunk_bytes
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._open: set[int] = set()
        self._results: list[TransferResult] = []
        self._failures = Failures(set(), set(), set())
        self._failure_logged = False
        self._thread = threading.Thread(target=self._run, name="vllm-ext-kv-tier", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        """Copy blocks into chunks, behind the loads."""
        return self._submit(_Job(_STORE, next(self._numbers), job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks into blocks, before the stores that wait."""
        return self._submit(_Job(_LOAD, next(self._numbers), job_id, dst_spec, src_spec))

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last time."""
        with self._changed:
            results, self._results = self._results, []
        return results

    def take_failures(self) -> Failures:
        """Return what failed since the last time; call it after `get_finished`, so that none is reported too late."""
        with self._changed:
            failures, self._failures = self._failures, Failures(set(), set(), set())
        return failures

    def wait(self, job_ids: set[int]) -> None:
        """Return when none of these jobs is under way; ids that were never submitted are passed over."""
        with self._changed:
            self._changed.wait_for(lambda: self._open.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """End the thread behind the jobs at hand."""
        self._queue.put(_Job(_END, next(self._numbers), -1, None, None))
        self._thread.join(_JOIN_S)

    def _submit(self, job: _Job) -> bool:
        with self._changed:
            self._open.add(job.job_id)
        self._queue.put(job)
        return True

    def _run(self) -> None:
        while (job := self._queue.get()).direction != _END:
            started = time.perf_counter()
            failed = Failures(set(), set(), set())
            try:
                self._copy(job, failed)
            except Exception:  # noqa: BLE001 - a failed copy costs a recomputation, not the worker its life
                self._failed(job, failed)
            size = 0 if job.host is None else len(job.host.block_ids) * self._chunk_bytes
            took = time.perf_counter() - started
            with self._changed:
                self._open.discard(job.job_id)
                self._results.append(TransferResult(job.job_id, True, transfer_size=size, transfer_time=took))
                for known, new in zip(self._failures, failed, strict=True):
                    known |= new
                self._changed.notify_all()

    def _copy(self, job: _Job, failed: Failures) -> None:
        if job.device is None or job.host is None:
            return
        for part in group_transfers(job.device, job.host, self._blocks_per_chunk):
            if job.direction == _LOAD:
                for tensor in self._tensors_of_group[part.group]:
                    self._codec.load(tensor, part.chunks, part.blocks)
            else:
                failed.chunks.update(part.chunks[~self._stored(part)].tolist())

    def _stored(self, part: GroupTransfer) -> np.ndarray:
        holds = np.ones(len(part.chunks), np.bool_)
        for tensor in self._tensors_of_group[part.group]:
            holds &= self._codec.store(tensor, part.blocks, part.chunks)
        return holds

    def _failed(self, job: _Job, failed: Failures) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            logger.exception("a copy of KV failed; what it was for is computed again (not logged again)")
        if job.host is not None:
            failed.chunks.update(job.host.block_ids.tolist())
        if job.direction == _LOAD and job.device is not None:
            failed.blocks.update(job.device.block_ids.tolist())
            failed.load_jobs.add(job.job_id)
