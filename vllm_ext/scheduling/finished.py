"""Records of finished requests, and counters, kept beside the scheduler until the front end fetches them."""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from vllm_ext.config import HASH_BLOCK_TOKENS

if TYPE_CHECKING:
    from vllm.v1.request import Request

OWN_ENDS = frozenset({"stop", "length", "repetition"})
"""Finish reasons of requests that ended by themselves or at their bound, so that their length says something."""
_UNSIGNED = (1 << 64) - 1


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
    # What only the request log has follows; the front end hashes again what reveals something.
    sampled: bool = False
    """Whether it is to be logged."""
    cache_salt: str | None = None
    hash_ids: list[int] | None = None
    """See `hash_ids`."""
    prompt_token_ids: list[int] | None = None
    """Only where prompts are to be logged."""
    wait: dict[str, Any] | None = None
    """Why it waited: see `WaitReasons.told`."""


@dataclass(frozen=True, kw_only=True)
class LogDetails:
    """What the request log is to have of each request."""

    sample: float
    """Share of requests that are logged."""
    prompts: bool
    """Whether with the token ids of their prompts."""
    block_tokens: int
    """Tokens of a block of vLLM's prefix hashes."""

    def of(self, request: Request, conversation_id: str | None) -> dict[str, Any]:
        """Return these fields of a finished request's record.

        Conversations are logged whole or not at all, a request without one by its id.
        """
        if not _in_sample(conversation_id or request.request_id, self.sample):
            return {}
        return {
            "sampled": True,
            "cache_salt": request.cache_salt,
            "hash_ids": hash_ids(request, self.block_tokens),
            "prompt_token_ids": request.prompt_token_ids if self.prompts else None,
        }


def _in_sample(name: str, share: float) -> bool:
    if share >= 1:
        return True
    return _digest(name.encode(errors="surrogatepass")) < share * _UNSIGNED


def _digest(content: bytes, key: bytes = b"") -> int:
    return int.from_bytes(blake2b(content, key=key, digest_size=8).digest())


def hash_ids(request: Request, block_tokens: int) -> list[int] | None:
    """Return a number for each `HASH_BLOCK_TOKENS` of the prompt, the last ones perhaps fewer, as traces have them.

    Prompts whose leading numbers are equal have equal leading tokens, LoRA adapters and salts. They are made of the
    hashes that vLLM has, one look-up each; None where it has none, or its blocks don't divide ours.
    """
    prompt, hashes = request.prompt_token_ids, request.block_hashes
    if prompt is None or not hashes or HASH_BLOCK_TOKENS % block_tokens:
        return None
    per_id, whole = HASH_BLOCK_TOKENS // block_tokens, len(prompt) // block_tokens
    found = [int.from_bytes(each[:8]) for each in hashes[per_id - 1 : whole : per_id]]
    if len(prompt) % HASH_BLOCK_TOKENS:
        last = hashes[whole - 1] if whole else b""
        rest = array("q", prompt[whole * block_tokens :]).tobytes() + repr(request.cache_salt).encode()
        found.append(_digest(rest, last[:64]))  # not `hash`, which each engine seeds anew
    return found


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
        """Return the records from ``seq`` on, and how many of those asked for are gone; earlier ones are let go."""
        if seq > self.next_seq:
            return [], 0
        while self._records and self._records[0].seq < seq:
            self._records.popleft()
        wanted = [dict(vars(record)) for record in self._records]  # flat: asdict would copy deeply
        return wanted, self.next_seq - len(wanted) - max(seq, 0)
