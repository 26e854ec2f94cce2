"""What clients announce: output lengths, with an error of a stated size, and objectives."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from vllm_ext.hints import MAX_OSL, SLO_KEYS
from vllm_ext.prediction.oracle import HIDDEN_LENGTH_KEY
from vllm_ext.simulation.requests import SimRequest, Slo

HINT_KEY = "osl"
_MS = 1000.0


def mean_error(sigma: float) -> float:
    """Return ``E|exp(sigma Z) - 1|`` of a standard normal Z.

    The parts above and below 1 are ``exp(sigma^2 / 2) Phi(sigma) - 1/2`` and ``1/2 - exp(sigma^2 / 2) Phi(-sigma)``;
    their sum is ``exp(sigma^2 / 2) erf(sigma / sqrt(2))``.
    """
    return math.exp(sigma**2 / 2) * math.erf(sigma / math.sqrt(2))


def sigma_of(error: float) -> float:
    """Return the sigma whose `mean_error` is ``error``.

    Raises:
        ValueError: the error is negative or not finite.
    """
    if not 0 <= error < math.inf:
        raise ValueError(f"announce_error={error!r}: must be finite and at least 0")
    low, high = 0.0, 1.0
    while mean_error(high) < error:
        high *= 2
    for _ in range(100):  # mean_error grows with sigma
        middle = (low + high) / 2
        low, high = (middle, high) if mean_error(middle) < error else (low, middle)
    return high


def hint(true_tokens: int, sigma: float, normal: float) -> dict[str, Any]:
    """Return what a client sends: the true length times ``exp(sigma * normal)``, rounded, from 1 to `MAX_OSL`."""
    return {HINT_KEY: min(MAX_OSL, max(1, round(true_tokens * math.exp(sigma * normal))))}


def objectives(slo: Slo) -> dict[str, Any]:
    """Return the hints by which a client tells its objectives, in milliseconds; those that it has not are left out."""
    wanted = zip(SLO_KEYS, (slo.ttft_s, slo.tbt_s, slo.e2e_s), strict=True)
    return {key: seconds * _MS for key, seconds in wanted if seconds is not None}


def hidden(true_tokens: int) -> dict[str, Any]:
    """Return what an oracle reads."""
    return {HIDDEN_LENGTH_KEY: true_tokens}


def with_hidden_length(request: SimRequest) -> SimRequest:
    """Return the request with its true length where only systems marked ``oracle`` read it."""
    true_tokens = min(request.output_tokens, request.max_tokens)
    return replace(request, extra_args={**(request.extra_args or {}), **hidden(true_tokens)})
