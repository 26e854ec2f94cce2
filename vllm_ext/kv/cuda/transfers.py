"""When which copy runs: jobs in pieces, by way of streams, two buffers and two steps in each direction.

    first stream    step 1 of piece 0 | step 1 of piece 1 | .. buffer 0 is free .. step 1 of piece 2
    second stream                       step 2 of piece 0 | step 2 of piece 1    | step 2 of piece 2

Nothing here waits for the device but `Transfers.wait` and `Transfers.drain`: the device orders its streams by events.

- What touches blocks waits for what the engine had launched when the job came: a store for the step that writes its
  blocks, a load for those that still read or clear the blocks it gets. The first step of a load, from the pool into
  a buffer, waits for nothing but the buffer, and so runs beside that step.
- A store's piece waits for the loads that were launched before it, and no load ever waits for a store: swap-in goes
  before swap-out, since copies in both directions at once slow each other down, by 18 to 20 % (Pensieve, section
  4.3.2), and only loads are waited for by requests. As in the paper it can be switched off.
- Each direction has at most a `Depth` of work on the device; the rest waits here until earlier pieces are through.

Used by one thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_ext.kv.cuda.codec import Buffer, DeviceCodec, Piece, StagingSlot
from vllm_ext.kv.cuda.device import Device, Event
from vllm_ext.kv.host.report import WorkerReport

logger = logging.getLogger("vllm.vllm_ext.kv")

_BUFFERS = 2
_Step = Callable[[Piece, Buffer, StagingSlot], None]


@dataclass(frozen=True, kw_only=True)
class Depth:
    """How much work one direction may have on the device.

    The engine's thread calls once per step, and only then is new work launched. What is on the device must therefore
    keep the link busy for a whole step. It must not be more than that: work on the device can't be overtaken by the
    jobs that `Transfers.wait` is called for, nor by a load that the current step needs.

    Each limit also bounds how long one call keeps the engine's thread. A piece takes it about 60 us, and each copy of a
    piece but the first about 10 us (estimates, not measured). To fill an idle direction with pieces of 16 MiB in chunks
    of 4 MiB takes 4 ms if all chunks follow each other and 6 ms if none do, and at most 10 ms whatever the pieces.

    CUDA's driver blocks a thread that puts work into a stream whose queue is full. The queue has about 1,024 entries
    (observed, not documented). The stream over the link gets up to 3 entries for each piece and one for each copy; the
    other stream gets up to 8 for each piece. With these limits neither gets more than 800.
    """

    num_bytes: int = 2**30
    """What a link of 50 GB/s carries in 21 ms. In a longer step the link is idle once these bytes are through. A piece
    counts as a full one, as large as a buffer."""
    copies: int = 512
    """Copies over the link. Chunks that follow each other in the pool are one copy. A piece with more copies than this
    is launched when no other is on the device."""
    pieces: int = 96
    """Binds where pieces are below 10 MiB, as those of short jobs are."""

    def __post_init__(self) -> None:
        for name in ("num_bytes", "copies", "pieces"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")

    def slots(self, piece_bytes: int) -> int:
        """Return how many pieces of this size may be on the device."""
        return max(1, min(self.pieces, self.num_bytes // piece_bytes))


class Ended(NamedTuple):
    """A job that is through."""

    job_id: int
    failed: bool
    num_chunks: int
    seconds: float | None
    """From its first copy's start to its last one's end on the device, without the wait of a load for the engine's
    step; None if it failed, or copied nothing."""


@dataclass
class _Job:
    job_id: int
    is_load: bool
    submitted: Event
    pieces: Sequence[Piece]
    pieces_left: int
    report: WorkerReport = field(default_factory=WorkerReport)
    """Told with the end of the job, and not before."""
    failed: bool = False
    started: Event | None = None
    ended: Event | None = None
    stalled: tuple[Event, Event] | None = None
    """Of a load: when its first piece was in the buffer, and when it could leave it."""


@dataclass
class _Part:
    job: _Job
    piece: Piece
    copies: int = 0
    slot: StagingSlot | None = None
    through: Event | None = None


@dataclass
class _Direction:
    """Loads or stores."""

    streams: tuple[Any, Any]
    buffers: list[Buffer]
    free_slots: list[StagingSlot]
    steps: tuple[_Step, _Step]
    busy_until: list[Event | None] = field(default_factory=lambda: [None] * _BUFFERS)
    next_buffer: int = 0
    waiting: deque[_Part] = field(default_factory=deque)
    running: deque[_Part] = field(default_factory=deque)
    running_copies: int = 0


class Transfers:
    """Runs jobs.

    A job that fails is over like any other, once the device is through with all that was launched for it; what it left
    behind is in `take_report`.

    Args:
        device: Its streams and events.
        codec: The steps.
        loads_first: Let stores wait for the loads before them.
        depth: What each direction may have on the device.
    """

    def __init__(
        self, device: Device, codec: DeviceCodec, *, loads_first: bool = True, depth: Depth | None = None
    ) -> None:
        self._device, self._codec = device, codec
        self._loads_first = loads_first
        self._depth = depth or Depth()
        self._loads = self._direction((codec.fetch, codec.unpack), urgent=True)
        self._stores = self._direction((codec.pack, codec.send), urgent=False)
        self._jobs: dict[int, _Job] = {}
        self._ended: list[Ended] = []
        self._report = WorkerReport()
        self._failure_logged = False

    def submit(self, job_id: int, pieces: Iterable[Piece], *, is_load: bool) -> None:
        """Begin a job; its pieces go through the buffers as there is room.

        Raises:
            ValueError: A piece names what does not exist; nothing was begun then.
        """
        pieces = list(pieces)
        for piece in pieces:
            self._codec.check(piece)
        job = _Job(job_id, is_load, self._device.record(None), pieces, len(pieces))
        self._jobs[job_id] = job
        direction = self._loads if is_load else self._stores
        direction.waiting.extend(_Part(job, piece) for piece in pieces)
        if not pieces:
            self._end(job)
        self.advance()

    def refuse(self, job_id: int, report: WorkerReport) -> None:
        """Take note of a job that could not even begin: it is over. Call it where the error is handled."""
        self._log("could not begin")
        self._report.add(report)
        self._ended.append(Ended(job_id, True, 0, None))

    def advance(self) -> None:
        """Take what is through off the device, and launch what waits; loads first. Does not wait."""
        for direction in (self._loads, self._stores):
            while direction.running and self._is_through(direction.running[0]):
                self._take_off(direction)
            while direction.waiting and self._has_room(direction):
                self._launch(direction, direction.waiting.popleft())

    def take_ended(self) -> list[Ended]:
        """Return the jobs that ended since the last time."""
        self.advance()
        ended, self._ended = self._ended, []
        return ended

    def take_report(self) -> WorkerReport:
        """Return what failed among the jobs returned so far, each once."""
        report, self._report = self._report, WorkerReport()
        return report

    def wait(self, job_ids: set[int]) -> None:
        """Return when none of these jobs is under way; they overtake others of their direction that still wait here."""
        for direction in (self._loads, self._stores):
            direction.waiting = deque(sorted(direction.waiting, key=lambda part: part.job.job_id not in job_ids))
        for job in [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]:
            direction = self._loads if job.is_load else self._stores
            while job.pieces_left:
                self.advance()
                if job.pieces_left and direction.running:
                    self._synchronize(direction.running[0])
                    self._take_off(direction)

    def drain(self) -> None:
        """Return when no job is under way."""
        self.wait(set(self._jobs))

    def _direction(self, steps: tuple[_Step, _Step], *, urgent: bool) -> _Direction:
        first, second = (self._device.new_stream(urgent=urgent) for _ in steps)
        buffers = [self._codec.new_buffer() for _ in range(_BUFFERS)]
        slots = self._codec.new_slots(self._depth.slots(self._codec.piece_bytes))
        return _Direction((first, second), buffers, slots, steps)

    def _has_room(self, direction: _Direction) -> bool:
        """Return whether the first part that waits may go to the device."""
        if not direction.free_slots:
            return False
        part = direction.waiting[0]
        part.copies = self._codec.copies(part.piece)
        return not direction.running or direction.running_copies + part.copies <= self._depth.copies

    def _launch(self, direction: _Direction, part: _Part) -> None:
        if part.job.failed:  # in an earlier piece
            self._count_off(direction, part)
            return
        index = direction.next_buffer
        direction.next_buffer = (index + 1) % _BUFFERS
        try:
            self._put(direction, part, index)
        except Exception:  # noqa: BLE001 - a copy that can't be launched costs a recomputation, not the engine its life
            self._failed(part.job, "could not be launched")
            part.through = self._fence(direction)
        if part.through is None:  # the device is gone
            self._count_off(direction, part)
            return
        direction.busy_until[index] = part.job.ended = part.through
        direction.running.append(part)
        direction.running_copies += part.copies

    def _put(self, direction: _Direction, part: _Part, index: int) -> None:
        device, job, buffer = self._device, part.job, direction.buffers[index]
        first, second = direction.streams
        first_step, second_step = direction.steps
        slot = part.slot = direction.free_slots.pop()
        self._codec.fill_in(slot, part.piece)
        if (busy := direction.busy_until[index]) is not None:
            device.wait(first, busy)
        if not job.is_load:
            device.wait(first, job.submitted)
            if self._loads_first and self._loads.running:
                device.wait(first, self._loads.running[-1].through)
        if job.started is None:
            job.started = device.record(first)
        device.launch(first, lambda: first_step(part.piece, buffer, slot))
        done = device.record(first)
        device.wait(second, done)
        if job.is_load:
            device.wait(second, job.submitted)
            job.stalled = job.stalled or (done, device.record(second))
        device.launch(second, lambda: second_step(part.piece, buffer, slot))
        part.through = device.record(second)

    def _fence(self, direction: _Direction) -> Event | None:
        """Return a mark behind all that was launched in a direction, or None if the device takes none any more."""
        first, second = direction.streams
        try:
            self._device.wait(second, self._device.record(first))
            return self._device.record(second)
        except Exception:  # noqa: BLE001 - reported by the launch that failed before
            return None

    def _is_through(self, part: _Part) -> bool:
        try:
            return self._device.is_through(part.through)
        except Exception:  # noqa: BLE001 - a device that failed has nothing under way
            self._failed(part.job, "failed on the device")
            return True

    def _synchronize(self, part: _Part) -> None:
        try:
            self._device.synchronize(part.through)
        except Exception:  # noqa: BLE001 - as above
            self._failed(part.job, "failed on the device")

    def _take_off(self, direction: _Direction) -> None:
        part = direction.running.popleft()
        direction.running_copies -= part.copies
        if not part.job.is_load and not part.job.failed and part.slot is not None:
            readable = self._codec.readable(part.piece, part.slot)
            part.job.report.chunks.update(part.piece.chunks[~readable].tolist())
        self._count_off(direction, part)

    def _count_off(self, direction: _Direction, part: _Part) -> None:
        if part.slot is not None:
            direction.free_slots.append(part.slot)
        part.job.pieces_left -= 1
        if not part.job.pieces_left:
            self._end(part.job)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.job_id]
        self._report.add(job.report)
        num_chunks = sum(len(piece.chunks) for piece in job.pieces)
        self._ended.append(Ended(job.job_id, job.failed, num_chunks, self._seconds(job)))

    def _seconds(self, job: _Job) -> float | None:
        if job.failed or job.started is None or job.ended is None:
            return None
        seconds = self._device.elapsed_s(job.started, job.ended)
        if job.stalled is not None:
            seconds -= self._device.elapsed_s(*job.stalled)
        return seconds

    def _failed(self, job: _Job, what: str) -> None:
        self._log(what)
        job.failed = True
        for piece in job.pieces:
            job.report.chunks.update(piece.chunks.tolist())
            if job.is_load:
                job.report.blocks.update(piece.blocks.tolist())
        if job.is_load:
            job.report.load_jobs.add(job.job_id)

    def _log(self, what: str) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            logger.exception("a copy of KV %s; its tokens are computed again (not logged again)", what)
