"""Where the thread that copies KV may run.

vLLM's CPU backend binds each of its compute threads to a core of its own, the worker's main thread among them, and a
thread inherits what its creator is bound to: copies would run on the main thread's core and nowhere else, even where
cores are left for others (``VLLM_CPU_NUM_OF_RESERVED_CPU``), and every layer would wait for that core.
"""

from __future__ import annotations

import contextlib
import os

from vllm.logger import init_logger

logger = init_logger("vllm.vllm_ext.kv")


def leave_the_engines_core() -> None:
    """Let the calling thread run on every core that the process which started this one may run on.

    The kernel takes off what a container does not allow. Where that can't be found out, nothing changes.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    own = os.sched_getaffinity(0)
    with contextlib.suppress(OSError):
        allowed = os.sched_getaffinity(os.getppid())
        if len(allowed) > len(own):
            os.sched_setaffinity(0, allowed)
            logger.debug("KV is copied on cores %s, not on %s only", sorted(allowed), sorted(own))
