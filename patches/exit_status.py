"""Lets a server whose engine died end with exit status 1, so that a supervisor sees a failure and starts it again.

Upstream symbol: ``serve_http``, which ends an API server and hands its caller what is left to await. When the engine is
gone vLLM tells uvicorn to stop and returns as after an orderly end, so that `vllm serve` exits with 0; with several API
servers, their parent sees the dead engine and exits with 1. Seams tried: an endpoint plugin is told of the end of the
application, but not why, and an exception raised there is logged by uvicorn and dropped; an exit handler runs when the
status can't be changed any more but by ``os._exit``, which skips the other handlers.
Breaks without: a supervisor that restarts on failure leaves a server without an engine down.
Can go: when `vllm serve` exits with a status other than 0 after its engine died.

A server that was told to stop ends with 0, also where its engine was told first: a signal to the whole process group.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from vllm_ext.hooks.patch import Patch

_ENDED_BY_ITSELF = "dummy_shutdown"
"""Name of what vLLM returns when no signal ended the server; after one it is uvicorn's own shutdown."""


async def _serve_http(original: Callable[..., Any], app: Any, *args: Any, **kwargs: Any) -> Awaitable[None]:
    engine = app.state.engine_client  # the end of the application takes its state away
    rest = await original(app, *args, **kwargs)
    died = rest.__name__ == _ENDED_BY_ITSELF and engine is not None and engine.errored
    return _fail_after(rest) if died else rest


async def _fail_after(rest: Awaitable[None]) -> None:
    await rest
    raise SystemExit(1)


HOOKS = (
    Patch(
        target="vllm.entrypoints.launchers.launcher:serve_http",
        feature="exit status",
        why="a server whose engine died ends as if it had been told to, and no plugin has a say in its exit status",
        breaks_without="vllm serve exits with 0 after its engine died, which supervisors take for an orderly end",
        remove_when="vllm serve exits with another status than 0 after its engine died",
        replacement=_serve_http,
        also_rebind=("vllm.entrypoints.launchers.api_server.entry:serve_http",),
        optional=True,
    ),
)
