"""The link between device and host: two directions that slow each other down."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from enum import Enum


class Direction(Enum):
    """Which way bytes go."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(slots=True)
class LinkTotals:
    """What a direction has carried, up to the link's time."""

    transfers: int = 0
    """Transfers that are through."""
    copies: int = 0
    """Copies of those transfers."""
    num_bytes: float = 0.0
    """Bytes moved, those of unfinished transfers included."""
    busy_s: float = 0.0
    """Time with a transfer at work, set-up included."""


@dataclass(slots=True)
class _Transfer:
    transfer_id: int
    setup_s: float
    """Set-up still to do at the lane's last settlement, in seconds."""
    num_bytes: float
    """Bytes still to move at that time."""
    num_copies: int


class _Lane:
    """One direction: a queue whose head is at work."""

    def __init__(self) -> None:
        self.queue: deque[_Transfer] = deque()
        self.totals = LinkTotals()

    @property
    def moves_bytes(self) -> bool:
        return bool(self.queue) and self.queue[0].setup_s == 0 and self.queue[0].num_bytes > 0

    def phase_s(self, rate: float) -> float:
        """Time from the last settlement until the head's set-up is done or its bytes are through."""
        if not self.queue:
            return math.inf
        head = self.queue[0]
        return head.setup_s if head.setup_s > 0 else head.num_bytes / rate

    def totals_after(self, elapsed_s: float, rate: float) -> LinkTotals:
        """Return the totals some time after the last settlement, within one phase."""
        totals = replace(self.totals)
        if self.queue:
            totals.busy_s += elapsed_s
            if self.moves_bytes:
                totals.num_bytes += min(self.queue[0].num_bytes, elapsed_s * rate)
        return totals

    def settle(self, elapsed_s: float, rate: float, ends: bool) -> int | None:
        """Let time pass, within one phase; ``ends``: exactly to its end. Returns the transfer that is through."""
        if not self.queue:
            return None
        head = self.queue[0]
        self.totals.busy_s += elapsed_s
        if head.setup_s > 0:
            head.setup_s = 0.0 if ends else max(0.0, head.setup_s - elapsed_s)
            if head.setup_s > 0 or head.num_bytes > 0:
                return None
        else:
            moved = head.num_bytes if ends else min(head.num_bytes, elapsed_s * rate)
            head.num_bytes -= moved
            self.totals.num_bytes += moved
            if not ends:
                return None
        self.queue.popleft()
        self.totals.transfers += 1
        self.totals.copies += head.num_copies
        return head.transfer_id


class TransferLink:
    """A full-duplex link in virtual time. Each direction works on one transfer after the other, in order.

    A transfer first takes ``copy_overhead_s`` per copy, in which nothing moves, then moves its bytes: at full rate
    while the other direction moves none, and at ``1 - contention_loss`` of it while both do. Between changes of the
    rate nothing is recomputed, so that `next_end_s` stays the same number until something is submitted.

    Source: Pensieve, 3.4.3: overlapping both directions costs each of them 18-20 %.
    """

    def __init__(self, bytes_per_s: float, contention_loss: float = 0.19, copy_overhead_s: float = 0.0) -> None:
        """Start idle at time 0.

        Args:
            bytes_per_s: Rate of a direction while the other is idle.
            contention_loss: Share of it that each loses while both move bytes.
            copy_overhead_s: Fixed time of every copy, in seconds.

        Raises:
            ValueError: a value out of its range.
        """
        if not (bytes_per_s > 0 and math.isfinite(bytes_per_s)):
            raise ValueError(f"bytes_per_s={bytes_per_s!r}: must be finite and greater than 0")
        if not 0 <= contention_loss < 1:
            raise ValueError(f"contention_loss={contention_loss!r}: must be at least 0 and less than 1")
        if not (copy_overhead_s >= 0 and math.isfinite(copy_overhead_s)):
            raise ValueError(f"copy_overhead_s={copy_overhead_s!r}: must be finite and at least 0")
        self._alone = bytes_per_s
        self._shared = bytes_per_s * (1 - contention_loss)
        self._copy_overhead_s = copy_overhead_s
        self._lanes = {direction: _Lane() for direction in Direction}
        self._now = 0.0
        self._settled_s = 0.0  # when the rates last changed
        self._finished: list[int] = []  # through, and not yet told
        self._count = 0

    def submit(
        self, now: float, direction: Direction, num_bytes: float, num_copies: int = 1, setup_s: float = 0.0
    ) -> int:
        """Queue a transfer behind those of its direction and return its id: 0, 1, 2, ...

        Args:
            now: Current time in seconds.
            direction: Which way.
            num_bytes: Bytes of all its copies, at least 0.
            num_copies: Copies it is made of, at least 1.
            setup_s: Time beside that of its copies in which it moves nothing, in seconds.

        Raises:
            ValueError: the clock went back, or a value is out of its range; nothing is queued.
        """
        if not (num_bytes >= 0 and math.isfinite(num_bytes)):
            raise ValueError(f"num_bytes={num_bytes!r}: must be finite and at least 0")
        if num_copies < 1:
            raise ValueError(f"num_copies={num_copies!r}: must be at least 1")
        if not (setup_s >= 0 and math.isfinite(setup_s)):
            raise ValueError(f"setup_s={setup_s!r}: must be finite and at least 0")
        self._run_until(now)
        transfer_id = self._count
        self._count += 1
        queue = self._lanes[direction].queue
        if not queue:
            self._settle(now)
        queue.append(_Transfer(transfer_id, setup_s + num_copies * self._copy_overhead_s, num_bytes, num_copies))
        return transfer_id

    def alone_s(self, num_bytes: float, num_copies: int = 1, setup_s: float = 0.0) -> float:
        """Return what a transfer takes on an idle link; arguments as for `submit`."""
        return setup_s + num_copies * self._copy_overhead_s + num_bytes / self._alone

    def next_end_s(self) -> float | None:
        """Return when the next transfer will be through if no other is submitted; None if there is none."""
        if self._finished:
            return self._now
        if not self.busy:
            return None
        trial = self._copy_of_heads()
        while not trial._finished:
            trial._settle(trial._next_phase_s())
        return trial._settled_s

    def advance(self, now: float) -> list[int]:
        """Move the clock and return the transfers that are through by then, in the order of their ends.

        Raises:
            ValueError: the clock went back.
        """
        self._run_until(now)
        finished, self._finished = self._finished, []
        return finished

    @property
    def busy(self) -> bool:
        """Whether any transfer is at work."""
        return any(lane.queue for lane in self._lanes.values())

    def queued(self, direction: Direction) -> int:
        """Return the transfers of a direction that are not through."""
        return len(self._lanes[direction].queue)

    def totals(self, direction: Direction) -> LinkTotals:
        """Return what a direction has carried up to the link's time."""
        return self._lanes[direction].totals_after(self._now - self._settled_s, self._rate())

    def _run_until(self, now: float) -> None:
        if not (now >= self._now and math.isfinite(now)):
            raise ValueError(f"now={now!r}: must be finite and not before the link's time, {self._now!r}")
        while (phase_end := self._next_phase_s()) <= now:
            self._settle(phase_end)
        self._now = now

    def _rate(self) -> float:
        return self._shared if all(lane.moves_bytes for lane in self._lanes.values()) else self._alone

    def _next_phase_s(self) -> float:
        rate = self._rate()
        return self._settled_s + min(lane.phase_s(rate) for lane in self._lanes.values())

    def _settle(self, until: float) -> None:
        """Book the time since the last settlement, at most up to the end of a phase, and note what is through."""
        rate = self._rate()
        start = self._settled_s
        for lane in self._lanes.values():
            through = lane.settle(until - start, rate, ends=start + lane.phase_s(rate) <= until)
            if through is not None:
                self._finished.append(through)
        self._settled_s = until

    def _copy_of_heads(self) -> TransferLink:
        """Return a link with only the transfers at work: none behind them starts before one of them ends."""
        trial = TransferLink.__new__(TransferLink)
        trial._alone, trial._shared = self._alone, self._shared
        trial._now, trial._settled_s, trial._finished = self._now, self._settled_s, []
        trial._lanes = {}
        for direction, lane in self._lanes.items():
            trial._lanes[direction] = copied = _Lane()
            if lane.queue:
                head = lane.queue[0]
                copied.queue.append(_Transfer(head.transfer_id, head.setup_s, head.num_bytes, head.num_copies))
        return trial
