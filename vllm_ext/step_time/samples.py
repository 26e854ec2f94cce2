"""Measured steps of production traffic, kept by the scheduler until the front end fetches them."""

from __future__ import annotations

from typing import Any

from vllm_ext.step_time.profile import EngineKey
from vllm_ext.step_time.runtime import StepFeatures

FORMAT = "vllm-ext steps 1"
MOST = 20_000
"""Of one start of an engine: a few thousand fit the model, and a file should not grow for as long as a server runs."""
Row = tuple[int, int, int, float, float]
"""What a step consisted of, and its seconds."""


class StepSamples:
    """Keeps what a `StepTimer` measured, in the order of the steps.

    Args:
        key: What the engine runs.
        vllm_version: For the profile.
    """

    def __init__(self, key: EngineKey, vllm_version: str) -> None:
        self._header = {"format": FORMAT, **key._asdict(), "vllm_version": vllm_version}
        self._new: list[Row] = []
        self._taken = 0

    def observe(self, features: StepFeatures, duration_s: float) -> None:
        """Take one measured step."""
        if duration_s > 0 and self._taken + len(self._new) < MOST:
            self._new.append((*features, duration_s))

    def take(self) -> tuple[dict[str, Any], list[Row]] | None:
        """Return what the engine is and the steps that came since the last time; None: there are none."""
        if not self._new:
            return None
        new, self._new = self._new, []
        self._taken += len(new)
        return self._header, new
