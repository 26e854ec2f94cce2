"""Records of finished requests, and counters, kept beside the scheduler until the front end fetches them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

OWN_ENDS = frozenset({"stop", "length", "repetition"})
"""Finish reasons of requests that ended by themselves or at their bound, so that their length says something."""


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """What became of one request. Lengths in tokens, durations in seconds of the scheduler's clock."""

    seq: int
    req_id: str
    """vLLM's internal id: the client's, with an index and a random suffix."""
    arrival_unix_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    predicted_tokens: int
    """Prediction of the output length made of the prompt: the client's, else the best that came."""
    prediction_source: str
    num_preemptions: int
    demotions: int
    """How often the request outlived its estimate."""
    queue_s: float | None
    """Arrival to first scheduled; None if it never was."""
    ttft_s: float | None
    """Arrival to first token, as seen by the scheduler; None if there was none."""
    e2e_s: float
    finish_reason: str
    priority: int
    conversation_id: str | None


@dataclass
class Counters:
    """Totals since the scheduler started."""

    preemptions: dict[str, int] = field(default_factory=lambda: {"policy": 0, "memory": 0})
    """By reason: a better-ranked request took the place, or KV memory ran out."""
    fallbacks: int = 0
    """Steps and ranks in which a policy failed and arrival order was used."""
    stalls: int = 0
    """Steps whose plan let nothing run although something could; the plan of the step after was not followed."""
    refusals: dict[str, int] = field(default_factory=dict)
    """Looks at waiting requests that found them without room, by what was missing."""
    demotions: int = 0
    late_predictions: int = 0
    """Predictions that came after their request was queued, and were taken over."""
    bad_hints: int = 0
    """Requests whose hints did not pass although the front end checks them."""
    policy_steps: int = 0
    policy_s: float = 0.0
    """Time spent planning, summed over ``policy_steps`` steps."""
    steps: int = 0
    dispositions: dict[str, int] = field(default_factory=dict)
    """What became of the KV of preempted requests, where there is a KV tier."""
    waits_compared: int = 0
    wait_expected_s: float = 0.0
    wait_actual_s: float = 0.0
    wait_error_s: float = 0.0
    """Of ``waits_compared`` requests that resumed: estimated waits, actual ones, and their absolute differences."""


class RecordBook:
    """The last records, numbered without gaps; the reader keeps its own place."""

    def __init__(self, capacity: int) -> None:
        self._records: deque[RequestRecord] = deque(maxlen=capacity)
        self.next_seq = 0

    def add(self, record: RequestRecord) -> None:
        """Append the record whose ``seq`` is ``next_seq``; the oldest one leaves a full book."""
        self._records.append(record)
        self.next_seq = record.seq + 1

    def since(self, seq: int) -> tuple[list[dict[str, Any]], int]:
        """Return the records from ``seq`` on, and how many of those asked for are gone."""
        if not self._records or seq >= self.next_seq:
            return [], 0
        first = self._records[0].seq
        skip = max(0, seq - first)
        wanted = [dict(vars(r)) for r in islice(self._records, skip, None)]  # flat: asdict would copy deeply
        return wanted, max(0, first - max(seq, 0))
