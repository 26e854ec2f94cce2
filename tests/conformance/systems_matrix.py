"""The rows every conformance test runs over. A new system joins here, and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEERED = "vllm_ext.scheduling.scheduler.SteeredScheduler"

AGE_LIMIT_S = 1.0
NUM_LEVELS = 3
_QUICK_AGING = {"age_limit_s": AGE_LIMIT_S, "num_levels": NUM_LEVELS, "base_level_s": 0.1}
_EAGER_PREEMPTION = {"gain_ratio": 0.05, "min_progress_tokens": 2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scheduler under test."""

    name: str
    scheduler_cls: str | None = STEERED
    """Qualified class name; None is upstream's AsyncScheduler, which checks the rig itself."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """``additional_config["vllm_ext"]``."""
    reads_truth: bool = False
    """An oracle: true output lengths may change its decisions."""
    aging_bound_s: float | None = None
    """Waiting time after which only older requests go first; None where the order is arrival, which needs no aging."""

    def __str__(self) -> str:
        return self.name


SYSTEMS = (
    Row(name="upstream", scheduler_cls=None),
    Row(name="fcfs", options={"system": "fcfs"}),
    Row(
        name="alise",
        options={"system": "alise", "ordering": _QUICK_AGING, "admission": _EAGER_PREEMPTION},
        aging_bound_s=AGE_LIMIT_S * NUM_LEVELS,
    ),
    Row(
        name="oracle-alise",
        options={
            "system": "oracle-alise",
            "allow_oracle": True,
            "ordering": _QUICK_AGING,
            "admission": _EAGER_PREEMPTION,
        },
        reads_truth=True,
        aging_bound_s=AGE_LIMIT_S * NUM_LEVELS,
    ),
    Row(name="orca", options={"system": "orca"}),
    Row(name="vllm-2023", options={"system": "vllm-2023", "admission": {"watermark": 0.1}}),
)
