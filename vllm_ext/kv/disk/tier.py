"""Chunks on disk behind those in host memory: vLLM's `FileSystemTierManager`, with what that lacks.

vLLM's names the folder, and reads and writes files, in threads of its own. Ours are the limit and the time to live
(`DiskFiles`), a key set in memory (vLLM's looks on disk for each key, while its request waits for a step), checksums,
and a task for each chunk, so that one that fails leaves the others of its job alone.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector, DropStorePolicy
from vllm.v1.kv_offload.tiering.base import JobId, JobResult, TransferJob
from vllm.v1.kv_offload.tiering.fs.io import batch_load_block, batch_store_block
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from vllm_ext.config.errors import ConfigError
from vllm_ext.kv.disk.files import DiskFiles

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

logger = logging.getLogger("vllm.vllm_ext.kv")

TIER_TYPE = "disk"
_READERS, _WRITERS = 2, 2
_SCAN_S = 10.0
"""How long a start waits for what earlier servers left to be found. What is found later is a miss until then."""
_LAST_WRITES_S, _POLL_S = 5.0, 0.01
_SWEEPS_PER_TTL, _LEAST_SWEEP_S, _MOST_SWEEP_S = 20, 0.1, 60.0
"""How often times of use are saved, and files deleted whose time is over."""
_CHECKSUM_BYTES = 16
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


class DamagedChunk(Exception):
    """A file is not the chunk that it should be."""


class DiskTier(FileSystemTierManager):
    """Chunks on disk.

    Args:
        offloading_spec: As vLLM's tiers take it.
        primary_kv_view: Host memory, shape [num_chunks, row_bytes], uint8 or int8; with `O_DIRECT` rows of whole pages.
        files: Below the tier's root.
        facts: All that a chunk's bytes depend on, beside what vLLM's `FileMapper` knows; they go into its ``fields``.

    Raises:
        ConfigError: the root can't be used.
    """

    def __init__(
        self, offloading_spec: OffloadingSpec, primary_kv_view: memoryview, files: DiskFiles, facts: dict[str, Any]
    ) -> None:
        self._backlog = Backlog(max(1, len(primary_kv_view) // _PINNED_SHARE))
        self.files = files
        try:
            super().__init__(
                offloading_spec, primary_kv_view, TIER_TYPE, files.root, _READERS, _WRITERS,
                backpressure_detector=self._backlog,
            )  # fmt: skip
            self._name_folder(facts)
        except OSError as error:
            raise ConfigError("kv_tier.disk_dir", files.root, f"can't be used: {error}") from error
        self._jobs: dict[JobId, TransferJob] = {}
        self._copied: dict[JobId, set[OffloadKey]] = {}
        self._logged: set[str] = set()
        self._told: Counter[str] = Counter()
        self._scanned, self._wake, self._closing = threading.Event(), threading.Event(), threading.Event()
        self._sweeper = threading.Thread(target=self._sweep, name="vllm-ext-kv-disk-sweep", daemon=True)
        self._sweeper.start()
        self._scanned.wait(_SCAN_S)

    def _name_folder(self, facts: dict[str, Any]) -> None:
        """Let the folder's name depend on our facts, too, and its ``config.json`` list them."""
        mapper = self.file_mapper
        shutil.rmtree(mapper.base_path)  # vLLM's, which knows no facts
        mapper.fields["vllm_ext"] = facts
        mapper.base_path = mapper._compute_base_path(self.files.root, mapper.fields)
        os.makedirs(mapper.base_path, exist_ok=True)
        text = json.dumps(mapper.get_run_config(), indent=2, sort_keys=True)
        Path(mapper.get_config_file_path()).write_text(text, encoding="utf-8")

    # --- vLLM's interface, on the step path -------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:  # noqa: ARG002 - vLLM's
        """Say whether a chunk is here."""
        return LookupResult.HIT if self.name(key) in self.files else LookupResult.MISS

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002 - vLLM's
        """Note that a request used chunks, here or above."""
        self.files.touch([self.name(key) for key in keys])

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Copy chunks to disk, those that are not there."""
        self._backlog.waiting += len(job_metadata.keys)
        self._begin(job_metadata, self._pool.enqueue_store, self._write)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Copy chunks from disk."""
        self.files.reading.update(self.name(key) for key in job_metadata.keys)
        self._begin(job_metadata, self._pool.enqueue_load, self._read)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return what ended since the last time."""
        return [self._judged(result) for result in super().get_finished_jobs()]

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Drop chunks: they are not found any more, and their files go soon."""
        self.files.forget(self.name(key) for key in keys)
        self._wake.set()

    def start_afresh(self) -> None:
        """Forget everything, and let what is kept from now on be found by this process only; nothing may be under way.

        vLLM resets its caches when the weights of a model were replaced in memory. KV of such weights must not be found
        by a server that starts with those on disk.
        """
        self.file_mapper.base_path = self.files.start_afresh(self.file_mapper.base_path)
        self._wake.set()

    def shutdown(self) -> None:
        """Write what waits, for a limited time; then end the threads, and let go of the root."""
        self._closing.set()
        self._wake.set()
        deadline = time.monotonic() + _LAST_WRITES_S
        while self._jobs and time.monotonic() < deadline:
            self.get_finished_jobs()
            time.sleep(_POLL_S)
        super().shutdown()
        self._sweeper.join()
        self.files.close()

    def name(self, key: OffloadKey) -> str:
        """Return a chunk's path, without its checksum.

        `FileMapper` would make two folders for almost every chunk: small chunks are then written and found again at
        start several times more slowly, and each look-up takes longer.
        """
        digits = key.hex()
        return f"{self.file_mapper.base_path}_r{self.file_mapper.rank}/{digits[:2]}/{digits}.bin"

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _begin(self, job: TransferJob, enqueue: Callable[..., None], copy: Callable[[OffloadKey, int], bool]) -> None:
        self._jobs[job.job_id] = job
        self._copied[job.job_id] = set()
        self._job_block_counts[job.job_id] = len(job.keys)
        pairs = zip(job.keys, job.chunk_ids.tolist(), strict=True)
        tasks = [functools.partial(self._copy, job.job_id, copy, key, chunk) for key, chunk in pairs]
        enqueue(job.job_id, len(tasks), tasks)

    def _judged(self, result: JobResult) -> JobResult:
        """Return a job's result with the chunks that failed, and let go of what it used."""
        job, copied = self._jobs.pop(result.job_id), self._copied.pop(result.job_id)
        if job.is_promotion:
            self.files.reading.difference_update(self.name(key) for key in job.keys)
        else:
            self._backlog.waiting -= len(job.keys)
        if len(copied) == len(job.keys):
            return result
        kept = copied if job.is_promotion and copied else None
        num_bytes = len(copied) * self._block_size
        return dataclasses.replace(result, success=False, successful_keys=kept, transfer_bytes=num_bytes)

    # --- what the threads do ----------------------------------------------------------------------------------------

    def _copy(self, job_id: JobId, copy: Callable[[OffloadKey, int], bool], key: OffloadKey, chunk: int) -> None:
        if copy(key, chunk):
            self._copied[job_id].add(key)

    def _write(self, key: OffloadKey, chunk: int) -> bool:
        """Keep a chunk, if there is room; returns false if the system refused."""
        name, written = self.name(key), ""
        if not self.files.begin_write(name, self._block_size):
            return True
        try:
            self.files.make_root()
            checksum = self._checksum(key, chunk)
            self._transfer(batch_store_block, f"{name}.{checksum}", chunk)
            written = checksum
        except OSError as error:
            self._report("unwritten", "a chunk of KV can't be written to disk and is not kept", error)
        finally:
            self.files.end_write(name, self._block_size, written)
        return bool(written)

    def _read(self, key: OffloadKey, chunk: int) -> bool:
        """Fill a row; returns false if there is no such chunk that is whole, and then it is never found again."""
        name, whole = self.name(key), False
        if (path := self.files.path(name)) is None:  # deleted since it was asked for
            return False
        try:
            if (size := os.stat(path).st_size) != self._block_size:
                raise DamagedChunk(f"it has {size} bytes, and {self._block_size} are expected")
            self._transfer(batch_load_block, path, chunk)
            if not path.endswith(self._checksum(key, chunk)):
                raise DamagedChunk("its checksum is wrong")
            whole = True
        except DamagedChunk as error:
            self.files.set_aside(name)
            self._report("damaged", f"a chunk of KV on disk is damaged and set aside ({path})", error)
        except OSError as error:
            if self.files.remove(name):
                self._report("unreadable", "a chunk of KV on disk can't be read and is forgotten", error)
        finally:
            if not whole:  # else its request would ask for it again and again
                self.files.remove(name)
        return whole

    def _transfer(self, batch: Callable[..., None], path: str, chunk: int) -> None:
        batch([path], self._primary_kv_view, [chunk * self._block_size], self._block_size, self._use_o_direct)

    def _checksum(self, key: OffloadKey, chunk: int) -> str:
        """Return the checksum of a chunk in host memory, and of its key."""
        start = chunk * self._block_size
        row = self._primary_kv_view.cast("B")[start : start + self._block_size]
        return str(blake3(key).update(row).hexdigest(length=_CHECKSUM_BYTES))

    def _sweep(self) -> None:
        """Find what is there; then delete what is to go, also while nobody asks the server anything."""
        self.files.scan(self._closing)
        self._scanned.set()
        ttl_s = self.files.ttl_s or math.inf
        every_s = min(max(ttl_s / _SWEEPS_PER_TTL, _LEAST_SWEEP_S), _MOST_SWEEP_S)
        while not self._closing.is_set():
            self._wake.wait(every_s)
            self._wake.clear()
            self.files.sweep()

    def _report(self, field: str, what: str, error: Exception) -> None:
        """Count, and log the first of a kind."""
        self.files.count(field)
        if field not in self._logged:
            self._logged.add(field)
            logger.warning("%s: %s; its tokens are computed again (not logged again)", what, error)

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
        stats.set_gauge(CHUNKS, len(self.files))
        stats.set_gauge(BYTES, self.files.used_bytes)
        new = Counter(self.files.counts) - self._told
        self._told += new
        for field, count in new.items():
            stats.increase_counter(counter_name(field), count)
        return stats
