"""Workers of both kinds: who goes first, what is waited for and reported, and what becomes of failures.

The CPU's copies in a thread; CUDA's leave them to a device, which here does its work late (`fake_device`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kv.cuda.worker import CudaTierWorker, cuda_worker
from vllm_ext.kv.host.copies import group_transfers
from vllm_ext.kv.host.report import WorkerReport
from vllm_ext.kv.host.worker import TierWorker

from .fake_device import FakeDevice, PlainCodec
from .tier_worker_parts import LAYOUT, Stepped, codec, device, geometry, host, random_kv, stepped_worker

KINDS = pytest.mark.parametrize("kind", ["cpu", "cuda"])
SIZE = geometry(LOSSLESS)
NUM_CHUNKS = 6


def made(kind: str, kv: list[torch.Tensor], groups: Any = ((0, 1),), device: FakeDevice | None = None) -> Any:
    """A worker over caches and a pool of six chunks."""
    if kind == "cpu":
        return TierWorker(codec(LOSSLESS, kv, num_chunks=NUM_CHUNKS), groups, chunk_bytes=SIZE.chunk_bytes)
    pool = torch.full((NUM_CHUNKS, SIZE.chunk_bytes), 0xAB, dtype=torch.uint8)
    copies = PlainCodec(kv, pool, SIZE, 2)
    return CudaTierWorker(copies, groups, chunk_bytes=SIZE.chunk_bytes, device=device or FakeDevice())


def ended(worker: Any) -> list[int]:
    """Return the jobs that ended, all of which vLLM takes for done: it knows nothing else."""
    results = worker.get_finished()
    assert all(result.success for result in results)
    return [result.job_id for result in results]


@KINDS
def test_kv_goes_to_the_host_and_comes_back(kind: str) -> None:
    kv = random_kv()
    before = [tensor.clone() for tensor in kv]
    worker = made(kind, kv)
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
        assert tensor[8].equal(original[8])
    worker.shutdown()


@KINDS
def test_groups_of_layers_have_their_own_tensors(kind: str) -> None:
    kv = random_kv()
    before = [tensor.clone() for tensor in kv]
    worker = made(kind, kv, groups=((0, 1), (1,)))
    both = GPULoadStoreSpec([0, 1, 4, 5, 6], group_sizes=[2, 3], block_indices=[0, 1])
    worker.submit_store(1, both, host([0, 1, 2, 3, 4]))
    worker.wait({1})
    back = GPULoadStoreSpec([10, 11], group_sizes=[0, 2], block_indices=[0, 2])
    worker.submit_load(2, host([3, 4]), back)
    worker.wait({2})
    assert not worker.take_report().chunks
    assert kv[1][10].equal(before[1][5])
    assert kv[1][11].equal(before[1][6])
    assert kv[0].equal(before[0])
    worker.shutdown()


@KINDS
@pytest.mark.parametrize(
    ("chunks", "blocks"), [([1, 2, 3], [1, 2]), ([1], [99]), ([99], [1])], ids=["do not fit", "block", "chunk"]
)
def test_a_job_that_cannot_be_done_is_over_and_failed(kind: str, chunks: list[int], blocks: list[int]) -> None:
    worker = made(kind, random_kv())
    assert worker.submit_load(1, host(chunks), device(blocks))
    assert worker.submit_store(2, device(blocks), host(chunks))
    worker.wait({1, 2})
    assert ended(worker) == [1, 2]
    report = worker.take_report()
    assert (report.chunks, report.blocks, report.load_jobs) == (set(chunks), set(blocks), {1})
    worker.submit_store(3, device([0]), host([1]))
    worker.wait({3})
    assert ended(worker) == [3], "and the worker lives on"
    assert not worker.take_report().chunks, "each is told once"
    worker.shutdown()


@KINDS
def test_shutdown_finishes_what_was_submitted(kind: str) -> None:
    worker = made(kind, random_kv(), device=FakeDevice(None))
    worker.submit_store(1, device([1]), host([1]))
    worker.shutdown()
    assert ended(worker) == [1]


def test_a_job_is_reported_when_the_device_is_through_and_not_before() -> None:
    late = FakeDevice(None)
    worker = made("cuda", random_kv(), device=late)
    worker.submit_store(1, device([1]), host([1]))
    worker.wait({7})  # never submitted
    assert ended(worker) == []
    late.finish()
    assert ended(worker) == [1]


def test_no_bandwidth_is_learned_from_a_failed_load() -> None:
    failing = FakeDevice()
    failing.fails_at = {4}
    worker = made("cuda", random_kv(), device=failing)
    worker.submit_load(1, host([4]), device([1]))
    worker.submit_load(2, host([5, 2]), device([2, 3], index=1))
    worker.wait({1, 2})
    results = {result.job_id: (result.transfer_size, result.transfer_time) for result in worker.get_finished()}
    assert results.keys() == {1, 2}
    assert results[2] == (None, None)
    assert worker.take_report() == WorkerReport({5, 2}, {2, 3}, {2})


def test_eight_bits_need_a_layout() -> None:
    size = geometry(QUANTISED)
    pool = torch.zeros(2, size.chunk_bytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="layout"):
        cuda_worker(random_kv(), [[0, 1]], pool, size, None)


# --- the thread -----------------------------------------------------------------------------------------------------


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    yield from stepped_worker(1)


def test_waiting_is_for_the_jobs_named_only(stepped: Stepped) -> None:
    copies, worker = stepped
    worker.submit_store(1, device([1]), host([1]))
    worker.wait({7, 8})  # never submitted
    done = threading.Event()
    waiter = threading.Thread(target=lambda: (worker.wait({1}), done.set()))
    waiter.start()
    assert not done.wait(0.05)
    assert worker.get_finished() == []
    copies.go()
    waiter.join(10)
    assert done.is_set()


def test_a_failed_store_leaves_chunks_that_must_not_be_read(stepped: Stepped) -> None:
    copies, worker = stepped
    copies.go()
    copies.fails, copies.unreadable = {(0, 5)}, {8}
    worker.submit_store(1, device([1]), host([5]))
    worker.submit_store(2, device([2, 3]), host([8, 9]))
    worker.submit_store(3, device([4]), host([4]))
    worker.wait({1, 2, 3})
    report = worker.take_report()
    assert (report.chunks, report.blocks, report.load_jobs) == ({5, 8}, set(), set())


def test_a_worker_tells_once_what_took_time(stepped: Stepped) -> None:
    copies, worker = stepped
    worker.submit_store(1, device([1]), host([1]))
    copies.wait_for_calls()
    copies.go()
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
