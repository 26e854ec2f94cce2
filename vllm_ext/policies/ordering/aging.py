"""Aging by a single limit: who has waited that long goes first, so that nobody starves."""

from __future__ import annotations

import math

from vllm_ext.scheduling.plan import AGED, Rank
from vllm_ext.scheduling.views import RequestView

AGED_RANK = Rank((float(AGED),), level=AGED)
"""Before all others, oldest first."""


def ages_at(request: RequestView, limit_s: float) -> float:
    """Return the clock time at which a waiting request will have waited ``limit_s``; infinite for one that runs."""
    if request.waiting_since is None:
        return math.inf
    return request.waiting_since + limit_s - request.waited_s
