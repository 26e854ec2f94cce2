"""The worker on a real GPU: beside a stream that computes, and what waiting means."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vllm_ext.config.kv_tier import LOSSLESS
from vllm_ext.kv.cuda.codec import Piece, RawCudaCodec
from vllm_ext.kv.cuda.device import CudaDevice, PinnedMemory
from vllm_ext.kv.cuda.transfers import Depth, Transfers
from vllm_ext.kv.host.geometry import TierGeometry
from vllm_ext.kv.host.report import WorkerReport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LAYERS, BLOCKS, PAGE, CHUNKS = 4, 64, 65536, 16
LONG = 2_000_000_000
"""Cycles: about a second."""


class Tier:
    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.kv = [torch.zeros(BLOCKS, PAGE, dtype=torch.int8, device=device) for _ in range(LAYERS)]
        size = LAYERS * PAGE
        geometry = TierGeometry(bits=LOSSLESS, chunk_bytes=size, record_bytes=0)
        self.pool = torch.zeros(CHUNKS, size, dtype=torch.uint8)
        self.pinned = PinnedMemory(self.pool)
        assert self.pinned.pinned
        self.codec = RawCudaCodec(self.kv, self.pool, geometry, staging_bytes=2 * size)
        self.codec.prepare([range(LAYERS)])
        self.transfers = Transfers(CudaDevice(device), self.codec)
        torch.cuda.synchronize()

    def write(self, block: int, value: int) -> None:
        for tensor in self.kv:
            tensor[block].fill_(value)

    def submit(self, job: int, chunks: list[int], first_block: int, *, is_load: bool) -> None:
        blocks = first_block + np.arange(len(chunks))
        pieces = [
            Piece(tuple(range(LAYERS)), np.array(chunks[i : i + 2]), blocks[i : i + 2])
            for i in range(0, len(chunks), 2)
        ]
        self.transfers.submit(job, pieces, is_load=is_load)


@pytest.fixture
def tier() -> Iterator[Tier]:
    made = Tier()
    yield made
    made.transfers.drain()
    made.pinned.close()


def test_a_store_sees_what_the_engine_had_launched_before_it(tier: Tier) -> None:
    torch.cuda._sleep(LONG)
    for block in range(10):
        tier.write(block, block + 1)
    tier.submit(1, [3, 4, 5, 9, 0], 0, is_load=False)
    assert tier.transfers.take_ended() == []
    assert not tier.pool.any(), "nothing is copied before it is written"
    tier.transfers.wait({1})
    for row, chunk in enumerate((3, 4, 5, 9, 0)):
        assert set(tier.pool[chunk].tolist()) == {row + 1}
    (ended,) = tier.transfers.take_ended()
    assert not ended.failed
    assert ended.seconds is not None
    assert ended.seconds > 0


def test_a_store_is_through_while_the_engine_computes_on(tier: Tier) -> None:
    tier.write(0, 7)
    tier.submit(1, [2], 0, is_load=False)
    for _ in range(4):
        torch.cuda._sleep(LONG)
    computed = torch.cuda.Event()
    computed.record()
    tier.transfers.wait({1})
    assert not computed.query(), "the engine's stream still computes"
    assert set(tier.pool[2].tolist()) == {7}


def test_a_load_writes_after_the_engine_and_before_what_comes_once_it_is_reported(tier: Tier) -> None:
    tier.pool[6].fill_(9)
    torch.cuda._sleep(LONG)
    tier.write(20, 0)
    tier.submit(1, [6], 20, is_load=True)
    tier.transfers.wait({1})
    seen = [int(tensor[20].sum()) for tensor in tier.kv]
    assert seen == [9 * PAGE] * LAYERS
    assert [job.failed for job in tier.transfers.take_ended()] == [False]


def test_many_jobs_both_ways_keep_their_bytes(tier: Tier) -> None:
    for turn in range(20):
        for block in range(32):
            tier.write(block, turn + block)
        tier.submit(3 * turn, list(range(15)), 0, is_load=False)
        tier.transfers.wait({3 * turn})
        tier.submit(3 * turn + 1, list(range(15)), 32, is_load=True)
        tier.transfers.drain()
        for tensor in tier.kv:
            assert tensor[32:47].equal(tensor[:15])
    assert tier.transfers.take_report() == WorkerReport()


@pytest.mark.parametrize("is_load", [False, True])
def test_a_burst_does_not_hold_up_the_thread_that_submits_it(tier: Tier, is_load: bool) -> None:
    """While the engine computes, no copy is through, and all that may wait on the device does."""
    depth = Depth()
    for job in range(depth.pieces):  # what is done once per process is not part of a burst
        tier.submit(job, [job % CHUNKS], 0, is_load=is_load)
    tier.transfers.drain()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    computed = torch.cuda.Event()
    computed.record()
    for job in range(depth.pieces):
        tier.submit(1000 + job, [job % CHUNKS], 0, is_load=is_load)
    assert not computed.query(), "the thread came back while the engine computes"
    tier.transfers.drain()
    assert tier.transfers.take_report() == WorkerReport()


@pytest.mark.parametrize("is_load", [False, True])
def test_a_job_beyond_the_depth_ends_though_nobody_waits_for_it(tier: Tier, is_load: bool) -> None:
    pieces = [Piece(tuple(range(LAYERS)), np.array([n % CHUNKS]), np.array([n % BLOCKS])) for n in range(300)]
    tier.transfers.submit(1, pieces, is_load=is_load)
    ended = []
    while not ended:
        torch.cuda.synchronize()
        ended = tier.transfers.take_ended()
    assert [(job.failed, job.num_chunks) for job in ended] == [(False, 300)]
