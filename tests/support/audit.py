"""Checks of a scheduler's books between two steps: queues and KV blocks. Reads everything, changes nothing.

Cost is proportional to requests and blocks, so this belongs in tests and simulations, never on the step path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

_HOLDS_NOTHING = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class AuditError(AssertionError):
    """The scheduler's books do not add up; the message says which entry and by how much."""


def audit(scheduler: Scheduler) -> None:
    """Check queues and blocks; see ``audit_queues`` and ``audit_blocks``."""
    audit_queues(scheduler)
    audit_blocks(scheduler)


def audit_queues(scheduler: Scheduler) -> None:
    """Every request sits in exactly one queue, with a status that fits it, until it has ended.

    Raises:
        AuditError: A request is missing, doubled, a stranger, or in the wrong queue; or too many are running.
    """
    queues = {
        "running": list(scheduler.running),
        "waiting": list(scheduler.waiting),
        "kv_holding_waiting": list(scheduler.kv_holding_waiting),
    }
    for name in ("waiting", "kv_holding_waiting"):
        if (length := len(getattr(scheduler, name))) != len(queues[name]):
            raise AuditError(f"{name}: len() is {length}, iteration gives {len(queues[name])}")
    places = Counter(request.request_id for queue in queues.values() for request in queue)
    if doubled := sorted(req_id for req_id, count in places.items() if count > 1):
        raise AuditError(f"in more than one place: {doubled}")
    if lost := sorted(req_id for req_id in scheduler.requests.keys() - places.keys() if not _leaves(scheduler, req_id)):
        raise AuditError(f"in no queue: {lost}")
    if strangers := sorted(places.keys() - scheduler.requests.keys()):
        raise AuditError(f"queued but unknown: {strangers}")
    for name, queue in queues.items():
        for request in queue:
            _audit_status(name, request)
    if len(queues["running"]) > scheduler.max_num_running_reqs:
        raise AuditError(f"{len(queues['running'])} running, at most {scheduler.max_num_running_reqs} allowed")


def audit_blocks(scheduler: Scheduler) -> None:
    """Free plus held blocks is the pool, and reference counts equal the holders.

    Raises:
        AuditError: A block is lost, held while free, counted wrongly, held by a request that is not running,
            or shared without being a cached prefix at the same place of both requests.
    """
    pool = scheduler.kv_cache_manager.block_pool
    free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    if len(free) != pool.get_num_free_blocks():
        raise AuditError(f"{len(free)} blocks in the free queue, counted as {pool.get_num_free_blocks()}")
    if records := sorted(block_id for block_id in free if block_id >= pool.num_gpu_blocks):
        raise AuditError(f"records among the blocks that new tokens get: {records}")
    holders: Counter[int] = Counter(_partials(scheduler))
    free |= _free_records(scheduler)
    first_place: dict[int, tuple[int, str]] = {}
    for req_id, place, block_id in _held(scheduler):
        holders[block_id] += 1
        other = first_place.setdefault(block_id, (place, req_id))
        if holders[block_id] > 1 and (pool.blocks[block_id].block_hash is None or other[0] != place):
            raise AuditError(f"block {block_id} is in {other[1]} and {req_id}, but is no shared cached prefix")
    for _, blocks in scheduler.deferred_frees:
        holders.update(block.block_id for block in blocks)
    for block in pool.blocks:
        if block.is_null:
            continue
        if block.ref_cnt != holders[block.block_id]:
            raise AuditError(f"block {block.block_id}: ref_cnt {block.ref_cnt}, {holders[block.block_id]} holders")
        if (block.ref_cnt == 0) != (block.block_id in free):
            raise AuditError(
                f"block {block.block_id}: ref_cnt {block.ref_cnt}, in free queue: {block.block_id in free}"
            )
    if len(free) + len(holders) != len(pool.blocks) - 1:  # the null block is neither
        raise AuditError(f"{len(free)} free + {len(holders)} held of {len(pool.blocks) - 1}")


def _free_records(scheduler: Scheduler) -> set[int]:
    """Records of 8 bits that nobody holds; none where there are no records."""
    records = getattr(scheduler, "records", None)
    if records is None:
        return set()
    return {record.block_id for record in records.lanes.records.get_all_free_blocks()}


def _partials(scheduler: Scheduler) -> list[int]:
    """Records that are held for requests that wait."""
    records = getattr(scheduler, "records", None)
    if records is None:
        return []
    waiting = {r.request_id for r in scheduler.waiting}
    if strangers := sorted(records._partials.keys() - waiting):
        raise AuditError(f"records are held for requests that don't wait: {strangers}")
    return [partial.record.block_id for partial in records._partials.values()]


def audit_drained(scheduler: Scheduler) -> None:
    """Nothing is left: no request, and every block is free.

    Raises:
        AuditError: Something is left.
    """
    audit(scheduler)
    if scheduler.requests:
        raise AuditError(f"requests left: {sorted(scheduler.requests)}")
    pool = scheduler.kv_cache_manager.block_pool
    if pool.get_num_free_blocks() != pool.num_gpu_blocks - 1:
        raise AuditError(f"{pool.get_num_free_blocks()} of {pool.num_gpu_blocks - 1} blocks are free with no request")


def _leaves(scheduler: Scheduler, req_id: str) -> bool:
    """Whether a request has ended and is kept only because a connector still writes into its blocks."""
    return scheduler.connector is not None and scheduler.requests[req_id].is_finished()


def _audit_status(queue: str, request: Request) -> None:
    running = request.status == RequestStatus.RUNNING
    if request.is_finished() or running != (queue == "running"):
        raise AuditError(f"{request.request_id} is {request.status.name} in {queue}")


def _held(scheduler: Scheduler) -> Iterator[tuple[str, int, int]]:
    """(request id, place in its block table, block id) for each block that a request holds."""
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        for req_id, blocks in manager.req_to_blocks.items():
            request = scheduler.requests.get(req_id)
            if blocks and request is None:
                raise AuditError(f"{req_id} holds {len(blocks)} blocks after it ended")
            # A request that waits holds blocks only while a transfer fills them; then it has computed tokens.
            if blocks and request is not None and request.status in _HOLDS_NOTHING and not request.num_computed_tokens:
                raise AuditError(f"{req_id} is {request.status.name} and holds {len(blocks)} blocks")
            for place, block in enumerate(blocks):
                if not block.is_null:
                    yield req_id, place, block.block_id
