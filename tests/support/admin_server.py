"""vLLM's application with the admin endpoint, and engine cores that answer what they like."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.entrypoints.serve.middleware.register import init_entrypoints_middleware

from vllm_ext.admin.plugin import AdminPlugin

Answer = Callable[..., Any]
KEY, API_KEY = "key-of-the-administrator", "key-of-the-clients"


class Client:
    """vLLM's client of so many engine cores."""

    def __init__(self, *answers: Answer) -> None:
        self.core_engines = [bytes([number]) for number in range(len(answers))]
        self.asked: list[tuple[Any, ...]] = []
        self._answers = answers

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        self.asked.append((engine[0], method, *args))
        answer = self._answers[engine[0]](method, *args)
        return await answer if asyncio.iscoroutine(answer) else answer


def server(
    client: Client,
    *,
    tier: bool = True,
    policy: bool = True,
    load: bool = False,
    key: str | None = KEY,
    api_key: str | None = API_KEY,
    root_path: str = "",
) -> TestClient:
    """Build the application as vLLM does, as far as it matters here; its client sends the key."""
    args = Namespace(
        api_key=[api_key] if api_key else None, allowed_origins=["*"], allow_credentials=False, allowed_methods=["*"],
        allowed_headers=["*"], enable_request_id_headers=False, middleware=[], log_error_stack=False,
    )  # fmt: skip
    app = FastAPI()
    app.state.args = args
    app.root_path = root_path
    plugin = AdminPlugin()
    plugin.attach_router(app)
    init_exception_handler(app)
    init_entrypoints_middleware(args, app, ())
    options = {"vllm_ext": {"admin": policy, "load_report": load, "kv_tier": {"gib": 1.0, "admin": tier}}}
    engine: Any = Namespace(vllm_config=Namespace(additional_config=options), engine_core=client)
    asyncio.run(plugin.init_state(engine, app.state, args))
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return TestClient(app, raise_server_exceptions=False, headers=headers)
