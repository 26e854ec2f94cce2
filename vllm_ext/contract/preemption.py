"""What may become of the KV of a request that is preempted, and what that costs."""

from __future__ import annotations

import enum
import math
from typing import NamedTuple


class KvDisposition(enum.Enum):
    """Of KV whose request has to leave."""

    KEEP = "keep"
    """It stays in its blocks until others need them, and is not copied: its request is expected back before."""
    SWAP = "swap"
    """It is copied to host memory."""
    RECOMPUTE = "recompute"
    """It is given up: to copy it takes longer than to compute it again."""


class PreemptionCost(NamedTuple):
    """A preemption, in seconds."""

    wait_s: float
    """How long the request is expected to wait: ALISE's estimated wait time (eq. 7)."""
    reuse_s: float = 0.0
    """How long its blocks are expected to stay as they are."""
    out_s: float = math.inf
    """To copy its KV to host memory; without a tier, for ever."""
    back_s: float = math.inf
    """To copy it back."""
