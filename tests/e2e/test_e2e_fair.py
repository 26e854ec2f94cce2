"""Clients that take turns, by the keys they send, on a real server: one that floods it does not hold up another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from forks import ForkServer
from servers import HANG_S, MODEL, Served, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

FLOOD, TOKENS = 12, 20
OTHERS_TOKENS = TOKENS + 1
"""By which the other client's request is known in the request log."""


async def send_all(server: Served) -> None:
    """Have a flood and then another client's request queued before the first step, and serve all."""

    async def send(client: httpx.AsyncClient, key: str, tokens: int) -> None:
        body = {"model": MODEL, "prompt": "again and again", "max_tokens": tokens, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text

    async with httpx.AsyncClient(base_url=server.base_url, timeout=HANG_S) as client:
        with server.turnstile.closed():
            tasks = [asyncio.create_task(send(client, "flood", TOKENS)) for _ in range(FLOOD)]
            await asyncio.to_thread(server.wait_for_queue, FLOOD)
            tasks.append(asyncio.create_task(send(client, "other", OTHERS_TOKENS)))
            await asyncio.to_thread(server.wait_for_queue, FLOOD + 1)
        await asyncio.gather(*tasks)


@pytest.mark.parametrize("system", ["fair", "fcfs-tuned"])
def test_a_client_that_floods_the_server_waits_behind_itself(
    forks: ForkServer | None, llama: Path, tmp_path: Path, system: str
) -> None:
    log = tmp_path / "requests.jsonl"
    args = ["--scheduler-cls", system, "--max-num-seqs", "1"]
    args += ["--ext-request-log", str(log), "--ext-metrics-interval-s", "0.1"]
    server_log = tmp_path / "server.log"
    with Served(llama, args, log_path=server_log, forks=forks, request_log=log, modules=["turnstile"]) as server:
        asyncio.run(send_all(server))
        wait_until(lambda: len(server.records()) == FLOOD + 1, "all requests are in the log")
        ended = [record["output_tokens"] for record in sorted(server.records(), key=lambda record: record["seq"])]
    ahead = ended.index(OTHERS_TOKENS)
    if system == "fair":
        assert ahead <= 1  # whoever goes first of two clients who were served nothing
    else:
        assert ahead == FLOOD
