"""What our scheduler relies on in vLLM's without replacing it.

`SteeredScheduler` subclasses vLLM's scheduler and steers it through its state: queues, running list, per-step limits.
No type says that these still mean what they meant when read, so the functions that use them must be unchanged.
Seam used: ``--scheduler-cls``. Can go: when vLLM declares a stable scheduler interface.
"""

from __future__ import annotations

from vllm_ext.hooks.feature import Feature

FEATURE = Feature(
    name="scheduling",
    breaks_without="no system of ours can steer the scheduler",
    remove_when="vLLM declares a stable scheduler interface",
)
OVERRIDING = ("vllm_ext.scheduling.scheduler:SteeredScheduler", "vllm_ext.scheduling.waiting_table:WaitingTable")
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

HOOKS = FEATURE.relies(
    {
        f"{_SCHEDULER}.__init__": "creates the queues, lists and limits that we replace or set",
        f"{_SCHEDULER}.schedule": "reads the queues, the running order and the limits that we set per step",
        f"{_SCHEDULER}._preempt_request": "called for voluntary preemption",
        f"{_SCHEDULER}._enqueue_waiting_request": "puts requests into our queue",
        f"{_SCHEDULER}._update_after_schedule": "counts what a step scheduled",
        f"{_SCHEDULER}._free_request_blocks": "says when freed blocks are free, and when only later",
        f"{_SCHEDULER}.get_request_counts": "counts the requests in our queue",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": "when it refuses, vLLM preempts from the back "
        "of the running list",
    }
)
