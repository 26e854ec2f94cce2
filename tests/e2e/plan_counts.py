"""How far vLLM follows the plans of a run: for engines whose core lives in this process."""

from __future__ import annotations

from collections import Counter
from typing import Any


def count(scheduler: Any) -> dict[str, int]:
    """Watch a scheduler; returns what is counted, which goes on being counted.

    ``steps`` of vLLM, ``idle``: those that computed nothing, and ``cut``: requests that got fewer tokens in a step, or
    none, as an image could not be encoded. Of a scheduler of ours besides, each per step: ``named``: requests that its
    plan let in; ``refused``: those of them that vLLM left waiting; ``unencoded``: those of these that were cut;
    ``longest``: the most steps in a row in which one request was named and refused; ``in_vain``: preemptions by plans
    of which somebody was refused.
    """
    counts = dict.fromkeys(("steps", "idle", "cut", "named", "refused", "unencoded", "longest", "in_vain"), 0)
    plans: list[Any] = []
    cut: set[str] = set()
    in_a_row: Counter[str] = Counter()
    encode = scheduler._try_schedule_encoder_inputs

    def encoding(request: Any, computed: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        result = encode(request, computed, num_tokens, *args, **kwargs)
        if result[1] < num_tokens:
            cut.add(request.request_id)
        return result

    scheduler._try_schedule_encoder_inputs = encoding
    schedule = scheduler.schedule
    if hasattr(scheduler, "_plan"):
        planned = scheduler._plan

        def planning(now: float) -> Any:
            plans.append(planned(now))
            return plans[-1]

        scheduler._plan = planning

    def scheduling(*args: Any) -> Any:
        plans.clear()
        cut.clear()
        output = schedule(*args)
        counts["steps"] += 1
        counts["idle"] += not output.total_num_scheduled_tokens
        counts["cut"] += len(cut)
        for plan in plans:
            _compare(plan, scheduler, counts, cut, in_a_row)
        return output

    scheduler.schedule = scheduling
    return counts


def _compare(plan: Any, scheduler: Any, counts: dict[str, int], cut: set[str], in_a_row: Counter[str]) -> None:
    named = [req_id for req_id in plan.admit or () if req_id in scheduler.requests]
    refused = [req_id for req_id in named if scheduler.requests[req_id] in scheduler.waiting]
    for req_id in set(in_a_row) - set(refused):
        del in_a_row[req_id]
    in_a_row.update(refused)
    counts["named"] += len(named)
    counts["refused"] += len(refused)
    counts["unencoded"] += len(cut.intersection(refused))
    counts["longest"] = max(counts["longest"], *in_a_row.values(), 0)
    counts["in_vain"] += len(plan.preempt) if refused else 0
