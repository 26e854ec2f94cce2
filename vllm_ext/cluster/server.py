"""A replica: vLLM's own server in Ray Serve, which reports its load, says when it is ill, and loses no request quietly.

Ray gives the application that vLLM builds a port of its own. Streams go straight from there to clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve.llm import LLMServer

from vllm_ext import envs
from vllm_ext.admin.engines import STATE, Engines
from vllm_ext.admin.load import reports
from vllm_ext.cluster.health import Health
from vllm_ext.cluster.held import Held

logger = logging.getLogger("ray.serve")


class Server(LLMServer):
    """Ray's server of a model, with reports, health by steps, and `Held` around vLLM's application."""

    _health: Health | None = None
    _following: asyncio.Task[None] | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        """Build vLLM's application, and follow its engine from now on."""
        app = await super().__serve_build_asgi_app__()  # type: ignore[no-untyped-call]
        engines: Engines | None = getattr(app.state, STATE, None)
        if engines is None:
            logger.warning("vllm-ext: this engine reports no load (load_report is off); requests go by counts alone")
        else:
            self.follow(lambda: _first(engines))
        app.middleware_stack = None  # which vLLM has built already
        app.add_middleware(Held, is_ill=self._is_ill)
        return app

    def follow(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """Ask for reports from now on."""
        self._health = Health(ask, report_s=envs.report_s(), hang_s=envs.hang_s())
        self._following = asyncio.get_running_loop().create_task(self._health.follow())

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the last report beside what Ray tells its own routers."""
        stats = dict(await super().record_routing_stats())
        return stats if self._health is None else stats | self._health.stats()

    async def check_health(self) -> None:
        """Raise when the engine is dead, or ends no step."""
        await super().check_health()
        if self._health is not None and (why := self._health.why_ill()):
            logger.error("vllm-ext: %s; the replica is started anew", why)
            raise RuntimeError(why)

    async def _is_ill(self) -> bool:
        """Whether the engine is dead: asked when an answer failed, not to wait for the next report."""
        if self._health is None:
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._health.look(), 1.0)
        return bool(self._health.why_ill())


async def _first(engines: Engines) -> dict[str, Any]:
    """Return the report of a replica's one engine."""
    return (await reports(engines))[0]
