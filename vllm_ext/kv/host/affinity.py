"""Where the thread that copies KV may run.

vLLM's CPU backend binds each of its compute threads to a core of its own, the worker's main thread among them, and a
thread inherits what its creator is bound to: copies would run on the main thread's core and nowhere else, even where
cores are left for others (``VLLM_CPU_NUM_OF_RESERVED_CPU``), and every layer would wait for that core. So where the
process may run is noted before that, when vLLM loads the plugin: what its user allowed with ``taskset`` or a container.
"""

from __future__ import annotations

import contextlib
import logging
import os

logger = logging.getLogger("vllm.vllm_ext.kv")

_allowed: frozenset[int] | None = None


def note_allowed_cores() -> None:
    """Note where this process may run; only the first call counts, for vLLM binds the calling thread later."""
    global _allowed  # noqa: PLW0603 - once in a process
    if _allowed is None and hasattr(os, "sched_getaffinity"):
        _allowed = frozenset(os.sched_getaffinity(0))


def leave_the_engines_core() -> None:
    """Let the calling thread run on every core that was noted; where none were, or the kernel refuses, on its own."""
    if _allowed is None:
        return
    own = os.sched_getaffinity(0)
    if len(_allowed) > len(own):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _allowed)
            logger.debug("KV is copied on cores %s, not on %s only", sorted(_allowed), sorted(own))
