"""Options of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_ext.cellular.order import ORDERS
from vllm_ext.cellular.scheduler import MAX_TASKS_TO_SUBMIT

CELLS = ("published", "alternate")
"""Which cell goes next: as in Algorithm 1, or in turns."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine serves."""

    workers: int = 1
    """Threads that compute; each is a worker of Algorithm 1."""
    max_requests: int = 4096
    """Open requests beyond which new ones are refused."""
    max_batch: Mapping[str, int] | None = None
    """Cell -> largest batch; by default as the model says, and on a CPU at most 128."""
    max_tasks_to_submit: int = MAX_TASKS_TO_SUBMIT
    order: str = "arrival"
    """One of `ORDERS`."""
    cells: str | None = None
    """One of `CELLS`; None: in turns while fewer than two workers live, as published otherwise."""
    max_restarts: int = 3
    """How often in a minute workers that died begin anew; the next one that dies stays dead."""
    device: str = "cpu"
    state_bytes: int = 4 << 30
    """How large values between cells may get."""
    step_s: Mapping[str, float] | None = None
    """Cell -> seconds of a task, for the order by slack; see `vllm-ext cellular profile`."""

    def __post_init__(self) -> None:
        for name in ("workers", "max_requests", "max_tasks_to_submit", "state_bytes"):
            if not getattr(self, name) >= 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")
        if self.max_restarts < 0:
            raise ValueError(f"max_restarts={self.max_restarts!r}: must be 0 or greater")
        if self.workers > 1 and self.device != "cpu":
            raise ValueError(
                f"workers={self.workers!r}: must be 1 with device={self.device!r}, whose stream they share"
            )
        if self.order not in ORDERS:
            raise ValueError(f"order={self.order!r}: must be one of {', '.join(ORDERS)}")
        if self.cells is not None and self.cells not in CELLS:
            raise ValueError(f"cells={self.cells!r}: must be one of {', '.join(CELLS)}")
