"""The requests of the demo: a mixed, bursty workload, the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_ext.tiny_model.corpus import passage

BURST_SIZES = (3, 9)
"""Fewest and most requests that arrive together."""

MEAN_GAP_S = 0.4
"""Mean of the exponentially distributed time between bursts."""

OUTPUT_TOKENS = ((8, 24), (40, 90), (150, 320))
"""Ranges of output lengths: short, medium, long; each request draws a range, then a length."""

PROMPT_WORDS = ((3, 12), (30, 60), (120, 180))
"""Ranges of prompt lengths, drawn independently of the output's."""

STOP_STRING = "k"
"""Some requests end at the first of these: one token in forty holds it, so nobody knows their length beforehand."""

OPEN_ENDED_MAX_TOKENS = 320
"""Bound of the requests that end at the stop string."""


class Kind(StrEnum):
    """The API a request uses."""

    CHAT = "chat"
    COMPLETION = "cmpl"


@dataclass(frozen=True, kw_only=True)
class DemoRequest:
    """One request, ready to be sent."""

    number: int
    """Place in the order of arrival, from 1."""
    kind: Kind
    stream: bool
    prompt: str
    max_tokens: int
    """The length of the output, or its bound if `stop` is set."""
    start_s: float
    """When to send it, in seconds after the first."""
    stop: str | None = None
    hints: Mapping[str, Any] = field(default_factory=dict)
    """What the client says of the request; sent as `vllm_xargs`."""


def make_workload(num_requests: int, seed: int) -> list[DemoRequest]:
    """Return `num_requests` requests in the order of their arrival.

    Raises:
        ValueError: Fewer than one request.
    """
    if num_requests < 1:
        raise ValueError(f"requests={num_requests!r}: must be at least 1")
    rng = random.Random(seed)
    arrivals = _bursts(rng)
    return [_request(number, next(arrivals), rng) for number in range(1, num_requests + 1)]


def _bursts(rng: random.Random) -> Iterator[float]:
    now = 0.0
    while True:
        for _ in range(rng.randint(*BURST_SIZES)):
            yield now
        now += rng.expovariate(1.0 / MEAN_GAP_S)


def _request(number: int, start_s: float, rng: random.Random) -> DemoRequest:
    words = rng.randint(*rng.choice(PROMPT_WORDS))
    length = rng.randint(*rng.choice(OUTPUT_TOKENS))
    stop = STOP_STRING if rng.random() < 0.4 else None
    hints: dict[str, Any] = {}
    if stop is None and rng.random() < 0.4:
        hints["osl"] = max(1, round(length * rng.uniform(0.7, 1.3)))  # clients guess; none is exact
    if rng.random() < 0.3:
        hints["conversation_id"] = f"demo-{rng.randint(1, 4)}"
    if rng.random() < 0.3:
        hints["ttft_slo_ms"] = rng.choice((250, 500, 1000))
    return DemoRequest(
        number=number,
        kind=rng.choice(tuple(Kind)),
        stream=rng.random() < 0.7,
        prompt=passage(rng, words),
        max_tokens=OPEN_ENDED_MAX_TOKENS if stop else length,
        start_s=start_s,
        stop=stop,
        hints=hints,
    )
