"""Chunks on disk behind those in host memory: a secondary tier of vLLM's `TieringOffloadingManager`.

vLLM's manager copies to it what was stored in host memory, and brings back from it what is found here only; its thread
pool does the reading and writing. vLLM's own tier of files knows no limit, no checksum, no order of use; ours is a
`Folder`. On the step path nothing is done but to look into its index.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector, DropStorePolicy
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.fs.thread_pool import DualQueueThreadPool

from vllm_ext.kv.disk.folder import Folder, FolderCounts

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

TIER_TYPE = "disk"
_READERS, _WRITERS = 2, 2
_ERRAND = -1
"""Number of all jobs that nobody waits for; vLLM counts its own from 0."""
_SCAN_S = 10.0
"""How long a start waits for what earlier servers left to be found. What is found later is a miss until then."""
_LAST_WRITES_S, _POLL_S = 5.0, 0.01
_SWEEPS_PER_TTL, _LEAST_SWEEP_S, _MOST_SWEEP_S = 20, 0.1, 60.0
"""How often it is looked for files whose time is over."""
_PINNED_SHARE = 4
"""At most one of so many chunks in host memory waits for its copy to disk."""

CHUNKS, BYTES = "vllm:kv_offload_disk_chunks", "vllm:kv_offload_disk_bytes"
"""Named as vLLM names its own of this kind: vLLM registers them, and takes only such names back."""
COUNTERS = {
    "damaged": "Chunks of KV on disk that were damaged: set aside, and computed again.",
    "unreadable": "Chunks of KV on disk that could not be read, and were computed again.",
    "unwritten": "Chunks of KV that could not be written to disk, and were not kept there.",
    "evicted": "Chunks of KV that were deleted from disk to make room for others.",
    "expired": "Chunks of KV that were deleted from disk since they were not used for kv_tier.ttl_s.",
}


def counter_name(field: str) -> str:
    """Return the metric of one of `COUNTERS`."""
    return f"vllm:kv_offload_disk_{field}_chunks"


class Backlog(BackpressureDetector):
    """Lets chunks wait for the disk as long as host memory has enough others: what waits can't be evicted.

    Args:
        limit: Chunks that may wait; more only if they come at once, and nothing else waits.
    """

    def __init__(self, limit: int) -> None:
        super().__init__(DropStorePolicy())
        self.limit = limit
        self.waiting = 0

    def should_store(self, num_blocks: int) -> bool:
        """Whether so many more chunks may be copied to disk; counts those that may not."""
        if self.waiting and self.waiting + num_blocks > self.limit:
            self.policy.on_store_skipped(num_blocks)
            return False
        return True

    def is_under_pressure(self) -> bool:
        """Whether as many wait as may."""
        return self.waiting >= self.limit

    def on_store_completed(self, elapsed_s: float, num_bytes: int) -> None:
        """Nothing: how long it took does not matter here."""

    def reset(self) -> None:
        """Nothing waits any more."""
        self.waiting = 0


class DiskTier(SecondaryTierManager):
    """Chunks on disk.

    Args:
        offloading_spec: As vLLM's tiers take it.
        primary_kv_view: Host memory, shape [num_chunks, row_bytes], uint8 or int8.
        folder: On disk.
        payload_bytes: How much of a row is kept; the rest fills it up to whole pages.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, folder: Folder, payload_bytes: int
    ) -> None:
        self._backlog = Backlog(max(1, len(primary_kv_view) // _PINNED_SHARE))
        super().__init__(offloading_spec, primary_kv_view, TIER_TYPE, self._backlog)
        self.folder = folder
        self._payload_bytes = payload_bytes
        self._pool = DualQueueThreadPool(_READERS, _WRITERS, thread_name_prefix="vllm-ext-kv-disk")
        self._jobs: dict[JobId, TransferJob] = {}
        self._failed: dict[JobId, list[OffloadKey]] = {}
        self._done: list[JobResult] = []
        self._scan = threading.Thread(target=folder.scan, name="vllm-ext-kv-disk-scan", daemon=True)
        self._scan.start()
        self._scan.join(_SCAN_S)
        self._closing = threading.Event()
        self._sweeps = threading.Thread(target=self._sweep, name="vllm-ext-kv-disk-sweep", daemon=True)
        if folder.ttl_s:
            self._sweeps.start()

    # --- vLLM's interface, on the step path -------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002 - vLLM's
        """Ask for nothing special."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:  # noqa: ARG002 - vLLM's
        """Say whether a chunk is here."""
        return LookupResult.HIT if key in self.folder.index else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002 - vLLM's
        """Note that a request used chunks, here or above."""
        self.folder.index.touch(list(keys))

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy chunks to disk, those that are not there."""
        tasks = [
            functools.partial(self._write, job_metadata.job_id, key, int(chunk))
            for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
            if key not in self.folder.index
        ]
        self._backlog.waiting += len(job_metadata.keys)
        self._begin(job_metadata, tasks, self._pool.enqueue_store)
        self._errand(self.folder.save_times)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Copy chunks from disk."""
        self.folder.index.pin(job_metadata.keys)
        tasks = [
            functools.partial(self._read, job_metadata.job_id, key, int(chunk))
            for key, chunk in zip(job_metadata.keys, job_metadata.chunk_ids, strict=True)
        ]
        self._begin(job_metadata, tasks, self._pool.enqueue_load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what ended since the last time."""
        results, self._done = self._done, []
        for job_id, ended_well, transfer_time in self._pool.get_finished():
            if job_id == _ERRAND:
                continue
            job = self._jobs.pop(job_id)
            failed = set(self._failed.pop(job_id))
            good = tuple(key for key in job.keys if key not in failed)
            if not job.is_promotion:
                self._backlog.waiting -= len(job.keys)
            results.append(
                JobResult(
                    job_id,
                    success=ended_well and not failed,
                    successful_keys=good if job.is_promotion and failed else None,
                    transfer_time=transfer_time,
                    transfer_bytes=len(good) * self._payload_bytes,
                )
            )
        return results

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Drop chunks: they are not found any more, and their files go soon."""
        known = [key for key in keys if self.folder.index.remove(key)]
        if known:
            self._errand(functools.partial(self.folder.delete, known))

    def start_afresh(self) -> None:
        """Forget everything; nothing may be under way."""
        self._errand(self.folder.start_afresh())

    def drain_jobs(self) -> None:
        """Wait for all that is under way."""
        self._pool.wait_idle()

    def shutdown(self) -> None:
        """Write what waits, for a limited time; then end the threads, and let go of the folder."""
        self.folder.stop_scan()
        self._closing.set()
        deadline = time.monotonic() + _LAST_WRITES_S
        while self._jobs and time.monotonic() < deadline:
            list(self.get_finished_jobs())
            time.sleep(_POLL_S)
        self._pool.shutdown(wait=True)
        self._scan.join()
        if self._sweeps.is_alive():
            self._sweeps.join()
        self.folder.close()

    # --- what the threads do ----------------------------------------------------------------------------------------

    def _write(self, job_id: JobId, key: OffloadKey, chunk: int) -> None:
        if not self.folder.write(key, self._payload(chunk)):
            self._failed[job_id].append(key)

    def _read(self, job_id: JobId, key: OffloadKey, chunk: int) -> None:
        try:
            if not self.folder.read(key, self._payload(chunk)):
                self._failed[job_id].append(key)
        except Exception:  # else its request would ask for it again and again
            self._failed[job_id].append(key)
            self.folder.index.remove(key)
            self.folder.delete([key])
            raise
        finally:
            self.folder.index.unpin(key)

    def _sweep(self) -> None:
        """Delete files whose time is over, also while nobody asks the server anything."""
        every_s = min(max(self.folder.ttl_s / _SWEEPS_PER_TTL, _LEAST_SWEEP_S), _MOST_SWEEP_S)
        while not self._closing.wait(every_s):
            self.folder.expire()

    def _payload(self, chunk: int) -> memoryview:
        """Return a chunk's bytes in host memory, shape [payload_bytes]."""
        pool: memoryview = self._primary_kv_view.cast("B")
        row = len(pool) // len(self._primary_kv_view)
        return pool[chunk * row : chunk * row + self._payload_bytes]

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _begin(self, job: TransferJob, tasks: Sequence[Callable[[], None]], enqueue: Callable[..., None]) -> None:
        self._jobs[job.job_id] = job
        self._failed[job.job_id] = []
        enqueue(job.job_id, max(1, len(tasks)), tasks or [_nothing])

    def _errand(self, task: Callable[[], None]) -> None:
        self._pool.enqueue_store(_ERRAND, 1, [task])

    # --- metrics ----------------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:  # noqa: ARG003 - vLLM's
        """Return what `get_stats` reports."""
        gauges = {CHUNKS: "Chunks of KV on disk.", BYTES: "Bytes of KV on disk, other models' included."}
        return {
            **{name: OffloadingGaugeMetadata(documentation=text) for name, text in gauges.items()},
            **{counter_name(field): OffloadingCounterMetadata(documentation=text) for field, text in COUNTERS.items()},
        }

    def get_stats(self) -> OffloadingConnectorStats:
        """Return what happened since the last time."""
        stats = OffloadingConnectorStats()
        stats.set_gauge(CHUNKS, len(self.folder.index))
        stats.set_gauge(BYTES, self.folder.index.used_bytes)
        counts: FolderCounts = self.folder.take_counts()
        for field, count in counts._asdict().items():
            if count:
                stats.increase_counter(counter_name(field), count)
        return stats


def _nothing() -> None:
    """A job without tasks still ends."""
