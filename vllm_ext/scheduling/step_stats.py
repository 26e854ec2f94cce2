"""Follows how fast the engine goes: durations of steps, lengths of chunks, what preemptions cost."""

from __future__ import annotations

from collections import deque

from vllm_ext.contract import NO_STEP_STATS
from vllm_ext.step_time.runtime import StepFeatures

_RECENT_STEPS = 64
_SHARE_BELOW = 0.95
_WEIGHT = 0.05
_REQUESTS_REMEMBERED = 256.0


class StepStatsTracker:
    """Turns measured steps, resumptions and finished requests into a `StepStats`. Free of any clock.

    Source: AccelGen, section 4.3, for what is followed (T_max, mean chunk, P_max * P). A quantile stands for the
    maximum, so that one hiccup (a compilation, a pause of the garbage collector) does not make everything urgent.
    """

    def __init__(self) -> None:
        self.latest = NO_STEP_STATS
        self._durations: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._mean_s = 0.0
        self._chunk_tokens = 0.0
        self._longest_wait_s = 0.0
        self._preemptions = 0.0
        self._tokens = 0.0

    def observe(self, features: StepFeatures, duration_s: float) -> None:
        """Take a measured step."""
        if not 0 < duration_s < float("inf"):
            return
        self._durations.append(duration_s)
        self._mean_s += max(_WEIGHT, 1 / len(self._durations)) * (duration_s - self._mean_s)
        if features.num_prefill_tokens:
            weight = _WEIGHT if self._chunk_tokens else 1.0
            self._chunk_tokens += weight * (features.num_prefill_tokens - self._chunk_tokens)
        ranked = sorted(self._durations)
        self.latest = self.latest._replace(
            step_s=self._mean_s,
            longest_step_s=ranked[int(_SHARE_BELOW * (len(ranked) - 1))],
            chunk_tokens=self._chunk_tokens or NO_STEP_STATS.chunk_tokens,
        )

    def resumed(self, waited_s: float) -> None:
        """Note how long a preempted request waited for its seat; longer waits than the longest fade slowly."""
        self._longest_wait_s = max(waited_s, self._longest_wait_s * (1 - _WEIGHT))
        self._price()

    def finished(self, output_tokens: int, preemptions: int) -> None:
        """Note a finished request: how many tokens it generated, and how often it was preempted."""
        keep = 1 - 1 / _REQUESTS_REMEMBERED
        self._tokens = keep * self._tokens + output_tokens
        self._preemptions = keep * self._preemptions + preemptions
        self._price()

    def _price(self) -> None:
        lost_s = self._longest_wait_s * self._preemptions / self._tokens if self._tokens else 0.0
        self.latest = self.latest._replace(preemption_s=lost_s)
