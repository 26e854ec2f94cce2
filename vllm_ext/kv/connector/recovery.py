"""What a scheduler does about KV that was not loaded, or must not be used any more.

A reset of the prefix cache: vLLM can't reset while somebody holds blocks who does not run: it raises after it has
preempted whoever runs, and before it resets the connector. What was computed with weights that are about to be
replaced would be found again, on the device and on the host. So the blocks of loads between steps are given back first.

A load within a step that failed: see `vllm_ext.kv.connector.step_loads`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput

    from vllm_ext.kv.connector.scheduler import TierScheduler

_STREAMING = RequestStatus.WAITING_FOR_STREAMING_REQ


def discard_loads(engine: Scheduler, tier: TierScheduler) -> None:
    """Give back the blocks that loads between steps fill, or have filled, and let nobody use what they bring.

    A request stays where it waits; if its load is under way until that is reported, which then counts as failed. Then
    it is looked up again.

    Args:
        engine: Between two steps; changed.
        tier: Its KV tier; the next step waits for the loads, since their blocks may be given to others in it.
    """
    waiting = [request for request in engine.kv_holding_waiting if request.status != _STREAMING]
    # Who was aborted meanwhile is kept until the load is through, and sits in no queue.
    holders = [*waiting, *(request for request in engine.requests.values() if request.is_finished())]
    tier.jobs.wait_for_loads(request.request_id for request in holders)
    for request in holders:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or request.is_finished():
            tier.discarded[request.request_id] = _blocks_of(engine, request)
        engine.kv_cache_manager.free(request)
        engine._inflight_prefills.discard(request)
    for request in waiting:
        request.num_computed_tokens = 0
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            engine.failed_recving_kv_req_ids.add(request.request_id)


def overlook_discarded(engine: Scheduler, tier: TierScheduler, report: KVConnectorOutput | None) -> None:
    """Take out of a report what discarded loads failed to fill: the blocks may be others', who computed them.

    Blocks that other loads fill by now stay in it: which of the two failed can't be told.

    Args:
        engine: Before it takes the report.
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


def forget_blocks(engine: Scheduler) -> None:
    """Let nothing be found in the device's blocks, whoever holds some of them."""
    pool = engine.kv_cache_manager.block_pool
    engine.kv_cache_manager.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})


def discard_failed_loads(
    engine: Scheduler, tier: TierScheduler, output: ModelRunnerOutput, preempt: Callable[[Request], None]
) -> None:
    """Preempt those who read what a load within the step did not bring, and let nothing of it last.

    Tokens that are under way for them, of this step and those launched since, are dropped when they come. Who waits for
    a load between steps behind such blocks is left to vLLM, which is told of the blocks all the same.

    Args:
        engine: Before it takes the output.
        tier: Its KV tier.
        output: Of the step.
        preempt: Preempts a running request.
    """
    report = output.kv_connector_output
    failed = None if report is None else tier.failed_step_loads(report)
    if failed is None:
        return
    spoilt = set(failed.suspects)
    for request in engine.requests.values():
        held = _blocks_of(engine, request)
        if held.isdisjoint(failed.blocks):
            spoilt -= held  # whoever holds what came of a block holds that block too
    engine.kv_cache_manager.evict_blocks(spoilt)
    read = [request for request in engine.running if not failed.blocks.isdisjoint(_blocks_of(engine, request))]
    for request in reversed(read):
        preempt(request)
        tier.forget_steps(request.request_id)
    for request in engine.requests.values():
        if request.num_stale_output_tokens:  # preempted since, perhaps having read it: its blocks are gone
            request.drop_stale_output = True
            tier.forget_steps(request.request_id)


def _blocks_of(engine: Scheduler, request: Request) -> frozenset[int]:
    return frozenset(block for group in engine.kv_cache_manager.get_block_ids(request.request_id) for block in group)
