"""A replica: vLLM's own server in Ray Serve, which reports its load, says when it is ill, and loses no request quietly.

Ray gives the application that vLLM builds a port of its own. Streams go straight from there to clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from ray.serve.llm import LLMServer

from vllm_ext import envs
from vllm_ext.admin.engines import STATE, Engines
from vllm_ext.admin.load import reports
from vllm_ext.cluster.config import ENVIRONMENT
from vllm_ext.cluster.health import Health
from vllm_ext.cluster.held import Held

logger = logging.getLogger("ray.serve")

_LOOK_S = 0.2
"""For which an engine in a step is waited for when a report is asked for."""
_MOST_SESSIONS, _FEWEST_SESSIONS = 32_000, 100
"""Conversations in the reports of all replicas together, and of one at least: Ray sends all of them to every router
whenever one changes."""


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
        for name, value in ENVIRONMENT.items():
            found = os.environ.get(name)
            if found is not None and (found == value or value != "1"):
                continue  # a number may be another one
            raise RuntimeError(
                f"{name}={found!r}: must be {value} before `ray start`, on every machine; "
                "`vllm-ext cluster serve MODEL --print-config` prints all that must be set"
            )
        await super().start()  # type: ignore[no-untyped-call]

    async def __serve_build_asgi_app__(self) -> Any:
        """Build vLLM's application, and follow its engine from now on."""
        app = await super().__serve_build_asgi_app__()  # type: ignore[no-untyped-call]
        engines: Engines | None = getattr(app.state, STATE, None)
        if engines is None:
            logger.warning(
                "vllm-ext: this engine reports no load (load_report is off); the router only counts requests"
            )
        else:
            most = max(_FEWEST_SESSIONS, _MOST_SESSIONS // _replicas(self._llm_config.deployment_config))
            self.follow(lambda: _first(engines, most))
        app.middleware_stack = None  # which vLLM has built already
        app.add_middleware(Held, is_ill=self._is_ill, ended=self._ended)
        return app

    def follow(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """Ask for reports from now on."""
        self._health = Health(ask, report_s=envs.report_s(), hang_s=envs.hang_s())
        self._following = asyncio.get_running_loop().create_task(self._health.follow())

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return a report of now, or in a long step the last one, beside what Ray tells its own routers."""
        stats = dict(await super().record_routing_stats())
        if self._health is None:
            return stats
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._health.look(), _LOOK_S)
        return stats | self._health.stats()

    async def check_health(self) -> None:
        """Raise when the engine is dead, or ends no step."""
        await super().check_health()
        if self._health is not None and (why := self._health.why_ill()):
            logger.error("vllm-ext: %s; the replica is restarted", why)
            raise RuntimeError(why)

    def _ended(self, failed: bool) -> None:
        if self._health is not None:
            self._health.ended(failed=failed)

    async def _is_ill(self) -> bool:
        """Whether the engine is dead: asked when an answer failed, not to wait for the next report."""
        if self._health is None:
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._health.look(), 1.0)
        return bool(self._health.why_ill())


async def _first(engines: Engines, most: int) -> dict[str, Any]:
    """Return the report of a replica's one engine, with so many conversations at most, the latest."""
    report = dict((await reports(engines))[0])
    report["resident"] = dict([*report.get("resident", {}).items()][-most:])
    return report


def _replicas(deployment: Mapping[str, Any]) -> int:
    """Return how many replicas there are at most; 1 where Ray does not say a number."""
    scaling = deployment.get("autoscaling_config") or {}
    found = deployment.get("num_replicas") or (scaling.get("max_replicas") if isinstance(scaling, Mapping) else None)
    return max(1, found) if isinstance(found, int) else 1
