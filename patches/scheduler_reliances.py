"""What our scheduler relies on in vLLM's without replacing it.

`SteeredScheduler` subclasses vLLM's scheduler and steers it through its state: queues, running list, per-step limits.
No type says that these still mean what they meant when read, so the functions that use them must be unchanged.
Seam used: ``--scheduler-cls``. Can go: when vLLM declares a stable scheduler interface.
"""

from __future__ import annotations

from vllm_ext.hooks.patch import Reliance
from vllm_ext.hooks.versions import SUPPORTED

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"


def _reliance(target: str, why: str, *fingerprints: str) -> Reliance:
    """Return the reliance on a function whose fingerprints are given in the order of the supported versions."""
    return Reliance(
        target=target,
        feature="scheduling",
        why=why,
        breaks_without="no system of ours can steer the scheduler",
        remove_when="vLLM declares a stable scheduler interface",
        verified=dict(zip(SUPPORTED, fingerprints, strict=True)),
    )


HOOKS = (
    _reliance(
        f"{_SCHEDULER}.__init__",
        "creates the queues, lists and limits that we replace or set",
        "4d214b1d922ef999",
        "2f535e9287179be5",
        "39c1117b22be3483",
    ),
    _reliance(
        f"{_SCHEDULER}.schedule",
        "reads the queues, the running order and the limits that we set per step",
        "387e48d005999ea0",
        "6509f330ab73cd50",
        "b9479b78eb757a9d",
    ),
    _reliance(
        f"{_SCHEDULER}._preempt_request",
        "called for voluntary preemption",
        "d8ff75ad34967ab8",
        "d8ff75ad34967ab8",
        "22b7ef1ebbab41f5",
    ),
    _reliance(
        f"{_SCHEDULER}._enqueue_waiting_request",
        "puts requests into our queue",
        "11dfa7595730fdcc",
        "11dfa7595730fdcc",
        "11dfa7595730fdcc",
    ),
    _reliance(
        f"{_SCHEDULER}._update_after_schedule",
        "counts what a step scheduled",
        "4f0f01c7578d9d00",
        "4f0f01c7578d9d00",
        "4f0f01c7578d9d00",
    ),
    _reliance(
        f"{_ASYNC}._update_after_schedule",
        "adds the placeholders of tokens in flight",
        "65e2b3003f4a0ca8",
        "65e2b3003f4a0ca8",
        "65e2b3003f4a0ca8",
    ),
    _reliance(
        f"{_SCHEDULER}.update_from_output",
        "extended: which requests produced tokens",
        "09aaf055de8ed4b6",
        "09aaf055de8ed4b6",
        "e0c42db8a793457b",
    ),
    _reliance(
        f"{_SCHEDULER}.add_request",
        "extended: a request is tracked from here on",
        "b3ff67cd03c8844f",
        "f811672acdeefb7f",
        "f811672acdeefb7f",
    ),
    _reliance(
        f"{_SCHEDULER}.finish_requests",
        "aborts reach requests in our queue through it",
        "7532c490dfe44656",
        "7532c490dfe44656",
        "ed2e9674e769f715",
    ),
    _reliance(
        f"{_SCHEDULER}._free_request",
        "extended: a request is tracked no longer",
        "8c8dd560c7c5dcc9",
        "0e1d9e4742c4bf3c",
        "d48874bdd5646e05",
    ),
    _reliance(
        f"{_SCHEDULER}._free_request_blocks",
        "says when freed blocks are free, and when only later",
        "927cf1ad89cfeb71",
        "927cf1ad89cfeb71",
        "927cf1ad89cfeb71",
    ),
    _reliance(
        f"{_SCHEDULER}.reset_prefix_cache",
        "extended: preempts without our asking",
        "9f156816721f6e38",
        "9fcc95f54a4ae2bc",
        "9fcc95f54a4ae2bc",
    ),
    _reliance(
        f"{_SCHEDULER}.get_request_counts",
        "counts the requests in our queue",
        "46ea17ebb9145b36",
        "46ea17ebb9145b36",
        "46ea17ebb9145b36",
    ),
    _reliance(
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        "when it refuses, vLLM preempts from the back of the running list",
        "3250e1b0c723acfa",
        "7f3b4e97c7f88fe4",
        "7f3b4e97c7f88fe4",
    ),
)
