"""Joins to a front end what goes by its requests: objectives, load shedding, the token memory.

Upstream symbols: ``AsyncLLM.__init__`` and ``LLMEngine.__init__``, after which the engine's output processor is there:
its ``add_request`` is replaced on that one object, to notice requests that have objectives. Of such a request the
state's ``make_request_output``, through which all of its tokens leave, is replaced on that one object too, until it
ends. Seams tried: stat-logger plugins see sums over requests, and no request's own numbers; the server's per-request
metrics have no gaps between tokens; both know nothing of hints, and nothing of when a client was told.
Breaks without: no ``vllm_ext:slo_*`` metrics, no reports in ``usage``, no load shedding, no token memory.
Can go: when a front-end plugin sees the outputs of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_ext.hooks.patch import Hook, Patch, Reliance
from vllm_ext.patches.additional_config import options_of


def _init(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    from vllm_ext.slo.attach import account_for

    account_for(self)
    if mib := options_of(self.vllm_config).token_memory_mib:
        from vllm_ext.token_memory.attach import attach

        attach(self, mib)


def _patch(target: str) -> Patch:
    return Patch(
        target=target,
        feature="objectives",
        why="no plugin is given the engine's front end, which sees requests and their tokens",
        breaks_without="no vllm_ext:slo_* metrics, no reports in usage, no load shedding, no token memory",
        remove_when="a front-end plugin sees the outputs of requests",
        replacement=_init,
    )


_ENGINE = "vllm.v1.engine"

HOOKS: tuple[Hook, ...] = (
    _patch(
        f"{_ENGINE}.async_llm:AsyncLLM.__init__",
    ),
    _patch(
        f"{_ENGINE}.llm_engine:LLMEngine.__init__",
    ),
    Reliance(
        target=f"{_ENGINE}.output_processor:RequestState.make_request_output",
        feature="objectives",
        why="all tokens of a sequence, its end and its abort pass through it; replaced on requests with objectives",
        breaks_without="no vllm_ext:slo_* metrics, no reports in usage",
        remove_when="a front-end plugin sees the outputs of requests",
    ),
)
