"""How long and how fast a transformer is fine-tuned. Imports nothing heavy."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TuningOptions:
    """How a transformer is fine-tuned."""

    epochs: int = 4
    """At most, at least 1."""
    patience: int = 2
    """Epochs without a better held-out loss before it stops, at least 1."""
    batch_size: int = 16
    """Rows per update, at least 1."""
    learning_rate: float = 1e-4
    """Of the encoder's weights, above 0."""
    head_learning_rate: float = 2e-3
    """Of the new head, above 0."""
    warmup_share: float = 0.1
    """Of the updates of all epochs, 0 to 1; the rate falls linearly to 0 afterwards."""

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")
        for name in ("learning_rate", "head_learning_rate"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be finite and above 0")
        if not 0 <= self.warmup_share <= 1:
            raise ValueError(f"warmup_share={self.warmup_share!r}: must be 0 to 1")

    def updates(self, num_examples: int) -> int:
        """Return how many updates all epochs make."""
        return self.epochs * math.ceil(num_examples / self.batch_size)
