"""vLLM's jobs on a device that does its work late: what is reported, and what becomes of failures."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from vllm_ext.config.kv_tier import LOSSLESS, QUANTISED
from vllm_ext.kv.cuda.worker import CudaTierWorker, cuda_worker
from vllm_ext.kv.host.report import WorkerReport

from .fake_device import FakeDevice, PlainCodec
from .tier_worker_parts import LAYOUT, device, geometry, host, random_kv

SIZE = geometry(LOSSLESS)


class Worker:
    def __init__(self, seed: int | None = 0, groups: tuple[tuple[int, ...], ...] = ((0, 1),)) -> None:
        self.kv = random_kv()
        self.before = [tensor.clone() for tensor in self.kv]
        self.device = FakeDevice(seed)
        pool = torch.full((6, SIZE.chunk_bytes), 0xAB, dtype=torch.uint8)
        self.tier = CudaTierWorker(
            PlainCodec(self.kv, pool, SIZE, 2), groups, chunk_bytes=SIZE.chunk_bytes, device=self.device
        )


def test_kv_goes_to_the_host_and_comes_back() -> None:
    worker = Worker()
    assert worker.tier.submit_store(1, device([3, 7]), host([4, 1]))
    worker.tier.wait({1})
    assert worker.tier.submit_load(2, host([1]), device([9], index=3))
    worker.tier.wait({2})
    results = worker.tier.get_finished()
    assert [(result.job_id, result.success) for result in results] == [(1, True), (2, True)]
    assert [result.transfer_size for result in results] == [4 * LAYOUT.page_bytes, 2 * LAYOUT.page_bytes]
    assert all(result.transfer_time and result.transfer_time > 0 for result in results)
    assert worker.tier.get_finished() == []
    assert worker.tier.take_report() == WorkerReport()
    for tensor, original in zip(worker.kv, worker.before, strict=True):
        assert tensor[9].equal(original[7])
        assert tensor[8].equal(original[8])


def test_groups_of_layers_have_their_own_tensors() -> None:
    worker = Worker(groups=((0, 1), (1,)))
    both = GPULoadStoreSpec([0, 1, 4, 5, 6], group_sizes=[2, 3], block_indices=[0, 1])
    worker.tier.submit_store(1, both, host([0, 1, 2, 3, 4]))
    worker.tier.wait({1})
    back = GPULoadStoreSpec([10, 11], group_sizes=[0, 2], block_indices=[0, 2])
    worker.tier.submit_load(2, host([3, 4]), back)
    worker.tier.wait({2})
    assert worker.tier.take_report() == WorkerReport()
    assert worker.kv[1][10].equal(worker.before[1][5])
    assert worker.kv[1][11].equal(worker.before[1][6])
    assert worker.kv[0].equal(worker.before[0])


def test_a_job_is_reported_when_the_device_is_through_and_not_before() -> None:
    worker = Worker(seed=None)
    worker.tier.submit_store(1, device([1]), host([1]))
    worker.tier.wait({7})  # never submitted
    assert worker.tier.get_finished() == []
    worker.device.finish()
    assert [result.job_id for result in worker.tier.get_finished()] == [1]


def test_a_failed_load_names_its_blocks_and_its_chunks() -> None:
    worker = Worker()
    worker.device.fails_at = {4}
    worker.tier.submit_load(1, host([4]), device([1]))
    worker.tier.submit_load(2, host([5, 2]), device([2, 3], index=1))
    worker.tier.wait({1, 2})
    results = {result.job_id: result for result in worker.tier.get_finished() if result.success}
    assert set(results) == {1, 2}, "vLLM knows nothing else"
    assert (results[2].transfer_size, results[2].transfer_time) == (None, None), "no bandwidth is learned from it"
    assert worker.tier.take_report() == WorkerReport({5, 2}, {2, 3}, {2})
    assert worker.tier.take_report() == WorkerReport(), "each is told once"


@pytest.mark.parametrize(
    ("chunks", "blocks"), [([1, 2, 3], [1, 2]), ([1], [99]), ([99], [1])], ids=["do not fit", "block", "chunk"]
)
def test_a_job_that_cannot_begin_is_over_and_failed(chunks: list[int], blocks: list[int]) -> None:
    worker = Worker()
    assert worker.tier.submit_load(1, host(chunks), device(blocks))
    assert worker.tier.submit_store(2, device(blocks), host(chunks))
    assert [(result.job_id, result.success) for result in worker.tier.get_finished()] == [(1, True), (2, True)]
    assert worker.tier.take_report() == WorkerReport(set(chunks), set(blocks), {1})
    worker.tier.submit_store(3, device([0]), host([1]))
    worker.tier.wait({3})
    assert [result.job_id for result in worker.tier.get_finished()] == [3], "and the worker lives on"


def test_shutdown_finishes_what_was_submitted() -> None:
    worker = Worker(seed=None)
    worker.tier.submit_store(1, device([1]), host([1]))
    worker.tier.shutdown()
    assert [result.job_id for result in worker.tier.get_finished()] == [1]


def test_eight_bits_need_a_layout() -> None:
    size = geometry(QUANTISED)
    pool = torch.zeros(2, size.chunk_bytes, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="layout"):
        cuda_worker(random_kv(), [[0, 1]], pool, size, None)
