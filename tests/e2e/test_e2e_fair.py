"""Clients that take turns, by the keys they send, on a real server: one that floods it does not hold up another."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from forks import ForkServer
from servers import HANG_S, MODEL, Served

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3 * HANG_S)]

FLOOD, TOKENS = 12, 100


async def served_around(server: Served) -> tuple[int, int]:
    """Return how many of a flood's requests ended while another client's, sent into it, was served, and how many later.

    Of those that had ended before it was sent, which on a busy machine may be several, nothing is said.
    """
    ended: list[str] = []

    async def send(client: httpx.AsyncClient, key: str) -> None:
        body = {"model": MODEL, "prompt": "again and again", "max_tokens": TOKENS, "ignore_eos": True}
        answer = await client.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200, answer.text
        ended.append(key)

    async with httpx.AsyncClient(base_url=server.base_url, timeout=HANG_S) as client:
        flood = [asyncio.create_task(send(client, "flood")) for _ in range(FLOOD)]
        await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        before = len(ended)
        await send(client, "other")
        meanwhile = ended.index("other") - before
        await asyncio.gather(*flood)
    return meanwhile, len(ended) - 1 - ended.index("other")


@pytest.mark.parametrize("system", ["fair", "fcfs-tuned"])
def test_a_client_that_floods_the_server_waits_behind_itself(
    forks: ForkServer | None, llama: Path, tmp_path: Path, system: str
) -> None:
    by_key = ["--ext-share-by", "key"] if system == "fair" else []
    args = ["--scheduler-cls", system, *by_key, "--max-num-seqs", "1"]
    with Served(llama, args, log_path=tmp_path / "server.log", forks=forks) as server:
        meanwhile, later = asyncio.run(served_around(server))
    if system == "fair":
        assert meanwhile <= 2  # who runs, and one whose turn came meanwhile
    else:
        assert later <= 2  # those that were sent as late
