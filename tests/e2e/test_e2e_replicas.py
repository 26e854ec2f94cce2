"""Two data-parallel engines behind one server: each has a KV tier of its own, in host memory and on disk.

A client that names a rank gets that engine, so that a test knows where a conversation is. Devices are so small that
conversations push each other out.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, Engines, arrival
from forks import ENVIRONMENT, HANG_S, VLLM, ForkServer, run
from servers import MAX_MODEL_LEN, MODEL, SMALL_ENGINE, Served, wait_until

from tests.support.upstream import INSTALLED, needs
from vllm_ext.kv.host.memory import free_bytes

ONE_NODE = pytest.mark.skipif(INSTALLED == "0.33.0", reason="its CPU engines want a NUMA node each")
pytestmark = [pytest.mark.e2e, needs("kv-disk"), ONE_NODE, pytest.mark.timeout(3 * HANG_S)]

RANKS = (0, 1)
KEY = "secret-of-the-administrator"
TIER = "/vllm-ext/kv-tier"
CHUNK, CHUNK_BYTES = 32, 65536
"""Tokens and bytes of a block of the tiny model, float32."""
CHUNKS = 40
DISK_GIB = 1 / 64
PROMPT_TOKENS = 3 * CHUNK + 8
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("replicas")


@pytest.fixture(scope="module")
def server(forks: ForkServer | None, llama: Path, folder: Path) -> Iterator[Served]:
    tier = {"bits": 16, "store": "early", "disk_dir": str(folder / "kv"), "disk_gib": DISK_GIB}
    options = {"vllm_ext": {**EAGER["vllm_ext"], "kv_tier": tier}}
    args = ["--scheduler-cls", "alise-published", "--data-parallel-size", "2", "--kv-tier-admin"]
    args += ["--kv-tier-gib", str((CHUNKS + 0.5) * CHUNK_BYTES / 2**30), "--additional-config", json.dumps(options)]
    args += ["--num-gpu-blocks-override", "18", "--max-num-seqs", "2", "--ext-metrics-interval-s", "0.2"]
    args += ["--enable-prompt-tokens-details"]
    log, env = folder / "server.log", {"VLLM_EXT_ADMIN_KEY": KEY}
    with Served(llama, args, log_path=log, forks=forks, env=env, modules=["turnstile", "held_copies"]) as running:
        yield running


def prompt(number: int) -> list[int]:
    return [33 + (number * 7 + place * (number + 1)) % 90 for place in range(PROMPT_TOKENS)]


def ask(server: Served, rank: int, name: str, tokens: list[int]) -> tuple[str, int]:
    """Let a conversation take a turn at an engine; returns the answer, and how many tokens were not computed."""
    answer = server.client().completions.create(
        model=MODEL,
        prompt=tokens,
        max_tokens=MAX_TOKENS,
        temperature=0,
        extra_headers={"X-data-parallel-rank": str(rank)},
        extra_body={"ignore_eos": True, "vllm_xargs": {"conversation_id": name}},
    )
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text, (details.cached_tokens or 0) if details else 0


def admin(server: Served, path: str = "", method: str = "GET") -> list[dict[str, Any]]:
    """Return the part of each engine."""
    request = urllib.request.Request(server.base_url + TIER + path, method=method)
    request.add_header("Authorization", f"Bearer {KEY}")
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        engines: list[dict[str, Any]] = json.load(answer)["engines"]
    assert [engine["engine"] for engine in engines] == list(RANKS)
    return engines


def names(server: Served) -> list[set[str]]:
    return [{row["name"] for row in engine["conversations"]} for engine in admin(server, "/conversations")]


def test_4_each_engine_keeps_its_own_conversations_and_all_answer_as_stock(
    server: Served, run_engines: Engines, llama: Path
) -> None:
    talks = {f"talk-{number}": prompt(number) for number in range(8)}
    arrivals = [arrival(name, 0, tokens, MAX_TOKENS) for name, tokens in talks.items()]
    engine = {**BASE_ENGINE, "model": str(llama), "max_model_len": MAX_MODEL_LEN, "enable_prefix_caching": False}
    (stock,) = run_engines([{"name": "stock", "engine": engine, "arrivals": arrivals}]).values()

    def at(name: str) -> int:
        return int(name[-1]) % 2

    for _ in range(2):
        for name, tokens in talks.items():
            assert ask(server, at(name), name, tokens)[0] == stock.texts[name]
    wait_until(lambda: all(engine["host"]["writing_chunks"] == 0 for engine in admin(server)), "all to be stored")
    assert names(server) == [{name for name in talks if at(name) == rank} for rank in RANKS]

    (text, found), (elsewhere, unknown) = (ask(server, rank, "talk-0", talks["talk-0"]) for rank in RANKS)
    assert text == elsewhere == stock.texts["talk-0"]
    assert found == 3 * CHUNK, "it came from host memory: four conversations do not fit on the device"
    assert unknown == 0, "the other engine does not have it"


def test_host_memory_and_disk_are_each_engines_own(server: Served, folder: Path) -> None:
    for rank in RANKS:
        ask(server, rank, "own", prompt(20 + rank))
    for engine in admin(server):
        assert engine["host"]["capacity_chunks"] == CHUNKS
        assert engine["stored_chunks"] > 0
    assert {path.name for path in (folder / "kv").iterdir()} == {f"vllm-ext-kv-{rank}" for rank in RANKS}
    for rank in RANKS:
        wait_until(lambda rank=rank: any((folder / "kv" / f"vllm-ext-kv-{rank}").rglob("*")), "a chunk on disk")
        assert server.metric("vllm_ext:kv_tier_capacity_bytes", engine=str(rank), tier="host") == CHUNKS * CHUNK_BYTES
        on_disk = server.metric("vllm_ext:kv_tier_capacity_bytes", engine=str(rank), tier="disk")
        assert on_disk == DISK_GIB * 2**30 / 2, "they share what there is"


def test_metrics_tell_the_engines_apart(server: Served) -> None:
    def counts() -> list[float]:
        return [server.metric("vllm_ext:output_tokens_count", engine=str(rank)) for rank in RANKS]

    wait_until(lambda: min(counts()) > 0, "both engines' metrics")
    before = counts()
    for _ in range(3):
        ask(server, 1, "counted", prompt(30))
    wait_until(lambda: counts()[1] >= before[1] + 3, "the metrics of the engine that was asked")
    assert counts() == [before[0], before[1] + 3]
    ours = server.our_series()
    assert len(ours) == len(set(ours))


def test_emptying_the_tier_empties_every_engines(server: Served) -> None:
    for rank in RANKS:
        ask(server, rank, "last", prompt(40))
    wait_until(lambda: all(engine["host"]["used_chunks"] > 0 for engine in admin(server)), "something in each tier")
    assert all(engine["device_emptied"] for engine in admin(server, "/conversations", "DELETE"))
    assert [engine["host"]["used_chunks"] for engine in admin(server)] == [0, 0]
    assert [ask(server, rank, "last", prompt(40))[1] for rank in RANKS] == [0, 0]


def test_more_host_memory_than_both_can_have_is_refused(forks: ForkServer | None, llama: Path, tmp_path: Path) -> None:
    """Each alone would fit."""
    gib = f"{round(0.7 * free_bytes() / 2**30, 3):g}"
    args = ["--scheduler-cls", "fcfs", "--data-parallel-size", "2", "--kv-tier-gib", gib]
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(llama), *SMALL_ENGINE, *args]
    ended = run(forks, VLLM, command, environment={**os.environ, **ENVIRONMENT}, log=tmp_path / "log.txt")
    assert ended.code != 0
    message = " ".join(ended.output.split()[-120:])
    assert f"kv_tier.gib={gib}" in message
    assert "must be less for each of 2 replicas" in message
