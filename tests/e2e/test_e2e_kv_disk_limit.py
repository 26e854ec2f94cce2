"""A disk that is far too small for the KV that comes to it, and one that is full time and again: no answer differs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from engines import BASE_ENGINE, EAGER, Engines, Outcome, conversations

from tests.support.extent import quick, with_full
from tests.support.upstream import needs

pytestmark = [pytest.mark.e2e, needs("kv-disk")]

MIB = 1 / 1024
"""In GiB."""
HOST_MIB, DISK_MIB = 0.7, 1.1
TURNS = [{**turn, "step": turn["step"] // 8} for turn in conversations(seed=12, num=6, turns=quick(3, full=4))]
"""With about twice as much KV as all tiers hold, so that some of it is still there, and so close upon each other that
requests are preempted."""
FEW_BLOCKS: Mapping[str, Any] = {"num_gpu_blocks_override": 18, "max_model_len": 512, "max_num_seqs": 4}
ROOM: Mapping[str, Any] = {"max_model_len": 512, "enable_prefix_caching": False}
COVERING = [("fcfs", False), ("alise", True)]
EVERY = [(system, fills) for system in ("fcfs", "alise", "auto", "pensieve") for fills in (False, True)]


@pytest.fixture(scope="module")
def upstream(run_engines: Engines, llama: Path) -> Outcome:
    engine = {**BASE_ENGINE, "model": str(llama), **ROOM}
    return run_engines([{"name": "computed", "engine": engine, "arrivals": TURNS}])["computed"]


@pytest.mark.parametrize(("system", "fills"), with_full(COVERING, EVERY))
def test_4_a_disk_far_too_small_or_full_changes_no_answer(
    system: str, fills: bool, run_engines: Engines, llama: Path, upstream: Outcome, tmp_path: Path
) -> None:
    folder = tmp_path / "kv"
    tier = {"gib": HOST_MIB * MIB, "bits": 16, "disk_dir": str(folder), "disk_gib": DISK_MIB * MIB}
    ours = {**EAGER["vllm_ext"], "kv_tier": tier}
    engine = {**BASE_ENGINE, "model": str(llama), **FEW_BLOCKS, "scheduler_cls": system}
    engine["additional_config"] = {"vllm_ext": ours}
    run = {"name": "tier", "engine": engine, "arrivals": TURNS, "disk": {"folder": str(folder), "fills": fills}}
    found = run_engines([run])["tier"]
    assert found.tokens == upstream.tokens
    assert (found.blocks_missing, found.left_running, found.left_waiting, found.fallbacks) == (0, 0, 0, 0)
    assert_limit_kept(found)
    assert found.host_hit_tokens > 0
    log = Path(found.log).read_text(errors="replace")
    assert " ERROR " not in log
    assert log.count("can't be written to disk") == fills, "once, however many there were"
    assert found.disk.get("unwritten_chunks", 0) > 0 if fills else "unwritten_chunks" not in found.disk


def assert_limit_kept(found: Outcome) -> None:
    """At every moment, but for a file that one writer has yet to delete when the other writes; and metrics tell so."""
    disk, limit = found.disk, DISK_MIB * 2**20
    chunk_bytes = disk["bytes"] / disk["chunks"]
    assert limit - chunk_bytes < disk["largest_bytes"] <= limit + chunk_bytes, "it was not full, or more than that"
    assert disk["left_bytes"] == disk["bytes"] == disk["booked_bytes"]
    assert disk["evicted_chunks"] > 0
    assert not {"damaged_chunks", "unreadable_chunks"} & disk.keys()
