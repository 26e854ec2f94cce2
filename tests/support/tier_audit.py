"""What every slot of device and host memory holds while KV moves between them (invariant 6), and the tier's books.

A slot's content is a hash of the whole prefix that produced it. A slot that a copy is writing holds nothing that may be
read, and one that a copy is reading must not be written; each step is checked when it is launched, before anything of
it is known to the copies, which is stricter than the device's own order.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec, GPULoadStoreSpec
from vllm.v1.request import Request

from tests.support.audit import AuditError, audit_drained
from vllm_ext.kv.conversations.conversation import ConversationBook
from vllm_ext.kv.eviction.retention import RetentionCachePolicy
from vllm_ext.kv.partial_prefix.layout import layouts_of
from vllm_ext.simulation.cost.link import Direction
from vllm_ext.simulation.engine.token_runner import FILLER_TOKEN_ID

_BEING_WRITTEN = b"being written"
_NOTHING = b""
_STALE = b"of other weights"
_GARBAGE = b"computed from what was not loaded"


@dataclass
class _Job:
    direction: Direction
    device_blocks: list[int]
    host_blocks: list[int]
    content: list[bytes]
    """What the source held when the job was submitted."""


class TransferAuditor:
    """Follows the content of blocks through steps and copies.

    A step whose own loads failed reads what is not there before the scheduler can know of it. What that step and those
    launched meanwhile write is garbage, which may be copied; nobody may read it once the scheduler has been told.

    Args:
        scheduler: One that a `Tier` works for.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.checked_steps = self.checked_jobs = self.spoilt_requests = 0
        self.failed_outputs: list[SchedulerOutput] = []
        """Steps whose own loads failed, until the scheduler has taken their output."""
        self._load_failed = False
        """Whether a load of the step that is being launched did."""
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

    def finished(self, job_id: int, lost: Collection[int] = (), *, in_step: bool = False) -> None:
        """Let a job's target hold what its source held, and nothing that may be read where the copy failed.

        Args:
            lost: Blocks of the target; on the host those of chunk c are c * blocks_per_chunk and the following.
            in_step: Whether it is a load of the step that is being launched.
        """
        job = self._jobs.pop(job_id)
        to_host = job.direction is Direction.TO_HOST
        target, ids = (self._host, job.host_blocks) if to_host else (self._device, job.device_blocks)
        target.update(zip(ids, job.content, strict=True))
        target.update(dict.fromkeys(lost, _GARBAGE if in_step else _NOTHING))
        self._load_failed |= in_step and bool(lost)

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
        if self._load_failed:
            self.failed_outputs.append(output)
            self._load_failed = False
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
            if self.failed_outputs and any(self._device.get(blocks[n]) == _GARBAGE for n, _ in self._ends(0, first)):
                self.spoilt_requests += 1
                self._device.update((blocks[n], _GARBAGE) for n, _ in self._ends(first, first + num_tokens))
                continue
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


def audit_tier(scheduler: Scheduler) -> None:
    """Every chunk is free or resident, and used by as many open copies as its reference count says.

    Raises:
        AuditError: the books do not add up.
    """
    side: Any = scheduler.connector.connector_scheduler
    manager = side.manager
    chunks = resident(manager._policy)
    places = [chunk.chunk_id for chunk in chunks.values()]
    if len(set(places)) != len(places) or not set(places).isdisjoint(manager._free_list):
        raise AuditError(f"chunks {sorted(places)} with free {sorted(manager._free_list)}: a place is taken twice")
    if len(places) + manager._get_num_free_chunks() != manager._num_chunks:
        free = manager._get_num_free_chunks()
        raise AuditError(f"{len(places)} chunks resident + {free} free of {manager._num_chunks}")
    idle = sum(chunk.ref_cnt == 0 for chunk in chunks.values())
    if idle != manager._num_evictable_cache_chunks:
        raise AuditError(f"{idle} chunks in nobody's use, counted as {manager._num_evictable_cache_chunks}")
    _audit_references(side, chunks)


def audit_owners(policy: RetentionCachePolicy, book: ConversationBook) -> None:
    """Conversations and chunks agree on who owns what, and all that is counted as it changes is counted right.

    Raises:
        AuditError: they do not.
    """
    nodes, quotas, conversations = policy._nodes, policy.quotas, list(book.after(0))
    owned = {(key, c.number) for key, node in nodes.items() for c in node.owners}
    if owned != {(key, c.number) for c in conversations for key in c.keys}:
        raise AuditError("chunks and conversations do not agree on who owns what")
    per_salt = Counter(owner.salt_tag for node in nodes.values() for owner in node.owners[-1:])
    running = sum(c.running > 0 for c in conversations)
    kept = sum(not c.running and bool(c.keys) for c in conversations)
    counted = {
        "by salt": ({tag: salt.chunks for tag, salt in quotas.salts.items()}, per_salt),
        "of new salts": (quotas.of_new, sum(salt.chunks for salt in quotas.salts.values() if salt.is_new)),
        "conversations": ((book.counts.running, book.counts.kept), (running, kept)),
    }
    for name, (found, expected) in counted.items():
        if found != expected:
            raise AuditError(f"{name}: counted as {found}, is {expected}")


def audit_reservations(scheduler: Scheduler) -> None:
    """vLLM keeps blocks free for prefills under way; one that holds none must not be among them.

    Raises:
        AuditError: a request without blocks keeps others from loading.
    """
    for request in getattr(scheduler, "_inflight_prefills", ()):
        (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
        if not blocks:
            raise AuditError(f"blocks are kept free for {request.request_id}, which holds none")


def audit_quiet(scheduler: Scheduler) -> None:
    """Nothing is left when all requests are gone: no job, no fence, no chunk in use. Empties the tier.

    Raises:
        AuditError: something is left.
    """
    audit_drained(scheduler)
    audit_tier(scheduler)
    side: Any = scheduler.connector.connector_scheduler
    left = {
        "jobs": side._jobs,
        "requests": side._req_status,
        "fences": side._block_id_to_pending_jobs,
        "chunks being loaded": side._chunks_being_loaded,
        "flushes": side._current_batch_jobs_to_flush,
    }
    if found := {name: held for name, held in left.items() if held}:
        raise AuditError(f"left when all is over: {found}")
    chunks = resident(side.manager._policy)
    if pinned := [chunk for chunk in chunks.values() if chunk.ref_cnt != 0]:
        raise AuditError(f"pinned when all is over: {pinned}")
    if isinstance(side.manager._policy, RetentionCachePolicy):
        audit_owners(side.manager._policy, side.keeper.book)
    if side.manager._policy.evict(len(chunks), set()) is None:
        raise AuditError(f"of {len(chunks)} chunks in nobody's use some can never be evicted")
    side.manager.reset_cache()


def resident(policy: Any) -> dict[Any, Any]:
    """Return the chunks that a cache policy holds."""
    if isinstance(policy, RetentionCachePolicy):
        return {key: node.chunk for key, node in policy._nodes.items()}
    if hasattr(policy, "chunks"):  # LRU
        return dict(policy.chunks)
    return {**policy.t1, **policy.t2}  # ARC


def _audit_references(side: Any, chunks: dict[Any, Any]) -> None:
    loads: Counter[Any] = Counter()
    stores: Counter[Any] = Counter()
    for job in side._jobs.values():
        (stores if job.is_store else loads).update(job.keys)
    if missing := [key for key in (loads + stores) if key not in chunks]:
        raise AuditError(f"{len(missing)} chunks went while a copy used them")
    for key, chunk in chunks.items():
        expected = -1 if stores[key] else loads[key]
        if chunk.ref_cnt != expected or stores[key] > 1 or (stores[key] and loads[key]):
            raise AuditError(
                f"chunk {chunk.chunk_id}: reference count {chunk.ref_cnt}, {loads[key]} loads and {stores[key]} stores"
            )
