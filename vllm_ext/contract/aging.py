"""When ranks change: by aging, so that nobody starves, and with what a running request has generated."""

from __future__ import annotations

import math

from vllm_ext.contract import AGED, Rank, RequestView

AGED_RANK = Rank((float(AGED),), older_only_s=-math.inf, level=AGED)
"""Before all others, oldest first."""


def outlived_at(request: RequestView) -> float:
    """Return the output length, in tokens, at which a request outlives its estimate; infinite at the client's bound.

    While its prompt is computed the time it has left falls without a token: it is asked again at the first one.
    """
    if not request.num_output_tokens:
        return 1.0
    estimate = request.predicted_output_tokens
    return math.inf if estimate >= request.max_tokens else float(estimate)


def ages_at(request: RequestView, limit_s: float) -> float:
    """Return the clock time at which a waiting request will have waited ``limit_s``; infinite for one that runs."""
    if request.waiting_since is None:
        return math.inf
    return request.waiting_since + limit_s - request.waited_s
