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
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec, OffloadingWorker, TransferResult

from vllm_ext.kv.host.affinity import leave_the_engines_core
from vllm_ext.kv.host.copies import Copy, LayerCopies
from vllm_ext.kv.host.report import WorkerReport

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import TransferJob

    from vllm_ext.kv.host.codec import Codec

logger = init_logger("vllm.vllm_ext.kv")

_STEP, _LOAD, _STORE, _END = range(4)
"""Which goes first."""
_JOIN_S = 5.0


class TierWorker(OffloadingWorker):
    """Copies, in the background, one job at a time.

    A job that fails is reported as through, since vLLM's connector knows nothing else; what it left behind is in
    `take_report`, and must reach the scheduler with vLLM's report.

    Args:
        codec: Copies blocks of one tensor.
        tensors_of_group: By group of layers, the tensors that hold their KV.
        chunk_bytes: What a chunk moves over the link, for the statistics.
    """

    def __init__(self, codec: Codec, tensors_of_group: Sequence[Sequence[int]], *, chunk_bytes: int) -> None:
        self._codec = codec
        self._tensors_of_group = tensors_of_group
        self._chunk_bytes = chunk_bytes
        self._queue: queue.PriorityQueue[tuple[int, int, LayerCopies]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._steps: deque[LayerCopies] = deque()
        self._open: set[int] = set()
        self._results: list[TransferResult] = []
        self._report = WorkerReport()
        self._failure_logged = False
        self._thread = threading.Thread(target=self._run, name="vllm-ext-kv-tier", daemon=True)
        self._thread.start()

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec) -> bool:
        """Copy blocks into chunks, behind the loads."""
        return self._submit(_STORE, job_id, src_spec, dst_spec)

    def submit_load(self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy chunks into blocks, before the stores that wait."""
        return self._submit(_LOAD, job_id, dst_spec, src_spec)

    def load_by_layer(self, jobs: Mapping[int, TransferJob]) -> LayerCopies:
        """Copy chunks into blocks, layer by layer over all jobs, before everything else."""
        loads = [self._copy(_LOAD, job_id, job.dst_spec, job.src_spec) for job_id, job in jobs.items()]
        step = LayerCopies(loads, self._tensors_of_group[0])
        self._steps.append(step)
        self._enqueue(_STEP, step)
        return step

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended since the last time."""
        with self._changed:
            results, self._results = self._results, []
        return results

    def take_report(self) -> WorkerReport:
        """Return what is told once; call it after `get_finished`, so that no failure is reported too late."""
        with self._changed:
            report, self._report = self._report, WorkerReport()
        return report

    def wait(self, job_ids: set[int]) -> None:
        """Return when none of these jobs is under way; ids that were never submitted are passed over."""
        with self._changed:
            self._changed.wait_for(lambda: self._open.isdisjoint(job_ids))

    def shutdown(self) -> None:
        """End the thread behind the jobs at hand."""
        self._enqueue(_END, LayerCopies((), ()))
        self._thread.join(_JOIN_S)

    def _submit(self, direction: int, job_id: int, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> bool:
        copy = self._copy(direction, job_id, device, host)
        self._enqueue(direction, LayerCopies([copy], copy.tensors))
        return True

    def _copy(self, direction: int, job_id: int, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec) -> Copy:
        with self._changed:
            self._open.add(job_id)
        return Copy(job_id, device, host, self._tensors_of_group, is_load=direction == _LOAD)

    def _enqueue(self, priority: int, copies: LayerCopies) -> None:
        self._queue.put((priority, next(self._numbers), copies))

    def _run(self) -> None:
        leave_the_engines_core()
        while (job := self._queue.get())[0] != _END:
            self._make_way()
            if job[0] != _STEP:
                job[2].run(self._codec, self._make_way)
                self._end(job[2].copies)

    def _make_way(self) -> None:
        """Make the loads that a step waits for, if there are any."""
        while self._steps:
            step = self._steps.popleft()
            step.run(self._codec)
            self._end(step.copies)

    def _end(self, copies: Sequence[Copy]) -> None:
        errors = [copy.error for copy in copies if copy.error is not None]
        if errors and not self._failure_logged:
            self._failure_logged = True
            logger.error("a copy of KV failed; its tokens are computed again (not logged again)", exc_info=errors[0])
        with self._changed:
            for copy in copies:
                size = len(copy.host.block_ids) * self._chunk_bytes
                self._results.append(TransferResult(copy.job_id, True, transfer_size=size, transfer_time=copy.seconds))
                self._report.add(copy.report())
                self._open.discard(copy.job_id)
            self._changed.notify_all()
