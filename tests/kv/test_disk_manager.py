"""Host memory and disk together: what goes down, what comes back, and what happens when either is full or fails."""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_offload.base import LookupResult, ScheduleEndContext

from tests.support.extent import HANG_S
from tests.support.upstream import needs
from vllm_ext.config.kv_tier import POLICIES as POLICY_NAMES
from vllm_ext.config.kv_tier import KvTierConfig
from vllm_ext.kv.conversations.conversation import Turn
from vllm_ext.kv.conversations.keeper import Keeper
from vllm_ext.kv.disk import manager as disk_manager
from vllm_ext.kv.disk import tier as disk_tier
from vllm_ext.kv.disk.tier import Backlog, DamagedChunk, DiskTier, counter_name

from .disk_parts import FILE_BYTES, chunk_files, contents, fill, key, rig, stored

pytestmark = needs("kv-disk")

POLICIES = pytest.mark.parametrize("policy", POLICY_NAMES)
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, call: str) -> Iterator[None]:
    """Let reads or writes of files wait for the end of the block."""
    real, go = getattr(disk_tier, call), threading.Event()
    monkeypatch.setattr(disk_tier, call, lambda *args: (go.wait(20), real(*args)))
    try:
        yield
    finally:
        go.set()


@POLICIES
def test_what_is_stored_goes_to_disk_and_comes_back_after_a_restart_too(tmp_path: Path, policy: str) -> None:
    with rig(tmp_path, policy=policy) as tiers:
        fill(tiers, 1, 2, 3, 4)
        fill(tiers, 11, 12, 13, 14)
        assert tiers.on_disk(1, 2, 3, 4, 11, 12, 13, 14) == [True] * 8
        again = tiers.request(1, 2, 3, 4)
        assert tiers.lookup(again, 1, 2, 3, 4) == [PENDING] * 4, "host memory had room for four only"
        assert tiers.load(again, 1, 2, 3, 4) == contents(1, 2, 3, 4)
    with rig(tmp_path, policy=policy) as tiers:
        assert tiers.load(tiers.request(1, 2, 3, 5), 1, 2, 3, 5) == contents(1, 2, 3)


def test_what_waits_for_the_disk_is_written_before_the_end(tmp_path: Path) -> None:
    with rig(tmp_path) as tiers:
        context = tiers.request(1, 2)
        assert tiers.store(context, 1, 2)
    with rig(tmp_path) as tiers:
        assert tiers.on_disk(1, 2) == [True, True]


@POLICIES
def test_an_unreadable_chunk_does_not_go_to_disk(tmp_path: Path, policy: str) -> None:
    with rig(tmp_path, policy=policy) as tiers:
        context = tiers.request(1, 2, 3)
        assert tiers.store(context, 1, 2, 3, unreadable=[2])
        tiers.step()
        assert tiers.on_disk(1, 2, 3) == [True, False, True]
        assert tiers.lookup(context, 1, 2) == [HIT, MISS]
        assert tiers.manager.host.dropped_chunks == 1
        assert tiers.store(context, 2, unreadable=[2]), "and nothing else was to be done"
        tiers.step()
        tiers.manager.on_request_finished(context)
        assert tiers.manager._req_state == {}, "the request is over for vLLM's books"


def test_a_chunk_that_could_not_be_loaded_goes_from_disk_too(tmp_path: Path) -> None:
    with rig(tmp_path) as tiers:
        fill(tiers, 1, 2)
        context = tiers.request(1, 2)
        places = tiers.manager.prepare_load([key(1), key(2)], context).block_ids.tolist()
        tiers.manager.mark_unreadable([places[1]])
        tiers.manager.complete_load([key(1), key(2)], context)
        tiers.step()
        assert tiers.on_disk(1, 2) == [True, False]
        assert tiers.lookup(context, 1, 2) == [HIT, MISS]


@POLICIES
@pytest.mark.parametrize("failure", [DamagedChunk("flipped"), OSError(errno.EIO, "I/O error"), ValueError("a bug")])
def test_what_cannot_be_brought_back_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, failure: Exception
) -> None:
    """The chunks before it are loaded, and it is not asked for again and again."""
    stored(tmp_path, 1, 2, 3, 4)
    real = disk_tier.batch_load_block

    def failing(paths: list[str], rows: memoryview, offsets: list[int], *args: Any) -> None:
        real(paths, rows, offsets, *args)
        if key(3)[:32].hex() in paths[0]:
            rows.cast("B")[offsets[0]] ^= 1
            raise failure

    with rig(tmp_path, policy=policy) as tiers:
        monkeypatch.setattr(disk_tier, "batch_load_block", failing)
        context = tiers.request(1, 2, 3, 4)
        assert tiers.load(context, 1, 2, 3, 4) == contents(1, 2)
        monkeypatch.undo()
        assert tiers.store(context, 3)
        tiers.step()
        tiers.manager.on_request_finished(context)
        assert tiers.load(tiers.request(1, 2, 3, 4), 1, 2, 3, 4) == contents(1, 2, 3, 4)


@POLICIES
@pytest.mark.parametrize("host", [1, 3, 4, 7])
def test_a_prefix_larger_than_host_memory_is_loaded_as_far_as_it_fits(tmp_path: Path, policy: str, host: int) -> None:
    numbers = range(10)
    stored(tmp_path, *numbers, host=12)
    with rig(tmp_path, host=host, policy=policy) as tiers:
        assert tiers.load(tiers.request(*numbers), *numbers) == contents(*numbers[:host])


@POLICIES
def test_requests_that_need_the_same_room_do_not_wait_for_ever(tmp_path: Path, policy: str) -> None:
    with rig(tmp_path, host=32) as tiers:
        fill(tiers, *range(8))
        fill(tiers, *range(10, 18))
    with rig(tmp_path, host=9, policy=policy) as tiers:
        requests = [(tiers.request(*numbers), numbers) for numbers in (range(8), range(10, 18))]
        for _ in range(40):
            for context, numbers in list(requests):
                found = tiers.lookup(context, *numbers)
                if PENDING not in found:
                    requests.remove((context, numbers))
            tiers.step()
            if not requests:
                break
        assert requests == []


def test_a_chunk_that_is_late_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, 1, 2)
    with rig(tmp_path) as tiers:
        with held(monkeypatch, "batch_load_block"):
            context = tiers.request(1, 2)
            assert tiers.lookup(context, 1, 2) == [PENDING] * 2
            tiers.manager.on_schedule_end(ScheduleEndContext((), ()))
            assert len(tiers.disk.files.reading) == 2, "neither can go"
            tiers.clock.now += disk_manager.PATIENCE_S
            assert tiers.lookup(context, 1, 2) == [PENDING] * 2
            tiers.clock.now += 0.1
            assert tiers.lookup(context, 1, 2) == [MISS]
            assert tiers.manager.peek(key(1)) is MISS
            assert tiers.store(context, 1, 2), "its request stores what it computed: nothing, since it is on its way"
        tiers.step()
        tiers.manager.on_schedule_end(ScheduleEndContext((), ()))
        assert not tiers.disk.files.reading
        assert tiers.load(tiers.request(1, 2), 1, 2) == contents(1, 2)


def test_a_slow_disk_does_not_keep_host_memory_from_taking_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for the disk can't be evicted; so only a part of host memory ever waits."""
    with rig(tmp_path, host=8) as tiers:
        with held(monkeypatch, "batch_store_block"):
            context = tiers.request(*range(30))
            for number in range(30):
                assert tiers.store(context, number), "a place was found for each"
            assert tiers.manager.lookup(key(29), context) is HIT
        tiers.step()
        assert sum(tiers.on_disk(*range(30))) == 2, "a quarter of host memory waited, the rest was not copied on"
        fill(tiers, 40)
        assert tiers.on_disk(40) == [True], "and now others are again"


def test_a_job_larger_than_what_may_wait_goes_when_nothing_else_does() -> None:
    backlog = Backlog(2)
    assert backlog.should_store(5)
    backlog.waiting = 1
    assert backlog.should_store(1)
    assert not backlog.should_store(2)
    assert backlog.policy.pop_stores_dropped() == (1, 2)


@POLICIES
def test_conversations_that_came_from_disk_go_from_their_tails(tmp_path: Path, policy: str) -> None:
    """The retention policy knows the order of what was brought back, too."""
    stored(tmp_path, 1, 2, 3, 4)
    with rig(tmp_path, policy=policy) as tiers:
        assert tiers.load(tiers.request(1, 2, 3, 4), 1, 2, 3, 4) == contents(1, 2, 3, 4)
        other = tiers.request(21, 22)
        assert tiers.store(other, 21)
        assert tiers.store(other, 22)
        if policy == "retention":
            resident = [tiers.manager.host._policy.get(key(number)) is not None for number in (1, 2, 3, 4)]
            assert resident == [True, True, False, False]
        tiers.step()
        assert tiers.load(tiers.request(1, 2, 3, 4), 1, 2, 3, 4) == contents(1, 2, 3, 4)


def test_an_idle_server_deletes_what_was_not_used_for_its_time(tmp_path: Path) -> None:
    with rig(tmp_path, ttl_s=0.3) as tiers:
        fill(tiers, 1, 2)
        deadline = time.monotonic() + HANG_S
        while len(tiers.disk.files) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert tiers.on_disk(1, 2) == [False, False]
        assert tiers.load(tiers.request(1, 2), 1, 2) == contents(1, 2), "host memory goes by the scheduler's own clock"


def test_a_quota_that_leaves_no_place_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, 1, 2)
    with rig(tmp_path) as tiers:
        monkeypatch.setattr(tiers.manager.host, "_within_quota", lambda *_: [])
        assert tiers.load(tiers.request(1, 2), 1, 2) == []


def test_a_reset_in_the_middle_of_everything(tmp_path: Path) -> None:
    with rig(tmp_path) as tiers:
        fill(tiers, 1, 2, 3, 4)
        fill(tiers, 11, 12, 13, 14)
        waiting = tiers.request(1, 2)
        assert tiers.lookup(waiting, 1, 2) == [PENDING] * 2
        storing = tiers.request(21)
        assert tiers.store(storing, 21)
        tiers.manager.reset_cache()
        assert tiers.load(waiting, 1, 2) == []
        assert tiers.store(waiting, 1, 2)
        tiers.step()
        assert tiers.load(waiting, 1, 2) == contents(1, 2)


def test_the_metrics_are_those_that_are_defined(tmp_path: Path) -> None:
    from vllm_ext.kv.connector.options import transfer_config
    from vllm_ext.kv.connector.spec import TierSpec

    tier = KvTierConfig(gib=1, disk_dir=str(tmp_path), disk_gib=1)
    defined = TierSpec.build_metric_definitions(transfer_config(tier).kv_connector_extra_config)
    assert defined.keys() > DiskTier.build_metric_definitions({}).keys()
    assert defined.keys() > TierSpec.build_metric_definitions({}).keys()
    with rig(tmp_path, files=2) as tiers:
        fill(tiers, 1, 2, 3)
        assert tiers.on_disk(1, 2, 3) == [False, True, True], "whole rows count"
        assert sum(path.stat().st_size for path in chunk_files(tmp_path)) == 2 * FILE_BYTES
        stats = tiers.manager.get_stats()
        assert stats is not None
        assert set(stats._values) <= set(defined)
        assert stats._values["vllm:kv_offload_disk_bytes"] == {(): 2 * FILE_BYTES}
        assert stats._values[counter_name("evicted")] == {(): 1}


@POLICIES
@pytest.mark.parametrize("seed", range(4))
def test_random_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str, seed: int) -> None:
    """Stores, loads, restarts, resets, failing reads and writes: what is loaded was stored, nobody waits for ever."""
    rng = random.Random(seed)
    real_read, real_write = disk_tier.batch_load_block, disk_tier.batch_store_block
    chains = [[10 * chain + place for place in range(6)] for chain in range(5)]

    def read(paths: list[str], rows: memoryview, offsets: list[int], *args: Any) -> None:
        real_read(paths, rows, offsets, *args)
        if rng.random() < 0.05:
            rows.cast("B")[offsets[0]] ^= 1

    def write(*args: Any) -> None:
        if rng.random() < 0.05:
            raise OSError(errno.ENOSPC, "full")
        real_write(*args)

    monkeypatch.setattr(disk_tier, "batch_load_block", read)
    monkeypatch.setattr(disk_tier, "batch_store_block", write)
    loaded = 0
    for _ in range(4):
        with rig(tmp_path, host=8, files=18, policy=policy) as tiers:
            for _ in range(60):
                chain = rng.choice(chains)[: rng.randint(1, 6)]
                context = tiers.request(*chain)
                found = tiers.load(context, *chain)
                assert found == contents(*chain[: len(found)])
                loaded += len(found)
                for number in chain[len(found) :]:
                    tiers.store(context, number, unreadable=[number] if rng.random() < 0.05 else [])
                if rng.random() < 0.7:
                    tiers.step()
                tiers.manager.on_request_finished(context)
                if rng.random() < 0.02:
                    tiers.manager.reset_cache()
                held = [n for c in chains for n in c if tiers.manager.host._policy.get(key(n)) is not None]
                assert len(held) + tiers.manager.host._get_num_free_chunks() == 8
                assert tiers.disk.files.used_bytes <= 18 * FILE_BYTES
            tiers.step()
            tiers.step()
            assert not tiers.manager.has_pending_work()
            assert tiers.manager.host._num_evictable_cache_chunks + tiers.manager.host._get_num_free_chunks() == 8
    assert loaded > 50


def test_a_conversation_that_is_dropped_goes_from_disk_too(tmp_path: Path) -> None:
    """Else what an administrator dropped, or whose time is over, would come back from there."""
    with rig(tmp_path) as tiers:
        keeper = Keeper(tiers.manager)
        conversation = keeper.book.enter("a", "", [], 0.0)
        context = tiers.request(1, 2)
        context.set_state(Turn(conversation))
        assert tiers.store(context, 1, 2)
        tiers.step()
        fill(tiers, 11)
        assert tiers.on_disk(1, 2, 11) == [True, True, True]
        assert keeper.drop(conversation) == 2
        tiers.step()
        assert tiers.on_disk(1, 2, 11) == [False, False, True]
        assert len(chunk_files(tmp_path)) == 1
        assert tiers.manager.host._get_num_free_chunks() == tiers.manager.num_chunks - 1
        assert tiers.lookup(tiers.request(1, 2), 1, 2) == [MISS]
