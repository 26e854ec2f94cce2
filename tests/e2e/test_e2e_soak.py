"""A server under mixed load for ``SOAK_MINUTES``: its memory does not grow, and no request is lost.

`make soak` runs it for as long as one likes; `make test-all` for a minute, which says nothing of memory. Memory is what
is resident of all processes of the server that stay, together. It is compared after a warm-up of half the time, and at
most 15 minutes, in which pools, caches and histories fill up. The growth is a median of slopes, so that a few samples
of a collection under way do not make it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import statistics
import time
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from forks import ForkServer
from servers import HANG_S, MODEL, Served, wait_until
from soak_load import MixedLoad

from vllm_ext.demo.server import group_members

MINUTES = float(os.environ.get("SOAK_MINUTES", "1"))
JUDGES_MEMORY = "SOAK_MINUTES" in os.environ
SEED = int(os.environ.get("SOAK_SEED", "0"))
MAX_GROWTH_MB = 2.0
"""Per minute, in MB of 10**6 bytes."""
CLIENTS = 12
EVERY_S = 1.0
MAX_TOKENS = 120

T = TypeVar("T")

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.timeout(60 * MINUTES + 3 * HANG_S)]


class Memory:
    """Resident memory of the processes of a server, over time; what processes share counts for each."""

    def __init__(self, group: int) -> None:
        """Remember the process group; nothing is measured yet."""
        self._group = group
        self._started = time.monotonic()
        self.samples: list[tuple[float, dict[int, float]]] = []
        """Minutes since the start, and MB by process."""

    def sample(self) -> None:
        found = {}
        for pid in group_members(self._group):
            with contextlib.suppress(psutil.NoSuchProcess):
                found[pid] = psutil.Process(pid).memory_info().rss / 1e6
        self.samples.append(((time.monotonic() - self._started) / 60, found))

    async def watch(self, until: float) -> None:
        """Measure now and then, until a time of the monotonic clock."""
        while time.monotonic() < until:
            await asyncio.to_thread(self.sample)
            await asyncio.sleep(EVERY_S)

    def total(self) -> list[tuple[float, float]]:
        """Return minutes and MB of the processes that were there from the end of the warm-up on."""
        later = after_warm_up(self.samples)
        lasting = set.intersection(*(set(found) for _, found in later))
        return [(minutes, sum(found[pid] for pid in lasting)) for minutes, found in later]

    def describe(self, log: str) -> str:
        """Return a line for each process: its name in the server's log, and its memory from first to last."""
        lines = []
        for pid in self.samples[-1][1]:
            own = [(minutes, found[pid]) for minutes, found in self.samples if pid in found]
            name = re.search(rf"\((\w+) pid={pid}\)", log)
            shown = " ".join(f"{mb:.0f}" for _, mb in own[:: max(1, len(own) // 8)])
            grown = f"{growth(after_warm_up(own)):+.2f} MB/min" if own[0][0] < self.samples[-1][0] / 2 else "new"
            lines.append(f"  {name[1] if name else 'process'} {pid}: {shown} MB, {grown}")
        return "\n".join(lines)


def after_warm_up(samples: list[tuple[float, T]]) -> list[tuple[float, T]]:
    """Return the samples that count; each begins with its minute."""
    warm = min(15.0, samples[-1][0] / 2)
    return [each for each in samples if each[0] >= warm]


def growth(samples: list[tuple[float, float]]) -> float:
    """Return by how much memory grows, in MB per minute: the median of slopes over half of the time."""
    half = len(samples) // 2
    pairs = zip(samples[:half], samples[half:], strict=False)
    return statistics.median((later[1] - earlier[1]) / (later[0] - earlier[0]) for earlier, later in pairs)


def test_growth_is_that_after_the_warm_up() -> None:
    filling = [(0.0, 100.0), (0.5, 190.0), (1.0, 200.0)]
    later = [(2.0, 203.0), (3.0, 206.0)]
    assert after_warm_up([*filling, *later]) == later
    assert growth(later) == pytest.approx(3.0)


def test_a_single_peak_is_no_growth() -> None:
    samples = [(minute / 10, 100.0 + minute / 5) for minute in range(40)]
    samples[35] = (3.5, 900.0)
    assert growth(samples) == pytest.approx(2.0)


def test_a_process_that_came_and_went_does_not_count() -> None:
    memory = Memory(group=0)
    memory.samples = [(0.0, {1: 50.0}), (1.0, {1: 60.0, 2: 400.0}), (2.0, {1: 61.0})]
    assert memory.total() == [(1.0, 60.0), (2.0, 61.0)]


def test_3_under_mixed_load_memory_stays_and_no_request_is_lost(
    forks: ForkServer | None, llama: Path, tmp_path: Path
) -> None:
    log = tmp_path / "requests.jsonl"
    tier = {"gib": 8 / 1024, "bits": 16, "disk_dir": str(tmp_path / "kv"), "disk_gib": 16 / 1024}
    args = ["--scheduler-cls", "alise", "--ext-request-log", str(log), "--ext-metrics-interval-s", "0.5"]
    args += ["--additional-config", json.dumps({"vllm_ext": {"kv_tier": tier}})]
    args += ["--max-num-seqs", "6", "--num-gpu-blocks-override", "40"]
    with Served(llama, args, log_path=tmp_path / "server.log", forks=forks, request_log=log) as server:
        server.client().completions.create(model=MODEL, prompt="wake up", max_tokens=1)
        wait_until(lambda: server.metric("vllm_ext:predictor_up") == 1, "the predictor, which loads its encoder")
        memory = Memory(server.pid)

        async def scene() -> MixedLoad:
            async with server.async_client() as client:
                load = MixedLoad(client, server.base_url, MODEL, seed=SEED, max_tokens=MAX_TOKENS)
                until = time.monotonic() + 60 * MINUTES
                await asyncio.gather(load.run(CLIENTS, lambda: time.monotonic() < until), memory.watch(until))
                return load

        load = asyncio.run(scene())
        assert server.is_running()
        assert load.lost == []
        wait_until(lambda: load.answered <= logged(server), "a record of every request that was answered")
        server.client().completions.create(model=MODEL, prompt="last", max_tokens=2)
        for gauge in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            wait_until(lambda gauge=gauge: server.metric(gauge) == 0, f"{gauge} back to 0")
        assert server.metric("vllm_ext:policy_fallbacks_total") == 0
    grown = growth(memory.total())
    print(f"\nsoak: {dict(load.did)}; memory {grown:+.2f} MB/min after the warm-up")
    print(by_process := memory.describe(server.log_path.read_text(errors="replace")))
    assert grown < MAX_GROWTH_MB or not JUDGES_MEMORY, by_process


def logged(server: Served) -> set[str]:
    """Return the names by which clients called the requests that have ended."""
    found = (re.search(r"soak-\d+", record["req_id"]) for record in server.records())
    return {match[0] for match in found if match}
