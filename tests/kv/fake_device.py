"""A device that does what it is told as late, and in as odd an order, as its streams and events allow.

Nothing runs when it is launched. A copy that waits for too little therefore sees bytes that are not there yet, or that
are gone already, in one order or another; and one that waits for what never comes is found out as a deadlock.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import torch

from vllm_ext.config.kv_tier import LOSSLESS
from vllm_ext.kv.cuda.codec import Buffer, Piece, StagedCodec, StagingSlot
from vllm_ext.kv.host.geometry import TierGeometry

REFUSED = 0xFF
"""First byte of a block that the codec of tests does not keep."""


class FakeEvent:
    def __init__(self) -> None:
        self.at: int | None = None


class FakeStream:
    def __init__(self) -> None:
        self.queue: deque[tuple[str, object]] = deque()


class FakeDevice:
    """See the module.

    Args:
        seed: Decides what runs next; None runs only what somebody waits for.
        deaf: Ignore that a stream shall wait, to see that somebody notices.
    """

    def __init__(self, seed: int | None = 0, *, deaf: bool = False) -> None:
        self.engine = FakeStream()
        self.streams = [self.engine]
        self.deaf = deaf
        self.careless = deaf
        self.now = 0
        self.launches = 0
        self.fails_at: set[int] = set()
        self.broken = False
        self._random = None if seed is None else random.Random(seed)

    def compute(self, work: Callable[[], None]) -> None:
        """Put work of the engine into its own queue."""
        self.engine.queue.append(("work", work))

    def new_stream(self, *, urgent: bool) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    def record(self, stream: FakeStream | None) -> FakeEvent:
        self._check()
        event = FakeEvent()
        (stream or self.engine).queue.append(("record", event))
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._check()
        if not self.deaf:
            stream.queue.append(("wait", event))

    def launch(self, stream: FakeStream, work: Callable[[], None]) -> None:
        self._check()
        self.launches += 1
        if self.launches in self.fails_at:
            raise RuntimeError("injected: launch failed")
        stream.queue.append(("work", work))

    def is_through(self, event: FakeEvent) -> bool:
        self._check()
        if self._random is not None:
            for _ in range(self._random.randrange(6)):
                self._run_one()
        return event.at is not None

    def synchronize(self, event: FakeEvent) -> None:
        self._check()
        while event.at is None:
            if self._random is None:
                self._run_until(event)
            else:
                assert self._run_one(), "deadlock: everything waits"

    def elapsed_s(self, start: FakeEvent, end: FakeEvent) -> float:
        assert self.careless or (start.at and end.at), "asked before the device is through"
        return float((end.at or 0) - (start.at or 0))

    def finish(self) -> None:
        """Run all that can run."""
        while self._run_one():
            pass

    def _check(self) -> None:
        if self.broken:
            raise RuntimeError("injected: the device is lost")

    def _run_one(self) -> bool:
        ready = [stream for stream in self.streams if self._ready(stream)]
        if ready:
            self._run_head(self._random.choice(ready) if self._random else ready[0])
        return bool(ready)

    def _run_until(self, event: FakeEvent) -> None:
        """Run the stream that records an event up to there, and of others what it waits for."""
        stream = next(s for s in self.streams if ("record", event) in s.queue)
        while event.at is None:
            if not self._ready(stream):
                needed = stream.queue[0][1]
                assert isinstance(needed, FakeEvent)
                self._run_until(needed)
            self._run_head(stream)

    def _ready(self, stream: FakeStream) -> bool:
        if not stream.queue:
            return False
        kind, what = stream.queue[0]
        return not (kind == "wait" and isinstance(what, FakeEvent) and what.at is None)

    def _run_head(self, stream: FakeStream) -> None:
        kind, what = stream.queue.popleft()
        self.now += 1
        if kind == "work":
            assert callable(what)
            what()
        elif kind == "record":
            assert isinstance(what, FakeEvent)
            what.at = self.now


class PlainCodec(StagedCodec):
    """Bytes as they are, by torch's own indexing, on the CPU; does not keep blocks that begin with `REFUSED`."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], pool: torch.Tensor, geometry: TierGeometry, pieces: int
    ) -> None:
        super().__init__(tensors, pool, geometry, staging_bytes=pieces * geometry.chunk_bytes)

    def _pack(self, buffer: Buffer, which: torch.Tensor, block_ids: torch.Tensor) -> None:
        buffer.holds.fill_(1)
        for row, place, tensor, block, size in self._all(which, block_ids):
            page = self._tensors[tensor][block].view(torch.uint8)
            buffer.holds[row] *= int(page[0] != REFUSED)
            buffer.rows[row, place : place + size] = page

    def _unpack(self, buffer: Buffer, which: torch.Tensor, block_ids: torch.Tensor) -> None:
        for row, place, tensor, block, size in self._all(which, block_ids):
            self._tensors[tensor][block] = buffer.rows[row, place : place + size].view(torch.int8)

    def _all(self, which: torch.Tensor, block_ids: torch.Tensor) -> list[tuple[int, int, int, int, int]]:
        size = self._tensors[0].shape[1]
        return [
            (row, tensor * size, tensor, block, size)
            for tensor in which.tolist()
            for row, block in enumerate(block_ids.tolist())
        ]


class TimedDevice:
    """Streams that run side by side on a virtual clock; it stands still but for ``now``, which a test moves, and waits.

    A mark in a stream is the time at which the stream gets there. Copies of one direction are all put into one stream,
    so that they share the link.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._ends = [0.0]
        self._current = 0

    def spend(self, seconds: float) -> None:
        """Called by work that is launched: how long it takes."""
        self._ends[self._current] += seconds

    def new_stream(self, *, urgent: bool) -> int:
        self._ends.append(0.0)
        return len(self._ends) - 1

    def record(self, stream: int | None) -> float:
        return max(self._ends[stream or 0], self.now)

    def wait(self, stream: int, event: float) -> None:
        self._ends[stream] = max(self._ends[stream], event)

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        self._current = stream
        self._ends[stream] = max(self._ends[stream], self.now)
        work()

    def is_through(self, event: float) -> bool:
        return event <= self.now

    def synchronize(self, event: float) -> None:
        self.now = max(self.now, event)

    def elapsed_s(self, start: float, end: float) -> float:
        return end - start


class TimedCodec(StagedCodec):
    """Copies nothing, and takes the time of a link and of kernels.

    Args:
        device: Whose clock goes on.
        chunk_bytes: By default of Llama-3.1-8B's KV, 32 tokens.
        chunks_per_piece: Of a buffer.
    """

    LINK_BYTES_PER_S = 50e9
    KERNEL_BYTES_PER_S = 1e12
    _may_refuse = False

    def __init__(self, device: TimedDevice, *, chunk_bytes: int = 4 * 2**20, chunks_per_piece: int = 4) -> None:
        nowhere = torch.empty(2**14, chunk_bytes, dtype=torch.uint8, device="meta")
        geometry = TierGeometry(bits=LOSSLESS, chunk_bytes=chunk_bytes, record_bytes=0)
        super().__init__([nowhere], nowhere, geometry, staging_bytes=chunks_per_piece * chunk_bytes)
        self._clock = device
        self.sent: list[Piece] = []

    def pack(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:
        self._clock.spend(len(piece.chunks) * self._geometry.chunk_bytes / self.KERNEL_BYTES_PER_S)

    def send(self, piece: Piece, buffer: Buffer, slot: StagingSlot) -> None:
        self._clock.spend(len(piece.chunks) * self._geometry.chunk_bytes / self.LINK_BYTES_PER_S)
        self.sent.append(piece)

    unpack, fetch = pack, send
