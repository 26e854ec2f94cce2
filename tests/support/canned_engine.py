"""Replicas of Ray Serve LLM without an engine: ours in all but the model, which says the same tokens to everybody.

Faults are files in a folder: ``dead.PID`` has an engine die, ``hang.PID`` has it end no step; what a client's leaving
does is told by ``aborted.PID``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from vllm_ext.admin.engines import STATE
from vllm_ext.cluster.server import Server
from vllm_ext.scheduling.load_report.report import session_key

FOLDER = "VLLM_EXT_TEST_FAULTS"
TOKEN_S = 0.05


class CannedCores:
    """In the place of `Engines`: one engine core that can be dead, or hang."""

    def __init__(self) -> None:
        self.running, self.number = 0, 0
        self._folder = Path(os.environ[FOLDER])
        self.resident: dict[str, tuple[int, int]] = {}
        """Conversation, as reports have it -> tokens of its KV on the device, and in host memory."""

    def __len__(self) -> int:
        return 1

    def has(self, fault: str) -> bool:
        return (self._folder / f"{fault}.{os.getpid()}").exists()

    def tell(self, fault: str) -> None:
        (self._folder / f"{fault}.{os.getpid()}").touch()

    async def works(self) -> None:
        """Return when a step would have ended.

        Raises:
            RuntimeError: the engine is dead.
        """
        if self.has("dead"):
            raise RuntimeError("EngineCore encountered an issue")
        while self.has("hang"):
            await asyncio.sleep(0.05)

    async def ask(self, utility: str, each: Any) -> list[Any]:
        assert utility == "vllm_ext_load"
        await self.works()
        self.number += 1
        prices = {"base_s": 0.01, "prefill_token_s": 1e-4, "decode_s": 1e-4, "context_token_s": 1e-7}
        return [
            {
                "number": self.number, "started": str(os.getpid()), "running": self.running, "waiting": 0, "seats": 64,
                "prefill_tokens": 0, "context_tokens": 10 * self.running, "pool_tokens": 100_000, "prices": prices,
                "resident": self.resident,
            }
            for _ in each
        ]  # fmt: skip


class CannedEngine:
    """In the place of Ray's ``VLLMEngine``."""

    def __init__(self, _config: Any) -> None:
        self.cores = CannedCores()

    async def start(self) -> None:
        """Be ready."""

    async def check_health(self) -> None:
        if self.cores.has("dead"):
            raise RuntimeError("the engine is dead")

    def routing_stats(self) -> dict[str, Any]:
        return {}

    async def build_asgi_app(self) -> FastAPI:
        app, cores = FastAPI(), self.cores
        setattr(app.state, STATE, cores)

        @app.post("/v1/completions")
        async def completions(request: Request) -> Response:
            asked = await request.json()
            headers = {"x-replica": str(os.getpid())}
            if session := request.headers.get("x-session-id"):
                cores.resident[session_key(session)] = (len(asked["prompt"]) // 4, 0)
            if cores.has("dead"):
                raise HTTPException(500, "EngineCore encountered an issue")
            if asked.get("stream"):
                return StreamingResponse(
                    stream(cores, asked["max_tokens"]), headers=headers, media_type="text/event-stream"
                )
            said = [token async for token in stream(cores, asked["max_tokens"])]
            return JSONResponse({"tokens": len(said) - 1}, headers=headers)

        return app


async def stream(cores: CannedCores, tokens: int) -> AsyncIterator[str]:
    """Yield a stream as vLLM does; a client that leaves is told of."""
    cores.running += 1
    ended = False
    try:
        for number in range(tokens):
            await asyncio.sleep(TOKEN_S)
            await cores.works()
            yield f"data: {json.dumps({'choices': [{'text': str(number)}]})}\n\n"
        ended = True
        yield "data: [DONE]\n\n"
    finally:
        cores.running -= 1
        if not ended:
            cores.tell("aborted")


class CannedServer(Server):
    """Our server of such an engine."""

    _default_engine_cls = CannedEngine


def deploy_as_told(config: dict[str, Any]) -> None:
    """Deploy anew with every line on stdin: how many replicas, of which version."""
    from ray import serve
    from ray.serve.llm import build_openai_app

    (application,) = config["applications"]
    (llm,) = application["args"]["llm_configs"]
    for line in sys.stdin:
        replicas, version = line.split()
        llm["deployment_config"]["num_replicas"] = int(replicas)
        llm["runtime_env"]["env_vars"]["VERSION"] = version
        serve.run(build_openai_app(application["args"]), name=application["name"], blocking=False)


def main(port: int, replicas: int) -> int:
    """Serve until the process is told to end."""
    from vllm_ext.cli.cluster import _run
    from vllm_ext.cluster.config import ClusterOptions, Replica, serve_config

    replica = Replica(
        model="canned", name="canned", host="127.0.0.1", port=port, engine_kwargs={}, on_cpu=True,
    )  # fmt: skip
    options = ClusterOptions(replicas=replicas, report_s=0.2, hang_s=3.0)
    config = serve_config(replica, options)
    (llm,) = config["applications"][0]["args"]["llm_configs"]
    llm["server_cls"] = "tests.support.canned_engine.CannedServer"
    llm["runtime_env"]["env_vars"]["VERSION"] = "1"
    llm["placement_group_config"] = {"bundles": [{"CPU": 1}]}
    threading.Thread(target=deploy_as_told, args=(config,), daemon=True).start()
    return _run(config, None, 2 * replicas)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
