"""Our routes as an endpoint plugin of vLLM's server: which parts of them there are, and the administrator's key."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI
from vllm import envs as vllm_envs

from vllm_ext import envs
from vllm_ext.admin import kv_tier, load, policy
from vllm_ext.admin.engines import STATE, Engines
from vllm_ext.config import KEY, parse


class AdminPlugin:
    """Joins the routes to vLLM's server; see ``vllm.plugins.endpoint_plugins.interface``."""

    name = "vllm_ext_admin"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        app.include_router(kv_tier.router)
        app.include_router(policy.router)
        app.include_router(load.router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Let the routes that this server's options ask for find the engine cores.

        Raises:
            ValueError: The endpoint has no key of its own; the server does not start.
        """
        options = None if engine_client is None else (engine_client.vllm_config.additional_config or {}).get(KEY)
        if not options:
            return
        config = parse(options)
        key, parts = None, set(config.admin_parts)
        if parts:
            key = envs.admin_key()
            if key in (args.api_key or [vllm_envs.VLLM_API_KEY]):
                raise ValueError(
                    f"{envs.ADMIN_KEY} is one of the server's API keys, which clients have: set another one"
                )
        if config.load_report:
            parts.add(load.LOAD)
        if parts:
            setattr(state, STATE, Engines(engine_client.engine_core, key, parts))
