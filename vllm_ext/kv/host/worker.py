"""The worker's side of the tier: a thread that copies KV between the device's blocks and the pool in host memory.

What vLLM's connector guarantees is relied upon here: a block that is stored from is not written until the store is
through or waited for, a block that is loaded into is not read before, and a chunk is in use by one direction at a time.
So copies need no order among each other, and loads, for which a request waits, go before stores. Loads within a step,
for which all its requests wait, go first: whatever is under way makes way for them before its next layer.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, OffloadingWorker, TransferResult

from vllm_ext.kv.connector.worker import LayerJob, LayerLoads
from vllm_ext.kv.host.affinity import leave_the_engines_core
from vllm_ext.kv.host.failures import Failures
from vllm_ext.kv.host.times import WorkerTimes
from vllm_ext.kv.host.transfer_plan import GroupTransfer, group_transfers

if TYPE_CHECKING:
    from vllm_ext.kv.host.codec import Codec

logger = init_logger("vllm.vllm_ext.kv")

_STEP, _LOAD, _STORE, _END = range(4)
"""Which goes first."""
_JOIN_S = 5.0


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
        chunk_bytes: What a chunk moves over the link, for the statistics.
    """

    def __init__(self, codec: Codec, tensors_of_group: Sequence[Sequence[int]], *, chunk_bytes: int) -> None:
        self._codec = codec
        self._tensors_of_group = tensors_of_group
        self._chunk_bytes = chunk_bytes
        self._queue: queue.PriorityQueue[_Job] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._steps: deque[LayerLoads] = deque()
        self._away_s = 0.0
        """Time spent on loads within steps since the job at hand began."""
        self._open: set[int] = set()
        self._results: list[TransferResult] = []
        self._failures = Failures.none()
        self._times = WorkerTimes()
        self._failure_logged = False
        self._thread = threading.Thread(target=self._run, name="vllm-ext-kv-tier", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        """Copy blocks into chunks, behind the loads."""
        return self._submit(_Job(_STORE, next(self._numbers), job_id, src_spec, dst_spec))

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks into blocks, before the stores that wait."""
        return self._submit(_Job(_LOAD, next(self._numbers), job_id, dst_spec, src_spec))

    def load_by_layer(self, jobs: Sequence[LayerJob]) -> LayerLoads:
        """Copy chunks into blocks, layer by layer over all jobs, before everything else."""
        loads = LayerLoads(jobs, self._tensors_of_group[0])
        with self._changed:
            self._open.update(job.job_id for job in jobs)
        self._steps.append(loads)
        self._queue.put(_Job(_STEP, next(self._numbers), -1, None, None))
        return loads

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last time."""
        with self._changed:
            results, self._results = self._results, []
        return results

    def take_failures(self) -> Failures:
        """Return what failed since the last time; call it after `get_finished`, so that none is reported too late."""
        with self._changed:
            failures, self._failures = self._failures, Failures.none()
        return failures

    def take_times(self) -> WorkerTimes:
        """Return what copying took since the last time."""
        with self._changed:
            times, self._times = self._times, WorkerTimes()
        return times

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
        leave_the_engines_core()
        while (job := self._queue.get()).direction != _END:
            if job.direction == _STEP:
                self._make_way()
            else:
                self._do(job)

    def _do(self, job: _Job) -> None:
        self._away_s = 0.0
        started = time.perf_counter()
        failed = Failures.none()
        try:
            self._copy(job, failed)
        except Exception as error:  # noqa: BLE001 - a failed copy costs a recomputation, not the worker its life
            self._failed(job, failed, error)
        took = time.perf_counter() - started - self._away_s
        self._spent(job.direction, took)
        self._report([TransferResult(job.job_id, True, transfer_size=self._size(job), transfer_time=took)], failed)

    def _make_way(self) -> None:
        """Make the loads that a step waits for, if there are any."""
        started = time.perf_counter()
        while self._steps:
            step, failed = self._steps.popleft(), Failures.none()
            step.run(self._codec)
            results = []
            for load in step.loads:
                job = _Job(_LOAD, 0, load.job.job_id, load.job.device, load.job.host)
                if load.error is not None:
                    self._failed(job, failed, load.error)
                size = self._size(job)
                self._spent(_LOAD, load.seconds)
                results.append(TransferResult(job.job_id, True, transfer_size=size, transfer_time=load.seconds))
            self._report(results, failed)
        self._away_s += time.perf_counter() - started

    def _spent(self, direction: int, seconds: float) -> None:
        with self._changed:
            if direction == _LOAD:
                self._times.load_codec_s += seconds
            else:
                self._times.store_codec_s += seconds

    def _report(self, results: list[TransferResult], failed: Failures) -> None:
        with self._changed:
            self._open.difference_update(result.job_id for result in results)
            self._results += results
            self._failures.add(failed)
            self._changed.notify_all()

    def _size(self, job: _Job) -> int:
        return 0 if job.host is None else len(job.host.block_ids) * self._chunk_bytes

    def _copy(self, job: _Job, failed: Failures) -> None:
        if job.device is None or job.host is None:
            return
        for part in group_transfers(job.device, job.host):
            if job.direction == _LOAD:
                for tensor in self._tensors_of_group[part.group]:
                    self._make_way()
                    self._codec.load(tensor, part.chunks, part.blocks)
            else:
                failed.chunks.update(part.chunks[~self._stored(part)].tolist())

    def _stored(self, part: GroupTransfer) -> np.ndarray:
        holds = np.ones(len(part.chunks), np.bool_)
        for tensor in self._tensors_of_group[part.group]:
            self._make_way()
            holds &= self._codec.store(tensor, part.blocks, part.chunks)
        return holds

    def _failed(self, job: _Job, failed: Failures, error: Exception) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            logger.error("a copy of KV failed; what it was for is computed again (not logged again)", exc_info=error)
        if job.host is not None:
            failed.chunks.update(job.host.block_ids.tolist())
        if job.direction == _LOAD and job.device is not None:
            failed.blocks.update(job.device.block_ids.tolist())
            failed.load_jobs.add(job.job_id)
