"""What a replica tells a router of itself, every second or so: queue, memory, prices, and whose KV it has."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

MOST_SESSIONS = 2000
"""Conversations of a report, the latest ones: each takes some 40 bytes, and a report goes to every router."""
_Count = Annotated[int, Field(ge=0, le=1 << 53)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def session_key(session: str) -> str:
    """Return what stands for a conversation in reports. It tells nobody the id, but who guesses that can check it."""
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Prices:
    """How long things take on a replica, in seconds; by its runtime model."""

    base_s: _Seconds
    """Of a step."""
    prefill_token_s: _Seconds
    """Of each prompt token in it."""
    decode_s: _Seconds
    """Of each request that decodes in it."""
    context_token_s: _Seconds
    """Of each token of KV that it attends to."""
    host_token_s: _Seconds = 0.0
    """Of each token of KV that comes back from host memory."""
    steps: _Count = 1_000_000
    """From which it is known; few: it may be wrong by a lot."""


class Held(NamedTuple):
    """Tokens of a conversation's KV that a replica has."""

    device: int
    host: int = 0
    """Those in host memory; the device may have some of them, too."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """One replica at one moment.

    Raises:
        ValueError: (pydantic's) a number is out of its range; the message names the field.
    """

    number: _Count
    """Grows with every report of a replica, so that one that comes late or twice is known."""
    started: str = ""
    """Another one after a restart of the replica, whose numbers begin anew."""
    running: _Count
    """Requests in the batch."""
    waiting: _Count
    """Requests that wait for it."""
    seats: Annotated[int, Field(ge=1)]
    """Requests that may run at once."""
    prefill_tokens: _Count
    """Prompt tokens still to compute, of those who run and those who wait, without what is cached."""
    context_tokens: _Count
    """Tokens of KV that those who run hold, and those who wait will hold at first."""
    pool_tokens: Annotated[int, Field(ge=1)]
    """Tokens of KV that the device can hold."""
    output_tokens: Annotated[float, Field(ge=1)] = 256.0
    """Mean output of the requests that ended lately."""
    prices: Prices
    step_age_s: _Seconds = 0.0
    """Since a step ended, where requests are there: an engine that hangs grows old."""
    resident: Mapping[str, Held] = Field(default_factory=dict, max_length=MOST_SESSIONS)
    """By `session_key`, what is there of the latest conversations."""

    @property
    def queue_s(self) -> float:
        """Seconds that the prompt tokens still to compute take."""
        return self.prefill_tokens * self.prices.prefill_token_s

    @property
    def step_s(self) -> float:
        """Seconds of a step that decodes for all who run, and for who waits as far as there are seats."""
        requests = min(self.running + self.waiting, self.seats)
        price = self.prices
        return price.base_s + price.decode_s * requests + price.context_token_s * self.context_tokens

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> Self:
        """Read what `as_dict` made.

        Raises:
            ValueError: (pydantic's) a field is missing, or not what it must be.
        """
        made: Self = _ADAPTER.validate_python(raw)
        return made

    def as_dict(self) -> dict[str, Any]:
        """Return it fit for JSON, with the times that follow from it."""
        made: dict[str, Any] = _ADAPTER.dump_python(self, mode="json")
        return {**made, "queue_s": self.queue_s, "step_s": self.step_s}


_ADAPTER: TypeAdapter[Any] = TypeAdapter(LoadReport)
