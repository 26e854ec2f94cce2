"""Gaps that are computed one after the other, each in steps of its own: the way for workers that know nothing of gaps.

A worker takes a request's number of computed tokens for the position at which its next ones stand. Here that holds:
the scheduler counts virtually, as with gaps that are computed in one step (`kv.gaps.layout`); but no step goes beyond
a kept range, and what is sent says where the step's tokens really stand. So workers see pieces of a prompt, of which
one may begin behind where the last one ended. A gap costs the request a step more, and needs no patch of a worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

if TYPE_CHECKING:
    from vllm_ext.kv.gaps.manager import Placement


def send_positions(
    output: SchedulerOutput,
    placements: Mapping[str, Placement],
    resend: Callable[[str], NewRequestData] | None,
) -> None:
    """Let a step say where the tokens of requests with gaps stand, instead of how many are kept or computed.

    Args:
        output: The step, no piece of which goes beyond a kept range; changed.
        placements: By request; those that are beyond their gaps are left alone.
        resend: Returns a request as if it were new, for a runner that counts by itself (vLLM's V2) and believes another
            start only of a request that is sent anew; None: the runner believes each step.
    """
    for new in output.scheduled_new_reqs:
        if (placement := placements.get(new.req_id)) is not None:
            new.num_computed_tokens = _advance(placement, new.num_computed_tokens, output, new.req_id)[0]
    cached = output.scheduled_cached_reqs
    moved: list[int] = []
    for index, req_id in enumerate(cached.req_ids):
        placement = placements.get(req_id)
        if placement is not None and not placement.is_passed:
            start, jumps = _advance(placement, cached.num_computed_tokens[index], output, req_id)
            cached.num_computed_tokens[index] = start
            if jumps and resend is not None and req_id not in cached.resumed_req_ids:
                moved.append(index)
    if moved and resend is not None:
        for index in moved:
            new = resend(cached.req_ids[index])
            new.num_computed_tokens = cached.num_computed_tokens[index]
            output.scheduled_new_reqs.append(new)
        output.scheduled_cached_reqs = _without(cached, moved)


def _advance(placement: Placement, first: int, output: SchedulerOutput, req_id: str) -> tuple[int, bool]:
    """Return the position of a request's first token in a step, and whether the last step ended elsewhere."""
    layout = placement.layout
    start = layout.position(first) if first < layout.end else first
    jumps = placement.sent_up_to not in (None, start)
    placement.sent_up_to = start + output.num_scheduled_tokens[req_id]
    return start, jumps


def _without(cached: CachedRequestData, moved: list[int]) -> CachedRequestData:
    kept = [index for index in range(len(cached.req_ids)) if index not in moved]

    def those(values: list) -> list:  # type: ignore[type-arg] # of whatever kind; empty where there is no use for it
        return [values[index] for index in kept] if values else values

    gone = {cached.req_ids[index] for index in moved}
    return dataclasses.replace(
        cached,
        req_ids=those(cached.req_ids),
        new_token_ids=those(cached.new_token_ids),
        all_token_ids={req_id: ids for req_id, ids in cached.all_token_ids.items() if req_id not in gone},
        new_block_ids=those(cached.new_block_ids),
        num_computed_tokens=those(cached.num_computed_tokens),
        num_output_tokens=those(cached.num_output_tokens),
    )
