"""What every slot of device and host memory holds while KV moves between them (invariant 6). For tests.

A slot's content is a hash of the whole prefix that produced it. A slot that a copy is writing holds nothing that may be
read, and one that a copy is reading must not be written; each step is checked when it is launched, before anything of
it is known to the copies, which is stricter than the device's own order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec
from vllm.v1.request import Request

from tests.support.audit import AuditError
from vllm_ext.kv.partial_prefix.layout import layouts_of
from vllm_ext.simulation.cost.link import Direction
from vllm_ext.simulation.engine.token_runner import FILLER_TOKEN_ID

_BEING_WRITTEN = b"being written"
_NOTHING = b""
_STALE = b"of other weights"


@dataclass
class _Job:
    direction: Direction
    device_blocks: list[int]
    host_blocks: list[int]
    content: list[bytes]
    """What the source held when the job was submitted."""


class TransferAuditor:
    """Follows the content of blocks through steps and copies.

    Args:
        scheduler: One that a `Tier` works for.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.checked_steps = self.checked_jobs = 0
        self._scheduler = scheduler
        self._block_size = scheduler.cache_config.block_size
        self._blocks_per_chunk: int = scheduler.connector.connector_scheduler.config.blocks_per_chunk
        self._device: dict[int, bytes] = {}
        """By block: hash of the prefix up to the block's last written slot."""
        self._host: dict[int, bytes] = {}
        self._jobs: dict[int, _Job] = {}
        self._hashes: dict[str, _PrefixHashes] = {}

    @property
    def open_jobs(self) -> int:
        """Jobs that are not through."""
        return len(self._jobs)

    def submitted(
        self, job_id: int, direction: Direction, device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec
    ) -> None:
        """Check a job's ends against those of the jobs that are not through, and take its source's content.

        Raises:
            AuditError: it reads what is being written or was never written, or writes what is being read or written.
        """
        self.checked_jobs += 1
        job = _Job(direction, device.block_ids.tolist(), _host_blocks(device, host, self._blocks_per_chunk), [])
        to_host = direction is Direction.TO_HOST
        source, source_ids = (self._device, job.device_blocks) if to_host else (self._host, job.host_blocks)
        target, target_ids = (self._host, job.host_blocks) if to_host else (self._device, job.device_blocks)
        for block in source_ids:
            if source.get(block, _NOTHING) in (_NOTHING, _BEING_WRITTEN):
                raise AuditError(f"job {job_id} ({direction.value}) copies block {block}, which holds nothing yet")
            job.content.append(source[block])
        for block in target_ids:
            if target.get(block) == _BEING_WRITTEN:
                raise AuditError(f"job {job_id} ({direction.value}) writes block {block}, as another job does")
            if (reader := self._reader(block, on_host=to_host)) is not None:
                raise AuditError(f"job {job_id} ({direction.value}) writes block {block}, which job {reader} reads")
            target[block] = _BEING_WRITTEN
        self._jobs[job_id] = job

    def finished(self, job_id: int, lost: Collection[int] = ()) -> None:
        """Let a job's target hold what its source held, and nothing that may be read where the copy failed.

        Args:
            lost: Blocks of the target; on the host those of chunk c are c * blocks_per_chunk and the following.
        """
        job = self._jobs.pop(job_id)
        to_host = job.direction is Direction.TO_HOST
        target, ids = (self._host, job.host_blocks) if to_host else (self._device, job.device_blocks)
        target.update(zip(ids, job.content, strict=True))
        target.update(dict.fromkeys(lost, _NOTHING))

    def weights_changed(self) -> None:
        """Let all KV be that of other weights, which nobody may read any more."""
        for side in (self._device, self._host):
            side.update({block: _STALE for block, held in side.items() if held not in (_NOTHING, _BEING_WRITTEN)})
        for job in self._jobs.values():
            job.content = [_STALE] * len(job.content)

    def launched(self, output: SchedulerOutput) -> None:
        """Check what a step reads, and note what it writes.

        Raises:
            AuditError: it reads a block that does not hold the request's own prefix, or writes one that a copy uses.
        """
        requests = self._scheduler.requests
        for req_id in [known for known in self._hashes if known not in requests]:
            del self._hashes[req_id]
        gaps = layouts_of(output)
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            self.checked_steps += 1
            request = requests[req_id]
            hashes = self._hashes.setdefault(req_id, _PrefixHashes(request))
            first = request.num_computed_tokens - num_tokens
            (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(req_id)
            layout = gaps.get(req_id)
            written = 0
            for start, behind in [(first, first + num_tokens)] if layout is None else layout.spans(first, num_tokens):
                self._read(req_id, blocks, hashes, written, start)
                self._write(req_id, blocks, hashes, start, behind)
                written = behind

    def _read(self, req_id: str, blocks: Sequence[int], hashes: _PrefixHashes, start: int, behind: int) -> None:
        for number, end in self._ends(start, behind):
            held = self._device.get(blocks[number])
            # What holds more than is read of it: a block that was found whole, if its last token is computed again, or
            # one that was written by a step whose tokens were not known yet.
            if held not in map(hashes.up_to, range(end, (number + 1) * self._block_size + 1)):
                raise AuditError(f"{req_id} reads block {blocks[number]} (its number {number}): another prefix")

    def _write(self, req_id: str, blocks: Sequence[int], hashes: _PrefixHashes, start: int, behind: int) -> None:
        for number, end in self._ends(start, behind):
            if self._device.get(blocks[number]) == hashes.up_to(end):
                continue  # with what it holds
            if (reader := self._reader(blocks[number], on_host=False)) is not None:
                raise AuditError(f"{req_id} writes block {blocks[number]}, which job {reader} reads")
            self._device[blocks[number]] = hashes.up_to(end)

    def _ends(self, start: int, behind: int) -> Iterator[tuple[int, int]]:
        """(number of a block, end of what is meant of it) for the blocks of the positions from ``start`` on."""
        size = self._block_size
        return ((number, min(behind, (number + 1) * size)) for number in range(start // size, -(-behind // size)))

    def _reader(self, block: int, *, on_host: bool) -> int | None:
        for job_id, job in self._jobs.items():
            reads_host = job.direction is Direction.TO_DEVICE
            if reads_host == on_host and block in (job.host_blocks if on_host else job.device_blocks):
                return job_id
        return None


class _PrefixHashes:
    """Hashes of a request's prefixes and its salt. Its tokens beyond the prompt are all filler: see `TokenRunner`."""

    def __init__(self, request: Request) -> None:
        self._salt = (request.cache_salt or "").encode()
        self._prompt = np.asarray(request.prompt_token_ids, dtype=np.int64)
        self._known: dict[int, bytes] = {}

    def up_to(self, end: int) -> bytes:
        if (known := self._known.get(end)) is None:
            filler = np.full(max(0, end - len(self._prompt)), FILLER_TOKEN_ID, dtype=np.int64)
            known = hashlib.sha256(self._salt + np.concatenate([self._prompt[:end], filler]).tobytes()).digest()
            self._known[end] = known
        return known


def _host_blocks(device: GPULoadStoreSpec, host: BlockIDsLoadStoreSpec, blocks_per_chunk: int) -> list[int]:
    """Places on the host, in blocks: a job's first chunk may be used from its middle on, its last up to there."""
    places = host.block_ids.astype(np.int64)[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)
    skipped = device.block_indices[0] % blocks_per_chunk
    found: list[int] = places.ravel()[skipped : skipped + len(device.block_ids)].tolist()
    return found
