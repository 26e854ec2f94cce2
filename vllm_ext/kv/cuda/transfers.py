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
- At most `DEPTH` pieces in each direction are on the device, so that a burst fills no queue of the driver, which would
  hold up the engine; the others wait here until earlier ones are through.

Used by one thread.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_ext.kv.cuda.codec import Buffer, DeviceCodec, Piece, Slip
from vllm_ext.kv.cuda.device import Device, Event
from vllm_ext.kv.failures import Failures

logger = logging.getLogger("vllm.vllm_ext.kv")

DEPTH = 16
_BUFFERS = 2
_Step = Callable[[Piece, Buffer, Slip], None]


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
    failures: Failures = field(default_factory=Failures.none)
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
    slip: Slip | None = None
    through: Event | None = None


@dataclass
class _Lane:
    """One direction."""

    streams: tuple[Any, Any]
    buffers: list[Buffer]
    slips: list[Slip]
    steps: tuple[_Step, _Step]
    busy_until: list[Event | None] = field(default_factory=lambda: [None] * _BUFFERS)
    next_buffer: int = 0
    waiting: deque[_Part] = field(default_factory=deque)
    running: deque[_Part] = field(default_factory=deque)


class Transfers:
    """Runs jobs.

    A job that fails is over like any other, once the device is through with all that was launched for it; what it left
    behind is in `take_failures`.

    Args:
        device: Its streams and events.
        codec: The steps.
        loads_first: Let stores wait for the loads before them.
    """

    def __init__(self, device: Device, codec: DeviceCodec, *, loads_first: bool = True) -> None:
        self._device, self._codec = device, codec
        self._loads_first = loads_first
        self._loads = self._lane((codec.fetch, codec.unpack), urgent=True)
        self._stores = self._lane((codec.pack, codec.send), urgent=False)
        self._jobs: dict[int, _Job] = {}
        self._ended: list[Ended] = []
        self._failures = Failures.none()
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
        lane = self._loads if is_load else self._stores
        lane.waiting.extend(_Part(job, piece) for piece in pieces)
        if not pieces:
            self._end(job)
        self.advance()

    def refuse(self, job_id: int, failures: Failures) -> None:
        """Take note of a job that could not even begin: it is over. Call it where the error is handled."""
        self._log("could not begin")
        self._failures.add(failures)
        self._ended.append(Ended(job_id, True, 0, None))

    def advance(self) -> None:
        """Take what is through off the device, and launch what waits; loads first. Does not wait."""
        for lane in (self._loads, self._stores):
            while lane.running and self._is_through(lane.running[0]):
                self._take_off(lane)
            while lane.waiting and lane.slips:
                self._launch(lane, lane.waiting.popleft())

    def take_ended(self) -> list[Ended]:
        """Return the jobs that ended since the last time."""
        self.advance()
        ended, self._ended = self._ended, []
        return ended

    def take_failures(self) -> Failures:
        """Return what failed among the jobs returned so far, each once."""
        failures, self._failures = self._failures, Failures.none()
        return failures

    def wait(self, job_ids: set[int]) -> None:
        """Return when none of these jobs is under way; they overtake others of their direction that still wait here."""
        for lane in (self._loads, self._stores):
            lane.waiting = deque(sorted(lane.waiting, key=lambda part: part.job.job_id not in job_ids))
        for job in [self._jobs[job_id] for job_id in job_ids if job_id in self._jobs]:
            lane = self._loads if job.is_load else self._stores
            while job.pieces_left:
                self.advance()
                if job.pieces_left and lane.running:
                    self._synchronize(lane.running[0])
                    self._take_off(lane)

    def drain(self) -> None:
        """Return when no job is under way."""
        self.wait(set(self._jobs))

    def _lane(self, steps: tuple[_Step, _Step], *, urgent: bool) -> _Lane:
        first, second = (self._device.new_stream(urgent=urgent) for _ in steps)
        buffers = [self._codec.new_buffer() for _ in range(_BUFFERS)]
        return _Lane((first, second), buffers, self._codec.new_slips(DEPTH), steps)

    def _launch(self, lane: _Lane, part: _Part) -> None:
        if part.job.failed:  # in an earlier piece
            self._count_off(lane, part)
            return
        index = lane.next_buffer
        lane.next_buffer = (index + 1) % _BUFFERS
        try:
            self._put(lane, part, index)
        except Exception:  # noqa: BLE001 - a copy that can't be launched costs a recomputation, not the engine its life
            self._failed(part.job, "could not be launched")
            part.through = self._fence(lane)
        if part.through is None:  # the device is gone
            self._count_off(lane, part)
            return
        lane.busy_until[index] = part.job.ended = part.through
        lane.running.append(part)

    def _put(self, lane: _Lane, part: _Part, index: int) -> None:
        device, job, buffer = self._device, part.job, lane.buffers[index]
        first, second = lane.streams
        first_step, second_step = lane.steps
        slip = part.slip = lane.slips.pop()
        self._codec.fill_in(slip, part.piece)
        if (busy := lane.busy_until[index]) is not None:
            device.wait(first, busy)
        if not job.is_load:
            device.wait(first, job.submitted)
            if self._loads_first and self._loads.running:
                device.wait(first, self._loads.running[-1].through)
        if job.started is None:
            job.started = device.record(first)
        device.launch(first, lambda: first_step(part.piece, buffer, slip))
        done = device.record(first)
        device.wait(second, done)
        if job.is_load:
            device.wait(second, job.submitted)
            job.stalled = job.stalled or (done, device.record(second))
        device.launch(second, lambda: second_step(part.piece, buffer, slip))
        part.through = device.record(second)

    def _fence(self, lane: _Lane) -> Event | None:
        """Return a mark behind all that was launched in a lane, or None if the device takes none any more."""
        first, second = lane.streams
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

    def _take_off(self, lane: _Lane) -> None:
        part = lane.running.popleft()
        if not part.job.is_load and not part.job.failed and part.slip is not None:
            readable = self._codec.readable(part.piece, part.slip)
            part.job.failures.chunks.update(part.piece.chunks[~readable].tolist())
        self._count_off(lane, part)

    def _count_off(self, lane: _Lane, part: _Part) -> None:
        if part.slip is not None:
            lane.slips.append(part.slip)
        part.job.pieces_left -= 1
        if not part.job.pieces_left:
            self._end(part.job)

    def _end(self, job: _Job) -> None:
        del self._jobs[job.job_id]
        self._failures.add(job.failures)
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
            job.failures.chunks.update(piece.chunks.tolist())
            if job.is_load:
                job.failures.blocks.update(piece.blocks.tolist())
        if job.is_load:
            job.failures.load_jobs.add(job.job_id)

    def _log(self, what: str) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            logger.exception("a copy of KV %s; what it was for is computed again (not logged again)", what)
