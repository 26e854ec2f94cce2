"""Which copy waits for what: the bytes are right in whatever order a device does its work."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from vllm_ext.config.kv_tier import LOSSLESS
from vllm_ext.kv.cuda.codec import STAGING_BYTES, Piece, pieces_of
from vllm_ext.kv.cuda.transfers import Depth, Transfers
from vllm_ext.kv.host.geometry import TierGeometry
from vllm_ext.kv.host.report import WorkerReport

from .fake_device import REFUSED, FakeDevice, PlainCodec, TimedCodec, TimedDevice

TENSORS, BLOCKS, CHUNKS, PAGE = 2, 24, 12, 8


class Tier:
    """KV, a pool and what moves between them; a block's bytes are all its number of the day."""

    def __init__(
        self, device: FakeDevice, *, chunks_per_piece: int = 2, loads_first: bool = True, depth: Depth | None = None
    ) -> None:
        self.device = device
        self.kv = [torch.zeros(BLOCKS, PAGE, dtype=torch.int8) for _ in range(TENSORS)]
        size = TENSORS * PAGE
        geometry = TierGeometry(bits=LOSSLESS, chunk_bytes=size, record_bytes=0)
        self.pool = torch.full((CHUNKS, size), 0xAB, dtype=torch.uint8)
        self.codec = PlainCodec(self.kv, self.pool, geometry, chunks_per_piece)
        self.codec.prepare([range(TENSORS)])
        self.chunks_per_piece = chunks_per_piece
        self.transfers = Transfers(device, self.codec, loads_first=loads_first, depth=depth)

    def fill(self, block: int, number: int) -> None:
        """Let the engine write a block, some time."""
        for tensor in self.kv:
            self.device.compute(lambda tensor=tensor: tensor[block].fill_(number))

    def submit(self, job: int, chunks: list[int], blocks: list[int], *, is_load: bool) -> None:
        self.transfers.submit(job, self.pieces(chunks, blocks), is_load=is_load)

    def pieces(self, chunks: list[int], blocks: list[int]) -> Iterator[Piece]:
        for i in range(0, len(chunks), self.chunks_per_piece):
            rows = slice(i, i + self.chunks_per_piece)
            yield Piece(tuple(range(TENSORS)), np.array(chunks[rows]), np.array(blocks[rows]))

    def holds(self, block: int) -> set[int]:
        return {value for tensor in self.kv for value in tensor[block].tolist()}


class Serving:
    """An engine at random, which keeps to what vLLM's connector guarantees, and knows what must be where."""

    def __init__(self, tier: Tier, seed: int) -> None:
        self.tier, self.random = tier, random.Random(seed)
        self.free_blocks, self.free_chunks = set(range(BLOCKS)), set(range(CHUNKS))
        self.stored: dict[int, int] = {}
        self.jobs: dict[int, tuple[bool, list[int], list[int]]] = {}
        self.loaded: dict[int, int] = {}
        self.number = 0
        self.wrong = 0

    def step(self) -> None:
        action = self.random.choice((self.store, self.store, self.load, self.load, self.report, self.wait))
        action()

    def store(self) -> None:
        count = self.random.randint(1, 5)
        if len(self.free_blocks) < count or len(self.free_chunks) < count:
            return
        blocks = self.random.sample(sorted(self.free_blocks), count)
        chunks = self.random.sample(sorted(self.free_chunks), count)
        for chunk, block in zip(chunks, blocks, strict=True):
            self.number = self.number % 100 + 1
            self.tier.fill(block, self.number)
            self.stored[chunk] = self.number
        self.begin(False, chunks, blocks)

    def load(self) -> None:
        ready = sorted(chunk for chunk in self.free_chunks if chunk in self.stored)
        count = min(self.random.randint(1, 4), len(ready), len(self.free_blocks))
        if not count:
            return
        chunks = self.random.sample(ready, count)
        blocks = self.random.sample(sorted(self.free_blocks), count)
        for block in blocks:
            self.tier.fill(block, 0)  # as vLLM clears new blocks
        self.begin(True, chunks, blocks)

    def begin(self, is_load: bool, chunks: list[int], blocks: list[int]) -> None:
        job = len(self.jobs)
        self.jobs[job] = (is_load, chunks, blocks)
        self.free_chunks -= set(chunks)
        self.free_blocks -= set(blocks)
        self.tier.submit(job, chunks, blocks, is_load=is_load)

    def report(self) -> None:
        for ended in self.tier.transfers.take_ended():
            assert not ended.failed
            is_load, chunks, blocks = self.jobs[ended.job_id]
            for chunk, block in zip(chunks, blocks, strict=True):
                self.wrong += is_load and self.tier.holds(block) != {self.stored[chunk]}
                self.tier.fill(block, 111)  # whoever gets the block writes it
            self.free_chunks |= set(chunks)
            self.free_blocks |= set(blocks)

    def wait(self) -> None:
        jobs = self.random.sample(sorted(self.jobs), min(2, len(self.jobs)))
        self.tier.transfers.wait(set(jobs))


def serve(device: FakeDevice, seed: int, steps: int = 150, depth: Depth | None = None) -> int:
    """Return how many blocks were loaded with wrong bytes."""
    serving = Serving(Tier(device, chunks_per_piece=1 + seed % 3, loads_first=seed % 4 > 0, depth=depth), seed)
    for _ in range(steps):
        serving.step()
    serving.tier.transfers.drain()
    serving.report()
    assert len(serving.free_blocks) == BLOCKS
    assert len(serving.free_chunks) == CHUNKS
    assert sum(is_load for is_load, _, _ in serving.jobs.values()) > 3
    return serving.wrong


@pytest.mark.parametrize("seed", range(25))
def test_what_is_loaded_is_what_was_stored(seed: int) -> None:
    assert serve(FakeDevice(seed), seed, depth=Depth(pieces=1 + seed % 4, copies=1 + seed % 3)) == 0


@pytest.mark.parametrize("seed", range(5))
def test_a_device_that_does_only_what_is_waited_for_is_served_too(seed: int) -> None:
    assert serve(FakeDevice(None), seed) == 0


def test_these_tests_notice_a_device_that_does_not_wait() -> None:
    assert all(serve(FakeDevice(seed, deaf=True), seed) > 0 for seed in range(5))


class Forgetful(FakeDevice):
    """Ignores one kind of waiting: by which call of a piece's it is asked for."""

    def __init__(self, seed: int, forgets: str) -> None:
        super().__init__(seed)
        self.forgets = forgets
        self.careless = True

    def wait(self, stream: object, event: object) -> None:
        recorded_in = next((s for s in self.streams if ("record", event) in s.queue), None)  # type: ignore[comparison-overlap]
        number = self.streams.index(stream)  # type: ignore[arg-type]
        first, engine = number % 2 == 1, recorded_in is self.engine
        kind = "engine" if engine else ("buffer or loads" if first else "step")
        if kind != self.forgets:
            super().wait(stream, event)  # type: ignore[arg-type]


@pytest.mark.parametrize("forgets", ["engine", "buffer or loads", "step"])
def test_these_tests_notice_each_kind_of_waiting_left_out(forgets: str) -> None:
    assert sum(serve(Forgetful(seed, forgets), seed) for seed in range(10)) > 0


def test_waiting_is_for_the_jobs_named_only() -> None:
    tier = Tier(FakeDevice(None))
    for job in range(3):
        tier.submit(job, [job], [job], is_load=False)
    tier.transfers.wait({0, 99})
    assert [ended.job_id for ended in tier.transfers.take_ended()] == [0]
    tier.transfers.drain()
    assert [ended.job_id for ended in tier.transfers.take_ended()] == [1, 2]


def test_who_is_waited_for_overtakes_those_that_wait_for_room() -> None:
    tier = Tier(FakeDevice(None), depth=Depth(pieces=1))
    for job in range(4):
        tier.submit(job, [job], [job], is_load=False)
    tier.transfers.wait({3})
    assert [ended.job_id for ended in tier.transfers.take_ended()] == [0, 3], "job 0 is on the device already"


@pytest.mark.parametrize(
    ("depth", "pieces"),
    [
        (Depth(), 96),
        (Depth(pieces=7), 7),
        (Depth(num_bytes=5 * TENSORS * PAGE), 5),
        (Depth(copies=3), 3),
        (Depth(num_bytes=1), 1),
    ],
    ids=["default", "pieces", "bytes", "copies", "less than a piece"],
)
def test_no_more_than_the_depth_is_on_the_device_at_once(depth: Depth, pieces: int) -> None:
    tier = Tier(FakeDevice(None), chunks_per_piece=1, depth=depth)
    for job in range(20):
        tier.submit(job, list(range(10)), list(range(10)), is_load=False)
    assert tier.device.launches == 2 * pieces
    tier.transfers.drain()
    assert len(tier.transfers.take_ended()) == 20
    assert tier.device.launches == 2 * 200


def test_a_piece_of_more_copies_than_the_depth_goes_alone() -> None:
    tier = Tier(FakeDevice(None), chunks_per_piece=3, depth=Depth(copies=2))
    tier.submit(1, [0, 2, 4, 6, 8, 10], [0, 1, 2, 3, 4, 5], is_load=False)
    assert tier.device.launches == 2, "the second piece waits"
    tier.submit(2, [7], [7], is_load=False)
    tier.transfers.drain()
    assert [(ended.job_id, ended.failed) for ended in tier.transfers.take_ended()] == [(1, False), (2, False)]


@pytest.mark.parametrize("name", ["num_bytes", "copies", "pieces"])
def test_a_depth_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        Depth(**{name: 0})


def test_the_drivers_queues_hold_all_that_may_be_on_the_device() -> None:
    """Jobs of one piece, loads first, so that all that can wait does; nothing is done of it."""
    device, depth = FakeDevice(None), Depth()
    tier = Tier(device, chunks_per_piece=1, depth=depth)
    for job in range(2 * 200):
        tier.submit(job, [0], [0], is_load=job < 200)
    assert device.launches == 2 * 2 * depth.pieces
    load_link, load_kernels, store_kernels, store_link = (len(stream.queue) for stream in device.streams[1:])
    ids_and_flags = 2 * depth.pieces
    assert max(load_kernels, store_kernels) + ids_and_flags < 1024
    assert max(load_link, store_link) + ids_and_flags // 2 + depth.copies - depth.pieces < 1024


def test_a_gib_of_full_pieces_may_be_on_the_device() -> None:
    assert Depth().slots(STAGING_BYTES) * STAGING_BYTES == 2**30


GIB = 2**30


def link_share(period_s: float, *, is_load: bool, depth: Depth | None = None) -> float:
    """Return how much of its link a job of 4 GiB uses if the engine comes by at a period and waits for nothing."""
    device = TimedDevice()
    codec = TimedCodec(device)
    transfers = Transfers(device, codec, depth=depth)
    chunks = np.random.default_rng(0).permutation(4 * codec.chunks_per_piece * GIB // codec.piece_bytes)
    transfers.submit(1, pieces_of(codec, (0,), chunks, chunks), is_load=is_load)
    while not (ended := transfers.take_ended()):
        device.now += period_s
    (job,) = ended
    assert not job.failed
    assert job.seconds is not None
    return 4 * GIB / job.seconds / codec.LINK_BYTES_PER_S


@pytest.mark.parametrize("period_s", [0.006, 0.020])
@pytest.mark.parametrize("is_load", [False, True])
def test_a_burst_keeps_the_link_busy_though_it_is_looked_at_once_per_step(period_s: float, is_load: bool) -> None:
    """With 256 MiB on the device, steps of 20 ms left three quarters of the link idle."""
    assert 0.9 <= link_share(period_s, is_load=is_load) <= 1
    assert link_share(0.020, is_load=is_load, depth=Depth(num_bytes=GIB // 4)) < 0.3, "this test notices it"


@pytest.mark.parametrize("is_load", [False, True])
def test_chunks_that_lie_apart_do_not_flood_the_device_with_copies(is_load: bool) -> None:
    """As with small chunks, or where several workers share the pool."""
    device = TimedDevice()
    codec = TimedCodec(device, chunk_bytes=128 * 2**10, chunks_per_piece=128)
    transfers = Transfers(device, codec)
    apart = 2 * np.arange(2**13)
    transfers.submit(1, pieces_of(codec, (0,), apart, apart), is_load=is_load)
    assert sum(codec.copies(piece) for piece in codec.sent) == Depth().copies
    transfers.drain()
    assert sum(codec.copies(piece) for piece in codec.sent) == len(apart)


@pytest.mark.parametrize(("loads_first", "ended"), [(True, {0, 1, 2}), (False, {0, 2})])
def test_a_store_waits_for_the_loads_before_it_unless_that_is_switched_off(loads_first: bool, ended: set[int]) -> None:
    tier = Tier(FakeDevice(None), loads_first=loads_first)
    for job, is_load in ((0, False), (1, True), (2, False)):
        tier.submit(job, [job], [job], is_load=is_load)
    tier.transfers.wait({2})
    assert {job.job_id for job in tier.transfers.take_ended()} == ended


def test_a_load_reads_the_pool_while_the_engine_computes() -> None:
    """Its time does not count what it waits for the engine."""
    device = FakeDevice(None)
    tier = Tier(device)
    for _ in range(1000):
        tier.fill(5, 1)
    tier.submit(1, [0], [5], is_load=True)
    tier.transfers.drain()
    (ended,) = tier.transfers.take_ended()
    assert device.now > 1000
    assert ended.seconds is not None
    assert 0 < ended.seconds < 20


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("is_load", [False, True])
def test_a_launch_that_fails_costs_its_job_and_nobody_else(at: int, is_load: bool) -> None:
    """The job is of three pieces, of two launches each. It ends only when what was launched of it is through."""
    device = FakeDevice(3)
    device.fails_at = {at}
    tier = Tier(device)
    chunks, blocks = [0, 1, 2, 3, 4], [1, 3, 4, 7, 9]
    tier.submit(1, chunks, blocks, is_load=is_load)
    tier.fill(20, 42)
    tier.submit(2, [9], [20], is_load=False)
    tier.submit(3, [], [], is_load=True)
    tier.transfers.drain()
    ended = {job.job_id: job.failed for job in tier.transfers.take_ended()}
    assert ended == {1: True, 2: False, 3: False}
    assert not any(stream.queue for stream in device.streams[1:]), "nothing is under way"
    failures = tier.transfers.take_report()
    assert failures.chunks == set(chunks)
    assert failures.blocks == ({1, 3, 4, 7, 9} if is_load else set())
    assert failures.load_jobs == ({1} if is_load else set())
    assert set(tier.pool[9].tolist()) == {42}


def test_a_lost_device_fails_all_jobs_and_raises_nowhere() -> None:
    device = FakeDevice(None)
    tier = Tier(device)
    tier.submit(1, [1], [3], is_load=False)
    tier.submit(2, [2], [5], is_load=True)
    device.broken = True
    tier.transfers.wait({1})
    tier.transfers.drain()
    assert {(job.job_id, job.failed) for job in tier.transfers.take_ended()} == {(1, True), (2, True)}
    assert tier.transfers.take_report() == WorkerReport({1, 2}, {5}, {2})


def test_chunks_that_were_not_kept_are_told_with_the_end_of_their_job() -> None:
    tier = Tier(FakeDevice(None), chunks_per_piece=1)
    tier.kv[1][3] = REFUSED - 256
    tier.submit(1, [4, 5, 6], [1, 3, 5], is_load=False)
    assert tier.transfers.take_report() == WorkerReport()
    tier.transfers.drain()
    assert [job.failed for job in tier.transfers.take_ended()] == [False]
    assert tier.transfers.take_report() == WorkerReport({5}, set(), set())
    assert tier.transfers.take_report() == WorkerReport(), "each is told once"


@pytest.mark.parametrize(
    ("chunks", "blocks", "said"),
    [([0, CHUNKS], [1, 3], "chunks: "), ([0], [BLOCKS], "blocks: "), ([-1], [1], "chunks: ")],
)
def test_ids_that_do_not_exist_are_refused_before_a_kernel_sees_them(
    chunks: list[int], blocks: list[int], said: str
) -> None:
    tier = Tier(FakeDevice(None))
    with pytest.raises(ValueError, match=said):
        tier.submit(1, chunks, blocks, is_load=True)
    assert tier.device.launches == 0
