"""Checks of the tier's books between two steps. Reads everything, changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from tests.support.audit import AuditError, audit_drained
from vllm_ext.kv.conversations.conversation import ConversationBook
from vllm_ext.kv.eviction.retention import RetentionCachePolicy


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
