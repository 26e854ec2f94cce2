"""A server whose steps all take equally long: queueing theory knows its waiting times."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ext.simulation.step_shape import StepShape


@dataclass(frozen=True, kw_only=True)
class Constant:
    """Cost model for closed-form tests."""

    step_s: float
    """Time the device computes any step, in seconds."""
    host_step_s: float = 0.0
    """Engine core's time per step, in seconds."""

    def __post_init__(self) -> None:
        if not self.step_s > 0:
            raise ValueError(f"step_s={self.step_s!r}: must be greater than 0")
        if not self.host_step_s >= 0:
            raise ValueError(f"host_step_s={self.host_step_s!r}: must be at least 0")

    def device_s(self, shape: StepShape) -> float:  # noqa: ARG002 - as any cost model's
        """Return ``step_s``."""
        return self.step_s

    def host_s(self, shape: StepShape) -> float:  # noqa: ARG002 - as any cost model's
        """Return ``host_step_s``."""
        return self.host_step_s
