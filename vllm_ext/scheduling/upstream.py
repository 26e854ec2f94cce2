"""Names that vLLM's schedulers do not share: 0.30 has another cap on admissions and parks requests it passes over."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

_HOLDS_KV = (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.WAITING_FOR_STREAMING_REQ)


def _has_own_cap(scheduler: Scheduler) -> bool:
    return hasattr(scheduler, "max_num_active_reqs")


def admission_cap(scheduler: Scheduler) -> int:
    """Return the number of running requests from which on vLLM admits no more."""
    cap: int = scheduler.max_num_active_reqs if _has_own_cap(scheduler) else scheduler.max_num_running_reqs
    return cap


def set_admission_cap(scheduler: Scheduler, cap: int) -> None:
    """Set the cap; where it also bounds what runs (vLLM 0.30 checks that after the step), not below that."""
    if _has_own_cap(scheduler):
        scheduler.max_num_active_reqs = cap
    else:
        scheduler.max_num_running_reqs = max(cap, len(scheduler.running))


def parked(scheduler: Scheduler) -> str:
    """Return the name of vLLM's second waiting queue, which it serves before ``waiting``."""
    return "kv_holding_waiting" if hasattr(scheduler, "kv_holding_waiting") else "skipped_waiting"


def return_parked(scheduler: Scheduler) -> None:
    """Put requests that were passed over back into ``waiting``, as vLLM does from 0.31 on.

    vLLM 0.30 parks them in a queue that goes before ``waiting`` whatever their rank. Those that hold KV stay there.
    """
    skipped = getattr(scheduler, "skipped_waiting", None)
    if not skipped:
        return
    back = [request for request in skipped if request.status not in _HOLDS_KV]
    skipped.remove_requests(back)
    for request in back:
        scheduler.waiting.add_request(request)
