"""Adds the utility calls with which front ends fetch the scheduler's state, tell it predictions, and manage its KV.

Upstream symbol: ``EngineCore``; the calls get names that vLLM does not use. Seams tried: ``SchedulerStats`` is a fixed
structure, and vLLM drops fields it does not know on the way to the front end; utility calls are dispatched by name on
``EngineCore`` and are the one channel that carries a dictionary of ours.
Breaks without: no ``vllm_ext:*`` metrics, no request log, no predictions that come after a request was queued, no
admin endpoint, and nothing for routers to go by.
Can go: when a scheduler can send statistics of its own.
"""

from __future__ import annotations

from typing import Any

from vllm_ext.hooks.patch import Addition, Hook


def vllm_ext_state(self: Any, since: int = 0) -> dict[str, Any]:
    """Return the scheduler's state and the records of requests finished since sequence number ``since``."""
    state: dict[str, Any] = self.scheduler.vllm_ext_state(since)
    if getattr(self.vllm_config.attention_config.backend, "name", None) == "CUSTOM":
        from vllm_ext.attention.counts import CountsReader

        reader = self.__dict__.setdefault("_vllm_ext_attention", CountsReader(self.model_executor))
        state["attention"] = reader.read()
    return state


def vllm_ext_predictions(self: Any, rows: list[list[Any]]) -> int:
    """Correct predicted output lengths as ``SteeredScheduler.update_predictions`` does; returns how many counted."""
    counted: int = self.scheduler.update_predictions(rows)
    return counted


def vllm_ext_kv_tier(self: Any, action: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Answer an administrator of the KV tier, as ``TierAdmin.answer`` does."""
    answer: dict[str, Any] = self.scheduler.tier_admin.answer(action, arguments)
    return answer


def vllm_ext_policy(self: Any, wanted: dict[str, Any] | None) -> dict[str, Any]:
    """Change what an administrator may change of the policies, as ``PolicySwitch.change`` does."""
    answer: dict[str, Any] = self.scheduler.switch.change(wanted)
    return answer


def vllm_ext_load(self: Any) -> dict[str, Any]:
    """Return how loaded the engine is, and whose KV it has, as ``LoadReport.parse`` reads it."""
    report: dict[str, Any] = self.scheduler.load_reporter.report().as_dict()
    return report


HOOKS: tuple[Hook, ...] = (
    Addition(
        target="vllm.v1.engine.core:EngineCore.vllm_ext_state",
        feature="metrics",
        why="vLLM drops unknown fields of SchedulerStats on the way to the front end",
        breaks_without="no vllm_ext:* metrics and no request log",
        remove_when="a scheduler can send statistics of its own",
        value=vllm_ext_state,
    ),
    Addition(
        target="vllm.v1.engine.core:EngineCore.vllm_ext_predictions",
        feature="prediction",
        why="utility calls are the one way from a front end to its scheduler, and are dispatched by name",
        breaks_without="output lengths are predicted from hints and history only",
        remove_when="a front-end plugin can speak to the scheduler",
        value=vllm_ext_predictions,
    ),
    Addition(
        target="vllm.v1.engine.core:EngineCore.vllm_ext_kv_tier",
        feature="admin endpoint",
        why="utility calls are the one way from a front end to its scheduler, and are dispatched by name",
        breaks_without="conversations in the KV tier can't be listed or dropped by hand",
        remove_when="a front-end plugin can speak to the scheduler",
        value=vllm_ext_kv_tier,
    ),
    Addition(
        target="vllm.v1.engine.core:EngineCore.vllm_ext_policy",
        feature="admin endpoint",
        why="utility calls are the one way from a front end to its scheduler, and are dispatched by name",
        breaks_without="the policies of a server that runs can't be switched off",
        remove_when="a front-end plugin can speak to the scheduler",
        value=vllm_ext_policy,
    ),
    Addition(
        target="vllm.v1.engine.core:EngineCore.vllm_ext_load",
        feature="admin endpoint",
        why="utility calls are the one way from a front end to its scheduler, and are dispatched by name",
        breaks_without="routers can't be told how loaded the engine is, nor whose KV it has",
        remove_when="a front-end plugin can speak to the scheduler",
        value=vllm_ext_load,
    ),
)
