"""Adds the utility call with which front ends fetch the scheduler's state and its records of finished requests.

Upstream symbol: ``EngineCore``; the call gets a name that vLLM does not use. Seams tried: ``SchedulerStats`` is a fixed
structure, and vLLM drops fields it does not know on the way to the front end; utility calls are dispatched by name on
``EngineCore`` and are the one channel that carries a dictionary of ours.
Breaks without: no ``vllm_ext:*`` metrics and no request log.
Can go: when a scheduler can send statistics of its own.
"""

from __future__ import annotations

from typing import Any

from vllm_ext.patches.patch import Addition, Hook


def vllm_ext_state(self: Any, since: int = 0) -> dict[str, Any]:
    """Return the scheduler's state and the records of requests finished since sequence number ``since``."""
    state: dict[str, Any] = self.scheduler.vllm_ext_state(since)
    return state


HOOKS: tuple[Hook, ...] = (
    Addition(
        target="vllm.v1.engine.core:EngineCore.vllm_ext_state",
        feature="metrics",
        why="vLLM drops unknown fields of SchedulerStats on the way to the front end",
        breaks_without="no vllm_ext:* metrics and no request log",
        remove_when="a scheduler can send statistics of its own",
        value=vllm_ext_state,
    ),
)
