"""What the scheduler keeps step by step so that front ends can tell how long a new request will wait.

It knows who waits and how fast the queue moves, and sums that up at constant cost per event; `slo.queue_state` makes a
forecast of it.
"""

from __future__ import annotations

import math
from typing import Any

_MEMORY_S = 10.0
"""Time constant with which the pace of the queue is forgotten, in seconds during which somebody waited."""


class WaitForecast:
    """The waiting requests, and the pace at which they start while others have to stay.

    A step counts only if somebody was left waiting before it and after it: only then was all started that could be. So
    requests that come to an engine with room, which start at once, do not pass for a fast queue. Does no I/O and has
    no clock; each call is O(1).
    """

    def __init__(self, memory_s: float = _MEMORY_S) -> None:
        """Start with an empty queue.

        Args:
            memory_s: Time constant of the average, in seconds with a queue.

        Raises:
            ValueError: ``memory_s`` is not greater than 0.
        """
        if not memory_s > 0:
            raise ValueError(f"memory_s={memory_s!r}: must be greater than 0")
        self._memory_s = memory_s
        self._waiting: dict[str, int] = {}
        self._tokens = 0
        self._in_step = 0
        self._left_behind_at: float | None = None
        """When the last step ended, if it left somebody waiting."""
        self._starts = 0.0
        self._queued_s = 0.0

    def entered(self, req_id: str, num_tokens: int) -> None:
        """Note a request that waits from now on, with the tokens it has to prefill; one that waits already is kept."""
        if req_id not in self._waiting:
            self._waiting[req_id] = num_tokens
            self._tokens += num_tokens

    def left(self, req_id: str) -> bool:
        """Note a request that waits no longer, for whatever reason; False if it did not wait."""
        num_tokens = self._waiting.pop(req_id, None)
        if num_tokens is None:
            return False
        self._tokens -= num_tokens
        return True

    def started(self, req_id: str) -> None:
        """Note a request that the step at hand starts, or resumes."""
        self._in_step += self.left(req_id)

    def stepped(self, now: float) -> None:
        """Note that a step was scheduled at ``now`` seconds, after what it `started`."""
        if self._waiting and self._left_behind_at is not None:
            interval_s = max(now - self._left_behind_at, 0.0)
            kept = math.exp(-interval_s / self._memory_s)
            self._starts = self._starts * kept + self._in_step
            self._queued_s = self._queued_s * kept + interval_s
        self._left_behind_at = now if self._waiting else None
        self._in_step = 0

    def state(self) -> dict[str, Any]:
        """Return what front ends read, fit for JSON.

        ``starts_per_s`` is None until two steps in a row left somebody waiting. With less than one start on record it
        is the pace at which the first is just due: the truth is that or slower.
        """
        pace = max(self._starts, 1.0) / self._queued_s if self._queued_s > 0 else None
        return {"waiting": len(self._waiting), "tokens": self._tokens, "starts_per_s": pace}
