"""What becomes of a step that computed with KV which was not loaded: see `vllm_ext.kv.connector.step_loads`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    from vllm_ext.kv.connector.scheduler import TierScheduler


def discard_failed_loads(
    engine: Scheduler, tier: TierScheduler, output: ModelRunnerOutput, preempt: Callable[[Request], None]
) -> None:
    """Preempt those who read what a load within the step did not bring, and let nothing of it last.

    Tokens that are under way for them, of this step and those launched since, are dropped when they come. Who waits for
    a load between steps behind such blocks is left to vLLM, which is told of the blocks all the same.

    Args:
        engine: vLLM's scheduler, before it takes the output.
        tier: Its KV tier.
        output: Of the step.
        preempt: Preempts a running request.
    """
    report = output.kv_connector_output
    failed = None if report is None else tier.failed_step_loads(report)
    if failed is None:
        return
    cache = engine.kv_cache_manager
    spoilt = set(failed.suspects)
    for req_id in engine.requests:
        held = {block for group in cache.get_block_ids(req_id) for block in group}
        if held.isdisjoint(failed.blocks):
            spoilt -= held  # whoever holds what came of a block holds that block too
    cache.evict_blocks(spoilt)

    def reads(request: Request) -> bool:
        return any(not failed.blocks.isdisjoint(group) for group in cache.get_block_ids(request.request_id))

    for request in reversed([request for request in engine.running if reads(request)]):
        preempt(request)
        tier.forget_steps(request.request_id)
    for request in engine.requests.values():
        if request.num_stale_output_tokens:  # preempted since, perhaps having read it: its blocks are gone
            request.drop_stale_output = True
            tier.forget_steps(request.request_id)
