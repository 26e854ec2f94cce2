"""How long a new request would wait in an engine's queue before its first token, as front ends that shed load ask.

The engine sums its queue up (`scheduling.wait_forecast`); a front end fetches the sum from time to time, and adds what
it sent since. Ours, no paper's: a request is promised the time that the queue in front of it takes at its pace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
