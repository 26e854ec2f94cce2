"""A replica: vLLM's own server in Ray Serve, which reports its load, says when it is ill, and loses no request quietly.

Ray gives the application that vLLM builds a port of its own. Streams go straight from there to clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve.llm import LLMServer

from vllm_ext import envs
from vllm_ext.admin.engines import STATE, Engines
from vllm_ext.admin.load import reports
from vllm_ext.cluster.config import ENVIRONMENT
from vllm_ext.cluster.health import Health
from vllm_ext.cluster.held import Held

logger = logging.getLogger("ray.serve")


class Server(LLMServer):
    """Ray's server of a model, with reports, health by steps, and `Held` around vLLM's application."""

    _health: Health | None = None
    _following: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engine.

        Raises:
            RuntimeError: Ray was started without what it needs in its environment. It would serve, in its own way: no
                replica would report, and tokens would come by the dozen.
        """
        unset = [name for name, value in ENVIRONMENT.items() if value == "1" and os.environ.get(name) != "1"]
        if unset:
            raise RuntimeError(
                f"{unset[0]}={os.environ.get(unset[0])!r}: must be 1 before `ray start`, on every machine; "
                "`vllm-ext cluster serve MODEL --print-config` prints all that must be set"
            )
        await super().start()  # type: ignore[no-untyped-call]

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
