"""The state of a scheduler as the front end fetches it for metrics."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.request import Request

    from vllm_ext.scheduling.engine_state import EngineState
    from vllm_ext.scheduling.tracked_requests import TrackedRequests
    from vllm_ext.scheduling.waiting_table import WaitingTable


def queue_state(
    engine: EngineState, queue: WaitingTable | None, tracked: TrackedRequests, now: float, why: Mapping[str, str]
) -> dict[str, Any]:
    """Return who runs and waits, fit for JSON.

    Args:
        engine: vLLM's scheduler.
        queue: Its waiting queue, if we order it.
        tracked: Knows since when requests wait.
        now: Clock time, s.
        why: What those who were looked at in the last step lacked, by request id.
    """
    levels = {0: len(engine.waiting)} if queue is None else queue.levels
    oldest = next(iter(engine.waiting), None) if queue is None else queue.oldest()
    return {
        "running": len(engine.running),
        "waiting_by_level": {str(level): count for level, count in levels.items()},
        "oldest_wait_s": 0.0 if oldest is None else _wait_s(tracked, oldest, now),
        "longest_wait_by_level": {} if queue is None else queue.longest_waits.state(now),
        "sharing": {"clients": 0, "spread": 0.0} if queue is None or queue.shares is None else queue.shares.state(),
        "waiting_for": dict(Counter(why.values()) + Counter({} if queue is None else queue.apart())),
        "why_waiting": dict(why),
    }


def _wait_s(tracked: TrackedRequests, request: Request, now: float) -> float:
    found = tracked.get(request.request_id)
    return 0.0 if found is None or found.waiting_since is None else now - found.waiting_since
