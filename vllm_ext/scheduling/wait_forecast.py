"""How long a new request will wait: kept by the scheduler step by step, evaluated by front ends that shed load.

The scheduler knows who waits and how fast the queue moves; `WaitForecast` sums that up at constant cost per event. A
front end fetches the sum from time to time and asks `QueueState` for the wait of the request at hand, adding what it
sent since. Ours, no paper's: a request is promised the time that the queue in front of it takes at the pace it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
        """Return what `QueueState.parse` reads, fit for JSON.

        ``starts_per_s`` is None until two steps in a row left somebody waiting. With less than one start on record it
        is the pace at which the first is just due: the truth is that or slower.
        """
        pace = max(self._starts, 1.0) / self._queued_s if self._queued_s > 0 else None
        return {"waiting": len(self._waiting), "tokens": self._tokens, "starts_per_s": pace}


@dataclass(frozen=True, kw_only=True)
class QueueState:
    """An engine's queue at one moment, and what is needed to say how long a new request will wait in it."""

    waiting: int
    """Requests."""
    tokens: int
    """Tokens they have to prefill; what the prefix cache will spare them is not known and not taken off."""
    starts_per_s: float | None
    """Pace of the queue in requests per second; None if it is not known yet."""
    prefill_token_s: float
    """Runtime model's price of a prompt token."""
    pair_s: float = 0.0
    """Its price of a prompt token and a token of its context."""

    @classmethod
    def parse(cls, state: Mapping[str, Any]) -> QueueState | None:
        """Read the scheduler's state; None if it carries no forecast."""
        found = state.get("wait_forecast")
        if found is None:
            return None
        prices: Sequence[float] = state["runtime"]["coefficients"]  # as step_time.runtime.Coefficients
        return cls(
            waiting=found["waiting"],
            tokens=found["tokens"],
            starts_per_s=found["starts_per_s"],
            prefill_token_s=prices[2],
            pair_s=prices[4],
        )

    def wait_s(self, age_s: float = 0.0, sent: float = 0.0, sent_tokens: float = 0.0) -> float | None:
        """Return how long a request that comes last will wait, in seconds; None if nobody is known to wait.

        The longer of two times: until all ahead of it have started, at the pace of the queue, and until their prompts
        are computed, at the runtime model's price. The first tells of seats and memory, the second of a queue whose
        prompts are longer than those that set the pace.

        Args:
            age_s: Seconds since this was the state; the queue is taken to have moved at its pace.
            sent: Requests sent to the engine since.
            sent_tokens: Tokens of their prompts.
        """
        if self.waiting == 0:
            return None  # those sent since may have found room
        ahead = self.waiting + sent - (self.starts_per_s or 0.0) * age_s
        if ahead <= 0:
            return None
        prefill_s = max((self.tokens + sent_tokens) * self.prefill_token_s - age_s, 0.0)
        if self.starts_per_s is None:
            return prefill_s
        return max((ahead + 1) / self.starts_per_s, prefill_s)

    def ttft_s(
        self, num_prompt_tokens: int, age_s: float = 0.0, sent: float = 0.0, sent_tokens: float = 0.0
    ) -> float | None:
        """Return the forecast of a new request's time to first token: its wait and its own prefill, in seconds.

        None if nobody is known to wait: then nothing stands against starting it at once.
        """
        wait_s = self.wait_s(age_s, sent, sent_tokens)
        if wait_s is None:
            return None
        return wait_s + num_prompt_tokens * (self.prefill_token_s + self.pair_s * num_prompt_tokens / 2)
