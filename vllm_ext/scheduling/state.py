"""The state of a scheduler as the front end fetches it for metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ext.scheduling.scheduler import SteeredScheduler


def state_of(scheduler: SteeredScheduler, since: int) -> dict[str, Any]:
    """Return a scheduler's state, fit for JSON, with the records of requests finished from number ``since`` on."""
    waiting, steered = scheduler.waiting, hasattr(scheduler, "ranked")
    levels = dict(scheduler.ranked.levels) if steered else {0: len(waiting)}
    oldest = scheduler.ranked.oldest() if steered else next(iter(waiting), None)
    state = scheduler.observer.state(since)
    state.update(
        system=scheduler.policies.system.name,
        policies=scheduler.policies.describe(),
        running=len(scheduler.running),
        waiting_by_level={str(level): count for level, count in levels.items()},
        oldest_wait_s=_wait_s(scheduler, oldest) if oldest is not None else 0.0,
    )
    if scheduler.tier_account is not None:
        state["kv_tier"] = scheduler.tier_account.state()
    if scheduler.gaps is not None:
        state["kv_gaps"] = scheduler.gaps.counts.state()
    return state


def _wait_s(scheduler: SteeredScheduler, request: Request) -> float:
    job = scheduler.ledger.get(request.request_id)
    if job is None or job.waiting_since is None:
        return 0.0
    return scheduler.clock() - job.waiting_since
