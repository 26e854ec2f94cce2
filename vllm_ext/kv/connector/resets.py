"""What a reset of the prefix cache does about KV that vLLM does not reach: that of loads between steps.

vLLM can't reset while somebody holds blocks who does not run: it raises after it has preempted whoever runs, and before
it resets the connector. What was computed with weights that are about to be replaced would be found again, on the
device and on the host.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

_STREAMING = RequestStatus.WAITING_FOR_STREAMING_REQ


class Engine(Protocol):
    """The parts of vLLM's scheduler that know of loads."""

    requests: dict[str, Request]
    kv_holding_waiting: Any
    kv_cache_manager: Any
    failed_recving_kv_req_ids: set[str]
    _inflight_prefills: set[Request]


class Tier(Protocol):
    """The scheduler's side of the connector."""

    discarded: dict[str, frozenset[int]]
    """By request: blocks that were given back while its load was under way, until that is reported."""

    @property
    def blocks_of_step_loads(self) -> frozenset[int]:
        """Blocks that loads within steps fill which were not reported yet."""
        ...

    def wait_for_loads(self, req_ids: Iterable[str]) -> None:
        """Have the next step wait for the loads of some requests before it writes anything."""
        ...


def discard_loads(engine: Engine, tier: Tier) -> None:
    """Give back the blocks that loads between steps fill, or have filled, and let nobody use what they bring.

    A request stays where it waits; if its load is under way until that is reported, which then counts as failed. Then
    it is looked up again.

    Args:
        engine: vLLM's scheduler, between two steps; changed.
        tier: Its KV tier; the next step waits for the loads, since their blocks may be given to others in it.
    """
    waiting = [request for request in engine.kv_holding_waiting if request.status != _STREAMING]
    # Who was aborted meanwhile is kept until the load is through, and sits in no queue.
    holders = [*waiting, *(request for request in engine.requests.values() if request.is_finished())]
    tier.wait_for_loads(request.request_id for request in holders)
    for request in holders:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished():
            tier.discarded[request.request_id] = _blocks_of(engine, request)
        engine.kv_cache_manager.free(request)
        engine._inflight_prefills.discard(request)
    for request in waiting:
        request.num_computed_tokens = 0
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            engine.failed_recving_kv_req_ids.add(request.request_id)


def overlook_discarded(engine: Engine, tier: Tier, report: KVConnectorOutput | None) -> None:
    """Take out of a report what discarded loads failed to fill: the blocks may be others', who computed them.

    Blocks that other loads fill by now stay in it: which of the two failed can't be told.

    Args:
        engine: vLLM's scheduler, before it takes the report.
        tier: Its KV tier.
        report: Of a step's workers; changed.
    """
    if report is None or not tier.discarded:
        return
    filled = tier.blocks_of_step_loads.union(*(_blocks_of(engine, request) for request in engine.kv_holding_waiting))
    if report.invalid_block_ids:
        report.invalid_block_ids = report.invalid_block_ids - (frozenset().union(*tier.discarded.values()) - filled)
    for req_id in [*tier.discarded]:
        if req_id in (report.finished_recving or ()) or req_id not in engine.requests:
            del tier.discarded[req_id]


def _blocks_of(engine: Engine, request: Request) -> frozenset[int]:
    return frozenset(block for group in engine.kv_cache_manager.get_block_ids(request.request_id) for block in group)


def forget_blocks(engine: Engine) -> None:
    """Let nothing be found in the device's blocks, whoever holds some of them."""
    pool = engine.kv_cache_manager.block_pool
    engine.kv_cache_manager.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
