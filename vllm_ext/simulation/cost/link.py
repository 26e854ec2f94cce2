"""The link between device and host: two directions that slow each other down."""

from __future__ import annotations

import math
from collections import deque
from copy import copy
from dataclasses import dataclass, replace
from enum import Enum


class Direction(Enum):
    """Which way bytes go."""

    TO_HOST = "to_host"
    TO_DEVICE = "to_device"


@dataclass(slots=True)
class _Transfer:
    transfer_id: int
    start_s: float
    """Before this moment it does not begin, even if nothing stands before it."""
    setup_s: float
    """Set-up still to do at the link's last settlement, in seconds."""
    num_bytes: float
    """Bytes still to move at that time."""


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
        _check_at_least("copy_overhead_s", copy_overhead_s, 0)
        self._alone = bytes_per_s
        self._shared = bytes_per_s * (1 - contention_loss)
        self._copy_overhead_s = copy_overhead_s
        self._queues: dict[Direction, deque[_Transfer]] = {direction: deque() for direction in Direction}
        self._busy_s = dict.fromkeys(Direction, 0.0)
        self._now = 0.0
        self._settled_s = 0.0  # when the rates last changed
        self._finished: list[int] = []
        self._count = 0

    def submit(
        self, start_s: float, direction: Direction, num_bytes: float, num_copies: int = 1, setup_s: float = 0.0
    ) -> int:
        """Queue a transfer behind those of its direction and return its id: 0, 1, 2, ...

        Args:
            start_s: Before this moment it does not begin; the link's time or later, in seconds.
            direction: Which way.
            num_bytes: Bytes of all its copies, at least 0.
            num_copies: Copies it is made of, at least 1.
            setup_s: Time beside that of its copies in which it moves nothing, in seconds.

        Raises:
            ValueError: a value is out of its range; nothing is queued.
        """
        _check_at_least("start_s", start_s, self._now)
        _check_at_least("num_bytes", num_bytes, 0)
        _check_at_least("num_copies", num_copies, 1)
        _check_at_least("setup_s", setup_s, 0)
        transfer = _Transfer(self._count, start_s, setup_s + num_copies * self._copy_overhead_s, num_bytes)
        self._queues[direction].append(transfer)
        self._count += 1
        return transfer.transfer_id

    def alone_s(self, num_bytes: float, num_copies: int = 1, setup_s: float = 0.0) -> float:
        """Return what a transfer takes on an idle link; arguments as for `submit`."""
        return setup_s + num_copies * self._copy_overhead_s + num_bytes / self._alone

    def next_end_s(self) -> float | None:
        """Return when the next transfer will be through if no other is submitted; None if there is none."""
        trial = copy(self)  # with the first of each direction: none behind them begins before one of them ends
        trial._queues = {direction: deque(map(replace, [*queue][:1])) for direction, queue in self._queues.items()}
        trial._busy_s, trial._finished = self._busy_s.copy(), []
        while any(trial._queues.values()):
            trial._settle(trial._next_change_s())
            if trial._finished:
                return trial._settled_s
        return None

    def advance(self, now: float) -> list[int]:
        """Move the clock and return the transfers that are through by then, in the order of their ends.

        Raises:
            ValueError: the clock went back.
        """
        _check_at_least("now", now, self._now)
        while (change_s := self._next_change_s()) <= now:
            self._settle(change_s)
        self._now = now
        finished, self._finished = self._finished, []
        return finished

    def busy_s(self, direction: Direction) -> float:
        """Return the time with a transfer at work, set-up included, up to the link's time."""
        since_s = self._now - self._settled_s if self._works(self._queues[direction]) else 0.0
        return self._busy_s[direction] + since_s

    def _works(self, queue: deque[_Transfer]) -> bool:
        return bool(queue) and queue[0].start_s <= self._settled_s

    def _rate(self) -> float:
        moving = [self._works(q) and q[0].setup_s == 0 and q[0].num_bytes > 0 for q in self._queues.values()]
        return self._shared if all(moving) else self._alone

    def _next_change_s(self) -> float:
        rate = self._rate()
        return min(self._change_s(queue, rate) for queue in self._queues.values())

    def _change_s(self, queue: deque[_Transfer], rate: float) -> float:
        """Return when the first transfer begins, has its set-up done, or its bytes are through."""
        if not queue:
            return math.inf
        head = queue[0]
        if head.start_s > self._settled_s:
            return head.start_s
        return self._settled_s + (head.setup_s if head.setup_s > 0 else head.num_bytes / rate)

    def _settle(self, until: float) -> None:
        """Book the time since the last settlement, at most up to the next change, and note what is through."""
        rate, elapsed_s = self._rate(), until - self._settled_s
        for direction, queue in self._queues.items():
            if not self._works(queue):
                continue
            head, ends = queue[0], self._change_s(queue, rate) <= until
            self._busy_s[direction] += elapsed_s
            if head.setup_s > 0:
                head.setup_s = 0.0 if ends else max(0.0, head.setup_s - elapsed_s)
                through = not head.setup_s and not head.num_bytes
            else:
                head.num_bytes -= head.num_bytes if ends else min(head.num_bytes, elapsed_s * rate)
                through = ends
            if through:
                self._finished.append(queue.popleft().transfer_id)
        self._settled_s = until


def _check_at_least(name: str, value: float, least: float) -> None:
    if not (value >= least and math.isfinite(value)):
        raise ValueError(f"{name}={value!r}: must be finite and at least {least!r}")
