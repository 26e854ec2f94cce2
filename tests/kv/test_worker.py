"""The thread that copies: who goes first, what is waited for, and what becomes of failures."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from vllm_ext.config.kv_tier import LOSSLESS
from vllm_ext.kv.host.copies import group_transfers
from vllm_ext.kv.host.report import WorkerReport
from vllm_ext.kv.host.worker import TierWorker

from .tier_worker_parts import LAYOUT, SlowCodec, codec, device, host, random_kv


@pytest.fixture
def slow() -> Iterator[tuple[SlowCodec, TierWorker]]:
    copies = SlowCodec()
    worker = TierWorker(copies, [[0]], chunk_bytes=100)
    yield copies, worker
    copies.may_go.set()
    worker.shutdown()


def test_kv_goes_to_the_host_and_comes_back() -> None:
    kv = random_kv()
    before = [tensor.clone() for tensor in kv]
    worker = TierWorker(codec(LOSSLESS, kv), [[0, 1]], chunk_bytes=2 * LAYOUT.page_bytes)
    assert worker.submit_store(1, device([3, 7]), host([4, 1]))
    worker.wait({1})
    assert worker.submit_load(2, host([1]), device([9], index=3))
    worker.wait({2})
    results = worker.get_finished()
    assert [(result.job_id, result.success) for result in results] == [(1, True), (2, True)]
    assert [result.transfer_size for result in results] == [4 * LAYOUT.page_bytes, 2 * LAYOUT.page_bytes]
    assert all(result.transfer_time > 0 for result in results)
    assert worker.get_finished() == []
    assert not worker.take_report().chunks
    for tensor, original in zip(kv, before, strict=True):
        assert tensor[9].equal(original[7])
    worker.shutdown()


def test_loads_go_before_the_stores_that_wait(slow: tuple[SlowCodec, TierWorker]) -> None:
    copies, worker = slow
    worker.submit_store(1, device([1]), host([1]))
    assert copies.came.wait(10)
    for job, submit in ((2, worker.submit_store), (3, worker.submit_store)):
        submit(job, device([job]), host([job]))
    worker.submit_load(4, host([4]), device([4]))
    copies.may_go.set()
    worker.wait({1, 2, 3, 4})
    assert copies.calls == [("store", [1]), ("load", [4]), ("store", [2]), ("store", [3])]


def test_waiting_is_for_the_jobs_named_only(slow: tuple[SlowCodec, TierWorker]) -> None:
    copies, worker = slow
    worker.submit_store(1, device([1]), host([1]))
    worker.wait({7, 8})  # never submitted
    done = threading.Event()
    waiter = threading.Thread(target=lambda: (worker.wait({1}), done.set()))
    waiter.start()
    assert not done.wait(0.05)
    assert worker.get_finished() == []
    copies.may_go.set()
    waiter.join(10)
    assert done.is_set()


def test_a_failed_load_names_its_blocks_and_its_chunk(slow: tuple[SlowCodec, TierWorker]) -> None:
    copies, worker = slow
    copies.may_go.set()
    copies.fails = {5}
    worker.submit_load(1, host([4]), device([1]))
    worker.submit_load(2, host([5, 6]), device([2, 3]))
    worker.wait({1, 2})
    assert {result.job_id for result in worker.get_finished() if result.success} == {1, 2}, "vLLM knows nothing else"
    report = worker.take_report()
    assert report.chunks == {5, 6}
    assert report.blocks == {2, 3}
    assert report.load_jobs == {2}
    assert not worker.take_report().chunks, "each is told once"


def test_a_failed_store_leaves_chunks_that_must_not_be_read(slow: tuple[SlowCodec, TierWorker]) -> None:
    copies, worker = slow
    copies.may_go.set()
    copies.fails, copies.unreadable = {5}, {8}
    worker.submit_store(1, device([1]), host([5]))
    worker.submit_store(2, device([2, 3]), host([8, 9]))
    worker.submit_store(3, device([4]), host([4]))
    worker.wait({1, 2, 3})
    report = worker.take_report()
    assert (report.chunks, report.blocks, report.load_jobs) == ({5, 8}, set(), set())
    assert "store" in {direction for direction, _ in copies.calls}, "and the thread lives on"


def test_shutdown_finishes_what_was_submitted(slow: tuple[SlowCodec, TierWorker]) -> None:
    copies, worker = slow
    copies.may_go.set()
    worker.submit_store(1, device([1]), host([1]))
    worker.shutdown()
    assert [result.job_id for result in worker.get_finished()] == [1]


def test_a_worker_tells_once_what_took_time(slow: tuple[SlowCodec, TierWorker]) -> None:
    copies, worker = slow
    worker.submit_store(1, device([1]), host([1]))
    assert copies.came.wait(10)
    copies.may_go.set()
    worker.submit_load(2, host([1]), device([2]))
    worker.wait({1, 2})
    report = worker.take_report()
    assert min(report.codec_s.values()) > 0
    assert set(report.wait_s.values()) == {0}, "that is for the engine's thread to say"
    assert worker.take_report() == WorkerReport()


@pytest.mark.parametrize(
    ("blocks", "sizes", "chunks", "found"),
    [
        ([7, 3], [2], [10, 11], [(0, [10, 11], [7, 3])]),
        ([1, 2, 8, 9, 10], [2, 0, 3], [30, 33, 31, 32, 5], [(0, [30, 33], [1, 2]), (2, [31, 32, 5], [8, 9, 10])]),
    ],
    ids=["one group", "one without blocks is left out"],
)
def test_groups_follow_each_other_a_chunk_for_each_block(
    blocks: list[int], sizes: list[int], chunks: list[int], found: list[tuple[int, list[int], list[int]]]
) -> None:
    spec = GPULoadStoreSpec(blocks, group_sizes=sizes, block_indices=[0] * len(sizes))
    parts = group_transfers(spec, host(chunks))
    assert [(group, chunks.tolist(), blocks.tolist()) for group, chunks, blocks in parts] == found


@pytest.mark.parametrize("chunks", [[30], [30, 31, 32, 33, 34]], ids=["too few", "too many"])
def test_lists_that_do_not_fit_are_refused(chunks: list[int]) -> None:
    with pytest.raises(ValueError, match=rf"group_sizes=.*: must add up to the transfer's 4 blocks and {len(chunks)}"):
        group_transfers(device([1, 2, 3, 4]), host(chunks))
