"""Faults of a running server: a full disk, a read-only disk, hints of any kind, an engine that is killed.

Nothing is lost and nothing is wrong: every request is answered as before, or its client is told that it was not.
`test_e2e_prediction` has a predictor that is killed or hangs, `test_e2e_aborts` clients that leave.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import bad_hints
import httpx
import odd_disks
import openai
import psutil
import pytest
from engines import EAGER
from forks import ForkServer
from servers import HANG_S, MODEL, Served, wait_until

from tests.support.extent import quick
from tests.support.upstream import needs
from vllm_ext.demo.server import group_members

pytestmark = [pytest.mark.e2e, needs("kv-disk"), pytest.mark.timeout(3 * HANG_S)]

GIB = 0.5 / 1024
"""Of the host tier: a few chunks, so that the disk is written to."""
LENGTHS = {number: 16 + 4 * number for number in range(6)}
"""Output tokens of each prompt."""
MALFORMED = quick(200, full=10_000)
AT_ONCE = 16
UNWRITTEN = "vllm:kv_offload_disk_unwritten_chunks_total"
ON_DISK = "vllm:kv_offload_disk_chunks"


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disk")
    (folder / "kv").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(
    forks: ForkServer | None, llama: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server with too little of everything: seats, KV blocks, host memory; and a disk that a test can break."""
    folder = tmp_path_factory.mktemp("faults")
    tier = {"gib": GIB, "bits": 16, "disk_dir": str(disk / "kv"), "disk_gib": 64 / 1024}
    ours = {**EAGER["vllm_ext"], "kv_tier": tier}
    args = ["--scheduler-cls", "alise-published", "--ext-metrics-interval-s", "0.2"]
    args += ["--additional-config", json.dumps({"vllm_ext": ours})]
    args += ["--max-num-seqs", "4", "--num-gpu-blocks-override", "20"]
    env, modules = {odd_disks.VARIABLE: str(switch(disk))}, ["odd_disks", "turnstile"]
    with Served(llama, args, log_path=folder / "server.log", forks=forks, env=env, modules=modules) as served:
        yield served


def switch(disk: Path) -> Path:
    return disk / "state.txt"


def text_of(number: int, turn: int) -> str:
    return " ".join(f"talk{number}-{turn}-{word}" for word in range(16))


async def ask(client: openai.AsyncOpenAI, number: int, turn: int = 0) -> str:
    answer = await client.completions.create(
        model=MODEL,
        prompt=text_of(number, turn),
        max_tokens=LENGTHS[number],
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == LENGTHS[number]
    return answer.choices[0].text


def ask_all(server: Served, turn: int) -> list[str]:
    """Ask for all at once, several times, so that they get in each other's way; returns what is answered to each."""

    async def scene() -> list[list[str]]:
        async with server.async_client() as client:
            return await asyncio.gather(
                *(asyncio.gather(*(ask(client, number, turn) for number in LENGTHS)) for _ in range(3))
            )

    first, *others = asyncio.run(scene())
    assert all(each == first for each in others)
    return first


def ask_each(server: Served, turn: int) -> list[str]:
    """Ask for one after the other."""

    async def scene() -> list[str]:
        async with server.async_client() as client:
            return [await ask(client, number, turn) for number in LENGTHS]

    return asyncio.run(scene())


@pytest.mark.parametrize("fault", [odd_disks.FULL, odd_disks.READ_ONLY])
def test_4_a_disk_that_takes_nothing_costs_no_request_anything(server: Served, disk: Path, fault: str) -> None:
    """Host memory and the device's blocks are full as well: what there is no room for is computed again."""
    turn = [odd_disks.FULL, odd_disks.READ_ONLY].index(fault)
    expected = ask_each(server, turn)
    wait_in_steps(server, lambda: server.metric(ON_DISK) > 0, "chunks on disk")
    switch(disk).write_text(fault)
    before = unwritten(server)
    assert [ask_all(server, 10 + turn), ask_all(server, turn)][1] == expected
    wait_in_steps(server, lambda: unwritten(server) > before, "a chunk that could not be written, counted")
    switch(disk).unlink()
    kept = server.metric(ON_DISK)
    ask_all(server, 20 + turn)
    wait_in_steps(server, lambda: server.metric(ON_DISK) > kept, "chunks on disk again")
    assert ask_each(server, turn) == expected
    assert server.metric("vllm_ext:policy_fallbacks_total") == 0


def wait_in_steps(server: Served, condition: Callable[[], bool], what: str) -> None:
    """Wait for what threads do, of which a step tells that comes later."""

    def after_steps() -> bool:
        server.client().completions.create(model=MODEL, prompt="anything else?", max_tokens=2)
        return condition()

    wait_until(after_steps, what)


def unwritten(server: Served) -> float:
    try:
        return server.metric(UNWRITTEN)
    except LookupError:
        return 0.0


def test_host_memory_was_full(server: Served) -> None:
    room = server.metric("vllm_ext:kv_tier_capacity_bytes", tier="host")
    assert room > 0
    wait_until(lambda: server.metric("vllm_ext:kv_tier_used_bytes", tier="host") > 0.7 * room, "host memory was full")


def test_malformed_hints_are_refused_or_ignored_and_the_server_lives(server: Served) -> None:
    """An error of the server, or a connection that it drops, would be one too many."""
    before = ask_each(server, 0)

    async def scene() -> Counter[int]:
        found: Counter[int] = Counter()
        todo = bad_hints.requests(seed=0, count=MALFORMED, model=MODEL)
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=HANG_S, limits=limits) as client:

            async def worker() -> None:
                for path, body, headers in todo:
                    answer = await client.post(path, content=body, headers=headers)
                    assert answer.status_code in (200, 400), f"{answer.status_code} {answer.text} to {body!r} {headers}"
                    found[answer.status_code] += 1

            await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        return found

    found = asyncio.run(scene())
    assert found.total() == MALFORMED
    assert found[400] > MALFORMED / 4
    assert server.is_running()
    assert ask_each(server, 0) == before


def test_3_when_the_engine_is_killed_every_client_is_told_and_the_server_fails(server: Served) -> None:
    """The last test of this server."""

    async def rest(chunks: AsyncIterator[Any]) -> None:
        """Read a stream to its end; one that was cut off must not look like one that ended."""
        async for _ in chunks:
            ...

    async def scene() -> list[Any]:
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 400, "temperature": 0, "extra_body": {"ignore_eos": True}}
        async with server.async_client() as client:
            create = client.completions.create
            with server.turnstile.closed():
                streams = [aiter(await create(prompt=f"stream {i}", stream=True, **ask)) for i in range(3)]
                await asyncio.to_thread(server.wait_for_queue, len(streams))
                await asyncio.to_thread(server.turnstile.let, 3)
                for chunks in streams:
                    await anext(chunks)
                whole = [asyncio.ensure_future(create(prompt=f"whole {i}", **ask)) for i in range(20)]
                await asyncio.to_thread(server.wait_for_queue, len(whole))
                os.kill(engine_core(server), signal.SIGKILL)
                return await asyncio.gather(*whole, *map(rest, streams), return_exceptions=True)

    group, process = server.pid, server._process
    assert process is not None
    outcomes = asyncio.run(scene())
    assert [outcome for outcome in outcomes if not isinstance(outcome, openai.APIError)] == []
    assert process.wait(timeout=HANG_S) == 1
    assert "AttributeError" not in server.log_path.read_text()
    server.stop()
    assert group_members(group) == []


def engine_core(server: Served) -> int:
    """The process with the scheduler, by the lines that it logs."""
    (found,) = set(re.findall(r"\(EngineCore\S* pid=(\d+)\)", server.log_path.read_text(errors="replace")))
    assert int(found) in {child.pid for child in psutil.Process(server.pid).children(recursive=True)}
    return int(found)
