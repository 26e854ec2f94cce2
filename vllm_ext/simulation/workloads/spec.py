"""A workload, as data."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class WorkloadSpec(BaseModel):
    """Lengths, arrivals, clients and what they expect."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str = "sharegpt-like"
    """A preset, or a file."""
    format: str = "auto"
    arrivals: Literal["poisson", "gamma", "recorded", "closed-loop", "at-once"] = "poisson"
    rate_per_s: float | None = Field(default=1.0, gt=0)
    duration_s: float | None = Field(default=None, gt=0)
    num_requests: int | None = Field(default=None, ge=0)
    seed: int = 0
